from __future__ import annotations

import asyncio

import pytest

from tandem.errors import WorkerLost
from tandem.serving import Calls


async def call(calls: Calls, release: asyncio.Event) -> str:
    with calls.serve():
        await release.wait()
    return "done"


def test_drains_when_the_last_call_ends() -> None:
    async def scenario() -> None:
        calls, release = Calls("w"), asyncio.Event()
        await calls.drained()
        running = [asyncio.create_task(call(calls, release)) for _ in range(3)]
        await asyncio.sleep(0)
        drained = asyncio.create_task(calls.drained())
        calls.close()
        assert calls.closing
        with pytest.raises(WorkerLost, match="draining"):
            await call(calls, release)
        assert not drained.done()
        release.set()
        assert await asyncio.gather(*running) == ["done"] * 3
        await drained

    asyncio.run(scenario())


def test_ended_calls_fail_with_the_error_and_their_task_lives_on() -> None:
    async def scenario() -> None:
        calls = Calls("w")

        async def handler() -> str:
            with pytest.raises(WorkerLost, match="stopped"):
                await call(calls, asyncio.Event())
            await asyncio.sleep(0)  # the task is not cancelled any more
            return "told the caller"

        running = asyncio.create_task(handler())
        await asyncio.sleep(0)
        calls.end(WorkerLost("w", "stopped"))
        calls.end(WorkerLost("w", "again"))
        assert await running == "told the caller"
        await calls.drained()

    asyncio.run(scenario())


def test_a_cancelled_call_is_cancelled() -> None:
    async def scenario() -> None:
        calls = Calls("w")
        running = asyncio.create_task(call(calls, asyncio.Event()))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await calls.drained()

    asyncio.run(scenario())
