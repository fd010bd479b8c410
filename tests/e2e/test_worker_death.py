"""kill -9 of a worker: idle, the next request succeeds; busy, an error soon and never a hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import grpc
import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.testing.calls import OK, generate, greedy, idle

pytestmark = pytest.mark.ray

ROLES = ("prefill", "decode")


async def _pid(stub: generate_pb2_grpc.TandemAsyncStub, role: str) -> int:
    status = await stub.GetStatus(generate_pb2.GetStatusRequest())
    (pid,) = [worker.pid for worker in status.workers if worker.role == role]
    return pid


@pytest.mark.parametrize("role", ROLES)
def test_while_idle_the_next_request_succeeds(with_stub: Callable[..., None], role: str) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        before = await generate(stub, greedy("hello", max_tokens=8))
        pid = await _pid(stub, role)
        os.kill(pid, signal.SIGKILL)
        after = await generate(stub, greedy("hello", max_tokens=8))
        assert after.code is OK, after.message
        assert after.token_ids == before.token_ids
        assert await _pid(stub, role) != pid
        await idle(stub)

    with_stub(scenario)


@pytest.mark.parametrize("role", ROLES)
def test_while_busy_every_stream_ends(with_stub: Callable[..., None], role: str) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        pid = await _pid(stub, role)
        long = [n % 251 for n in range(400)]
        calls = [
            asyncio.create_task(generate(stub, greedy(long[n:], max_tokens=100))) for n in range(8)
        ]
        first = stub.Generate(greedy("hello", max_tokens=400))
        await first.read()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):  # a hang guard: a minute would be a hang
            outcomes = await asyncio.gather(*calls)
        for outcome in outcomes:
            assert outcome.code in (OK, grpc.StatusCode.UNAVAILABLE), outcome
            assert outcome.code is OK or outcome.message
        first.cancel()
        assert (await generate(stub, greedy("hello", max_tokens=8))).code is OK
        await idle(stub)

    with_stub(scenario)
