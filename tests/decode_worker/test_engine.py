from __future__ import annotations

import asyncio

import pytest

from decode_worker.engine import Reserved
from tandem.errors import PeerLost, RequestError, TransferCorrupt, WorkerError
from tandem.requests import OutputChunk
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE
from tests.decode_worker.conftest import Scenario, World, new_work, tokens_of


def test_the_handed_over_token_comes_first_and_counts(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1))
        reservation = world.receiver.reservations[1]
        assert len(reservation.page_ids) == 2
        assert world.engine.status().running == 1
        reservation.land(70)
        chunks = await call
        assert tokens_of(chunks) == [70, 71, 72, 73]
        assert chunks[-1].finish_reason == "length"
        assert "".join(chunk.text for chunk in chunks) == "FGHI"
        assert [[(row.token_id, row.position) for row in step] for step in world.runner.steps] == [
            [(70, 5)],
            [(71, 6)],
            [(72, 7)],
        ]
        assert reservation.released == 1
        await world.idle()

    scenario(body)


def test_the_target_is_told_before_anything_else(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        events = world.engine.decode(new_work(1))
        assert await anext(events) == Reserved(target=b"target", cached_pages=0)
        await events.aclose()
        await world.idle()

    scenario(body)


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "reason"), [(TINY_EOS_TOKEN_ID, 9, "stop"), (70, 1, "length")]
)
def test_the_first_token_may_be_the_last(
    scenario: Scenario, token_id: int, max_tokens: int, reason: str
) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1, max_tokens=max_tokens))
        world.receiver.reservations[1].land(token_id)
        (chunk,) = await call
        assert (chunk.token_ids, chunk.finish_reason) == ((token_id,), reason)
        assert world.runner.steps == []
        await world.idle()

    scenario(body)


def test_requests_join_and_leave_the_batch_as_they_come(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        early = await world.started(new_work(1, max_tokens=4))
        world.receiver.reservations[1].land(10)
        await asyncio.to_thread(world.runner.begun.wait)
        late = await world.started(new_work(2, max_tokens=3))
        world.receiver.reservations[2].land(100)
        await world.until(lambda s: world.receiver.reservations[2].released == 1)
        world.runner.gate.set()
        assert tokens_of(await early) == [10, 11, 12, 13]
        assert tokens_of(await late) == [100, 101, 102]
        assert [len(step) for step in world.runner.steps] == [1, 2, 2]
        await world.idle()

    scenario(body)


def test_waits_for_pages_in_order_and_takes_them_when_they_are_back(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        first = await world.started(new_work(1, 5, 4))
        second = asyncio.create_task(world.collect(new_work(2, 5, 4)))
        await world.until(lambda s: s.queued == 1)
        assert 2 not in world.receiver.reservations
        world.receiver.reservations[1].land(10)
        await first
        await world.until(lambda s: 2 in world.receiver.reservations)
        world.receiver.reservations[2].land(20)
        assert tokens_of(await second) == [20, 21, 22, 23]

    scenario(body, usable_pages=3)


def test_a_slow_reader_pauses_its_own_request_only(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        slow = world.engine.decode(new_work(1, max_tokens=12))
        await anext(slow)
        world.receiver.reservations[1].land(10)
        first = await anext(slow)
        assert isinstance(first, OutputChunk)
        assert first.token_ids == (10,)
        fast = await world.started(new_work(2, max_tokens=9))
        world.receiver.reservations[2].land(100)
        assert len(tokens_of(await fast)) == 9
        await world.until(lambda s: len(world.runner.steps) >= 8)
        assert max(row.position for step in world.runner.steps for row in step) <= 13
        chunks = [first, *[event async for event in slow if isinstance(event, OutputChunk)]]
        assert tokens_of(chunks) == list(range(10, 22))
        assert len(chunks[1].token_ids) == 3  # as many as may be unread, in one chunk
        await world.idle()

    scenario(body, max_unread=3)


def test_cancelled_in_the_queue(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        first = await world.started(new_work(1))
        waiting = asyncio.create_task(world.collect(new_work(2)))
        await world.until(lambda s: s.queued == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert world.engine.status().queued == 0
        first.cancel()
        await world.idle()

    scenario(body, usable_pages=2)


def test_cancelled_during_the_transfer_its_pages_wait_for_the_writer(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1))
        reservation = world.receiver.reservations[1]
        reservation.quiet.clear()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.until(lambda s: reservation.released == 1)
        assert world.engine.status().pages_used == 2
        reservation.quiet.set()
        await world.idle()

    scenario(body)


def test_cancelled_during_a_step_its_pages_wait_for_the_step(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        call = await world.started(new_work(1))
        other = await world.started(new_work(2))
        for room in (1, 2):
            world.receiver.reservations[room].land(10 * room)
        await asyncio.to_thread(world.runner.begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert world.engine.status().pages_used == 4
        world.runner.gate.set()
        assert tokens_of(await other) == [20, 21, 22, 23]
        await world.idle()

    scenario(body)


def test_a_transfer_that_fails_fails_its_request(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1))
        world.receiver.reservations[1].break_off(PeerLost("r1", "reset"))
        with pytest.raises(PeerLost):
            await call
        await world.idle()
        assert world.receiver.reservations[1].released == 1

    scenario(body)


@pytest.mark.parametrize(
    ("token_id", "prompt_tokens", "match"),
    [(70, 4, "computed 4 of 5"), (TINY_VOCAB_SIZE, 5, "no token has the id"), (-1, 5, "no token")],
)
def test_a_handover_that_does_not_fit_is_refused(
    scenario: Scenario, token_id: int, prompt_tokens: int, match: str
) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1))
        world.receiver.reservations[1].land(token_id, prompt_tokens)
        with pytest.raises(TransferCorrupt, match=match):
            await call
        await world.idle()

    scenario(body)


def test_a_model_error_fails_the_requests_of_its_step_and_the_loop_lives(
    scenario: Scenario,
) -> None:
    async def body(world: World) -> None:
        world.runner.error = ZeroDivisionError("bad kernel")
        call = await world.started(new_work(1))
        world.receiver.reservations[1].land(10)
        with pytest.raises(WorkerError, match="ZeroDivisionError: bad kernel"):
            await call
        await world.idle()
        world.runner.error = None
        call = await world.started(new_work(2))
        world.receiver.reservations[2].land(20)
        assert tokens_of(await call) == [20, 21, 22, 23]

    scenario(body)


def test_a_room_is_one_request(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1))
        with pytest.raises(RequestError, match="in use"):
            await world.collect(new_work(1))
        world.receiver.reservations[1].land(10)
        await call
        del world.receiver.reservations[1]
        again = await world.started(new_work(1))
        world.receiver.reservations[1].land(10)
        await again

    scenario(body)
