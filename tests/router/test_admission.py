"""Slots and the bounded queue before them."""

from __future__ import annotations

import asyncio

import pytest

from router.admission import Admission
from tandem.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests that hold their slot until told to end."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.running: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, number: int) -> None:
        self.ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.ensure_future(self._run(number))

    async def _run(self, number: int) -> None:
        async with self.admission.slot():
            self.running.append(number)
            await self.ends[number].wait()


def test_slots_are_given_in_order_of_arrival() -> None:
    async def main() -> None:
        requests = Requests(Admission(2, 10, Clock()))
        for number in range(5):
            requests.start(number)
        await settle()
        assert requests.running == [0, 1]
        assert (requests.admission.running, requests.admission.queued) == (2, 3)
        for number in (1, 0, 2, 3, 4):
            requests.ends[number].set()
            await settle()
        assert requests.running == [0, 1, 2, 3, 4]
        assert (requests.admission.running, requests.admission.queued) == (0, 0)

    asyncio.run(main())


def test_a_full_queue_refuses_and_tells_when_to_come_back() -> None:
    async def main() -> None:
        clock = Clock()
        admission = Admission(1, 2, clock)
        requests = Requests(admission)
        for number in range(3):
            requests.start(number)
        await settle()
        with pytest.raises(Overloaded) as caught:
            admission.refuse_if_full()
        assert caught.value.retry_after_s >= 1
        with pytest.raises(Overloaded):
            async with admission.slot():
                raise AssertionError("there was no slot")
        first = admission.retry_after_s
        clock.now = 1000.0
        for number in range(3):
            requests.ends[number].set()
        await settle()
        assert admission.retry_after_s > first  # requests have been seen to take long
        assert admission.retry_after_s <= 60

    asyncio.run(main())


def test_a_cancelled_request_leaves_the_queue_unrun() -> None:
    async def main() -> None:
        requests = Requests(Admission(1, 10, Clock()))
        for number in range(3):
            requests.start(number)
        await settle()
        requests.tasks[1].cancel()
        await settle()
        assert requests.admission.queued == 1
        requests.ends[0].set()
        await settle()
        assert requests.running == [0, 2]
        requests.ends[2].set()
        await settle()
        assert requests.admission.running == 0

    asyncio.run(main())


def test_a_slot_that_comes_together_with_the_cancellation_is_passed_on() -> None:
    async def main() -> None:
        requests = Requests(Admission(1, 10, Clock()))
        for number in range(3):
            requests.start(number)
        await settle()
        requests.ends[0].set()
        await asyncio.sleep(0)  # request 0 ends and grants its slot; request 1 has not run yet
        assert requests.admission.queued == 1
        requests.tasks[1].cancel()
        await settle()
        assert requests.running == [0, 2]
        requests.ends[2].set()
        await settle()
        assert (requests.admission.running, requests.admission.queued) == (0, 0)

    asyncio.run(main())


def test_cancelling_first_and_freeing_in_the_same_turn_loses_no_slot() -> None:
    async def main() -> None:
        requests = Requests(Admission(1, 10, Clock()))
        for number in range(3):
            requests.start(number)
        await settle()
        requests.tasks[1].cancel()
        requests.tasks[0].cancel()
        await settle()
        assert requests.running == [0, 2]
        requests.tasks[2].cancel()
        await settle()
        assert (requests.admission.running, requests.admission.queued) == (0, 0)

    asyncio.run(main())
