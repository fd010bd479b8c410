"""Blocks that others can stop."""

from __future__ import annotations

import asyncio

import pytest

from router.scope import Scope, stoppable
from tandem.errors import DeadlineExceeded, RequestCancelled, ServingError, WorkerLost

FIRST, SECOND = WorkerLost("a", "first"), WorkerLost("b", "second")


def test_a_block_that_ends_by_itself_is_left_alone() -> None:
    async def main() -> None:
        async with stoppable() as scope:
            pass
        scope.stop(FIRST)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_stop_ends_the_block_with_its_error() -> None:
    async def main() -> None:
        async with stoppable() as scope:
            scope.stop(FIRST)
            scope.stop(SECOND)
            await asyncio.Event().wait()

    with pytest.raises(WorkerLost, match="first"):
        asyncio.run(main())


def test_a_stop_that_comes_sooner_wins_over_one_that_was_put_off() -> None:
    async def main() -> None:
        async with stoppable() as scope:
            scope.stop(FIRST, after_s=30)
            scope.stop(SECOND)
            await asyncio.Event().wait()

    with pytest.raises(WorkerLost, match="second"):
        asyncio.run(main())


def test_time_runs_out_with_the_error_agreed_on() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            async with stoppable(0.001, DeadlineExceeded("r", "its deadline passed")):
                await asyncio.Event().wait()

    asyncio.run(main())


def test_blocks_nest() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        try:
            async with stoppable() as outer:
                try:
                    async with stoppable() as inner:
                        inner.stop(FIRST)
                        await asyncio.Event().wait()
                except ServingError as error:
                    seen.append(str(error))
                outer.stop(RequestCancelled("r", "aborted"))
                await asyncio.Event().wait()
        except ServingError as error:
            seen.append(str(error))
        return seen

    assert asyncio.run(main()) == ["worker a: first", "request r: aborted"]


def test_cancelling_the_task_is_no_stop() -> None:
    async def main() -> None:
        scopes: list[Scope] = []

        async def work() -> None:
            async with stoppable() as scope:
                scopes.append(scope)
                await asyncio.Event().wait()

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        scopes[0].stop(FIRST)

    asyncio.run(main())


def test_a_time_out_of_the_block_s_own_stays_what_it_is() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with stoppable():
                raise TimeoutError

    asyncio.run(main())
