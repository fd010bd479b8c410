from __future__ import annotations

import asyncio

import pytest

from tandem.errors import WorkerError
from tandem.requests import OutputChunk
from tests.decode_worker.conftest import PAGE, Scenario, World, new_work, tokens_of


async def two_that_outgrow_the_pool(
    world: World,
) -> tuple[asyncio.Task[list[OutputChunk]], asyncio.Task[list[OutputChunk]]]:
    """Each grows to 6 pages; for both there are 6."""
    calls = [await world.started(new_work(room, 5, 20)) for room in (1, 2)]
    for room in (1, 2):
        world.receiver.reservations[room].land(100 * room)
    return calls[0], calls[1]


def test_both_end_with_all_their_tokens(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        old, new = await two_that_outgrow_the_pool(world)
        assert tokens_of(await old) == list(range(100, 120))
        assert tokens_of(await new) == list(range(200, 220))
        await world.idle()
        status = world.engine.status()
        assert (status.preemptions, status.pages_swapped) == (1, 0)
        for step in world.runner.steps:
            for row in step:
                assert row.position < len(row.page_ids) * PAGE

    scenario(body, usable_pages=6, growth=0)


def test_cancelled_while_it_is_copied(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.swap.gate.clear()
        old, new = await two_that_outgrow_the_pool(world)
        await asyncio.to_thread(world.swap.begun.wait)
        new.cancel()
        await asyncio.wait([new])
        assert world.engine.status().pages_used == 6  # they are being read
        world.swap.gate.set()
        assert len(tokens_of(await old)) == 20
        await world.idle()
        assert world.engine.status().preemptions == 0

    scenario(body, usable_pages=6, growth=0)


def test_a_copy_that_fails_fails_its_request_only(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.swap.error = RuntimeError("no memory")
        old, new = await two_that_outgrow_the_pool(world)
        with pytest.raises(WorkerError, match="RuntimeError: no memory"):
            await new
        assert len(tokens_of(await old)) == 20
        await world.idle()

    scenario(body, usable_pages=6, growth=0)


def test_only_pages_that_decode_lacks_are_reserved_for_the_transfer(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(new_work(1, 11, 4))
        world.receiver.reservations[1].land(10)
        await call
        await world.idle()
        assert world.engine.status().pages_cached == 3
        again = await world.started(new_work(2, 11, 4))
        reservation = world.receiver.reservations[2]
        first = world.receiver.reservations[1]
        assert (reservation.first_page, len(reservation.page_ids)) == (2, 3)
        assert reservation.page_ids[:2] == first.page_ids[:2]
        assert reservation.page_ids[2] != first.page_ids[2]
        reservation.land(10)
        assert tokens_of(await again) == [10, 11, 12, 13]

    scenario(body)
