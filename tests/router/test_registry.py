"""Who is there, who is lost, and how much each has to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from router.links import WorkerLink
from router.policy import Load, Need
from router.registry import Registry
from tandem.config.tree import RouterConfig
from tandem.errors import WorkerLost
from tandem.workers import ModelIdentity, Role, WorkerIdentity, WorkerStatus

NEED = Need(prompt_tokens=100, total_tokens=120)
READY = WorkerStatus()


class Link:
    """A connection that only counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


def worker(role: Role, number: int = 0, **changes: Any) -> WorkerIdentity:
    identity = WorkerIdentity(
        role=role,
        worker_id=f"{role}-{number}",
        incarnation="first",
        pid=number,
        address=f"10.0.0.1:{100 + number}",
        model=ModelIdentity(
            name="m",
            architecture="llama",
            weights_digest="w",
            dtype="float32",
            vocab_size=9,
            max_context_tokens=9,
        ),
        pages_total=64,
        page_tokens=16,
        layout_digest="l",
    )
    return replace(identity, **changes)


def run(
    test: Callable[[Registry, list[Link]], Awaitable[None]],
    *,
    timeout_s: float = 1000.0,
    interval_s: float = 10.0,
) -> None:
    """Run a test with a registry that keeps itself."""
    links: list[Link] = []

    def open_link(_: WorkerIdentity) -> WorkerLink:
        links.append(Link())
        return cast(WorkerLink, links[-1])

    async def main() -> None:
        config = RouterConfig(heartbeat_interval_s=interval_s, heartbeat_timeout_s=timeout_s)
        registry = Registry(config, "disaggregated", "w", open_link)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(registry.run())
            try:
                await test(registry, links)
            finally:
                keeping.cancel()

    asyncio.run(main())


def test_load_counts_from_the_choice_until_the_end() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        registry.join(worker("prefill"), READY)
        registry.join(worker("decode"), READY)
        prefill, decode = registry.members
        pair = registry.choose(NEED)
        assert pair is not None
        with registry.charge(pair, NEED) as placement:
            assert prefill.load == Load(requests=1, tokens=100)
            assert decode.load == Load(requests=1, pages=8)
            placement.prefilled()
            assert prefill.load == Load(requests=1)
            assert decode.load == Load(requests=1, pages=8)
        assert prefill.load == decode.load == Load()

    run(test)


def test_load_of_a_lost_worker_is_not_its_successor_s() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        registry.join(worker("prefill"), READY)
        registry.join(worker("decode"), READY)
        pair = registry.choose(NEED)
        assert pair is not None
        with registry.charge(pair, NEED):
            registry.join(worker("decode", incarnation="second"), READY)
            assert registry.members[1].load == Load()
        assert registry.members[1].load == Load()

    run(test)


def test_a_new_incarnation_takes_the_old_one_s_place() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        old = registry.join(worker("decode"), READY)
        lost: list[WorkerLost] = []
        with old.member.watch(lost.append):
            new = registry.join(worker("decode", incarnation="second"), READY)
        assert [str(error) for error in lost] == [
            "worker decode-0: another incarnation took its place"
        ]
        assert registry.members == [new.member]
        assert not registry.report(old, READY)
        registry.leave(old)  # its stream ends after the new one began
        assert new.member.ready
        change = registry.next_change()
        await asyncio.sleep(0)
        assert not change.is_set()
        assert links[0].closed == 1
        assert links[1].closed == 0

    run(test)


def test_a_stream_that_comes_back_disturbs_nothing() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        seat = registry.join(worker("decode"), READY)
        lost: list[WorkerLost] = []
        with seat.member.watch(lost.append):
            registry.leave(seat)
            assert not seat.member.ready
            again = registry.join(worker("decode"), READY)
            assert again.member is seat.member
            assert again.member.ready
            assert not registry.report(seat, READY)
            registry.leave(seat)
            assert again.member.ready
        assert lost == []
        assert len(links) == 1

    run(test)


def test_a_silent_worker_is_lost_and_may_join_anew() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        seat = registry.join(worker("decode"), READY)
        lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        with seat.member.watch(lost.set_result):
            assert str(await lost) == "worker decode-0: no sign of life for 0.05 s"
        assert not seat.member.ready
        assert not registry.report(seat, READY)
        again = registry.join(worker("decode"), READY)
        assert again.member is not seat.member
        assert again.member.ready

    run(test, timeout_s=0.05)


def test_a_router_that_slept_itself_gives_its_workers_more_time() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        seat = registry.join(worker("decode"), READY)
        joined_at = seat.member.reported_at
        registry.expire(joined_at + 5 - 1000)  # what was due long ago is noticed only now
        assert seat.member.ready
        seat.member.reported_at -= 2000
        registry.expire(asyncio.get_running_loop().time() - 100)
        assert seat.member.ready
        seat.member.reported_at -= 2000
        registry.expire(asyncio.get_running_loop().time())
        assert seat.member.lost

    run(test)


def test_a_suspect_is_avoided_until_it_reports() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        registry.join(worker("prefill"), READY)
        seat = registry.join(worker("decode"), READY)
        registry.suspect("decode-0")
        assert registry.pairs() == []
        change = registry.next_change()
        assert registry.report(seat, READY)
        assert change.is_set()
        assert len(registry.pairs()) == 1

    run(test)


def test_a_draining_worker_gets_nothing_new_and_is_forgotten_when_it_leaves() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        registry.join(worker("prefill"), READY)
        seat = registry.join(worker("decode"), READY)
        assert registry.report(seat, WorkerStatus(state="draining"))
        assert registry.pairs() == []
        registry.leave(seat)
        assert [member.identity.role for member in registry.members] == ["prefill"]

    run(test)


def test_lost_workers_are_remembered_up_to_a_bound() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        for number in range(100):
            registry.join(worker("decode", number), READY)
        for member in registry.members:
            member.reported_at -= 2000
        registry.expire(asyncio.get_running_loop().time())
        assert len(registry.members) == 64
        assert all(member.lost for member in registry.members)

    run(test)


def test_waiting_ends_with_what_is_missing() -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        with pytest.raises(WorkerLost, match="worker prefill: none is ready"):
            await registry.wait(0.01)
        registry.join(worker("prefill"), READY)
        with pytest.raises(WorkerLost, match="worker decode: none is ready"):
            await registry.wait(0.01)
        registry.join(worker("decode", layout_digest="x"), READY)
        with pytest.raises(WorkerLost, match="none can be paired: K/V layout of prefill"):
            await registry.wait(0.01)
        waiting = asyncio.ensure_future(registry.wait(20))
        await asyncio.sleep(0)
        registry.join(worker("decode", 1), READY)
        await waiting

    run(test)


def test_a_mismatch_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(registry: Registry, links: list[Link]) -> None:
        with caplog.at_level(logging.WARNING):
            registry.join(worker("prefill"), READY)
            registry.join(worker("decode", layout_digest="x"), READY)
            registry.join(worker("decode", 1, layout_digest="x"), READY)
        warned = [record.getMessage() for record in caplog.records]
        assert sum("worker=decode-0 gets no requests" in message for message in warned) == 1
        assert sum("worker=prefill-0 gets no requests" in message for message in warned) == 1

    run(test)
