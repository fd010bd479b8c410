"""Workers that die, hang, return or do not fit together, with fake workers behind proxies."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2

from router.testing import (
    Cluster,
    FakeDecode,
    FakePrefill,
    FakeWorker,
    Session,
    cluster,
    forever,
)
from tandem.config.tree import TandemConfig
from tandem.testing.calls import greedy
from tandem.weights.store import ModelFolder

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def worker_state(running: Cluster, worker_id: str, state: str) -> None:
    """Wait until the router shows the worker in ``state``."""
    async with asyncio.timeout(20):
        while True:
            status = await running.status()
            if any((w.worker_id, w.state) == (worker_id, state) for w in status.workers):
                return
            await asyncio.sleep(0.02)  # nothing announces it to callers of GetStatus


async def stall_after_one_token(session: Session) -> None:
    await session.reserve()
    await session.arrival()
    await session.send(0, [65])
    await forever(session)


@pytest.mark.parametrize("role", [FakePrefill, FakeDecode])
def test_the_next_request_after_an_idle_worker_was_killed_succeeds(
    config: TandemConfig, folder: ModelFolder, role: type[FakeWorker]
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            assert (await running.ask()).code is Code.OK
            workers = [*running.prefill, *running.decode]
            victim = next(worker for worker in workers if isinstance(worker, role))
            dying = asyncio.ensure_future(victim.die())
            asking = asyncio.ensure_future(running.ask())  # the router has not noticed yet
            await dying
            await running.add(role(victim.identity.worker_id, folder))
            assert (await asking).code is Code.OK, await asking

    asyncio.run(main())


@pytest.mark.parametrize("role", [FakePrefill, FakeDecode])
def test_a_worker_that_dies_as_the_call_arrives_is_replaced_unseen(
    config: TandemConfig, folder: ModelFolder, role: type[FakeWorker]
) -> None:
    """The view is stale: the registry still holds the worker for ready."""

    async def main() -> None:
        async with cluster(config, folder, num_prefill=2, num_decode=2) as running:
            workers = [*running.prefill, *running.decode]
            victim = next(worker for worker in workers if isinstance(worker, role))
            victim.calls_proxy.cut()
            for _ in range(4):
                outcome = await running.ask()
                assert outcome.code is Code.OK, outcome
            assert not victim.started

    asyncio.run(main())


@pytest.mark.parametrize("role", [FakePrefill, FakeDecode])
def test_a_busy_worker_s_death_is_told_by_name(
    config: TandemConfig,
    folder: ModelFolder,
    role: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.life._STALE_S", 0.0)  # as if it had worked for long

    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill, decode = running.prefill[0], running.decode[0]
            victim: FakeWorker = prefill if isinstance(prefill, role) else decode
            prefill.script = forever
            call = asyncio.ensure_future(running.ask())
            await prefill.until(lambda: bool(prefill.started))
            await victim.die()
            outcome = await call
            assert outcome.code is Code.UNAVAILABLE
            assert f"worker {victim.identity.worker_id}" in outcome.message
            other = decode if victim is prefill else prefill
            await other.until(lambda: len(other.cancelled) == 1)

    asyncio.run(main())


def test_decode_s_death_between_tokens_is_told_by_name(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_decode=2) as running:
            for decode in running.decode:
                decode.script = stall_after_one_token
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            await anext(aiter(call))
            victim = next(decode for decode in running.decode if decode.started)
            await victim.die()
            assert await call.code() is Code.UNAVAILABLE
            assert f"worker {victim.identity.worker_id}" in (await call.details() or "")

    asyncio.run(main())


def test_a_hung_worker_s_requests_end_and_it_serves_again_when_it_goes_on(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            script, decode.script = decode.script, stall_after_one_token
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            await anext(aiter(call))
            decode.freeze()
            assert await call.code() is Code.UNAVAILABLE
            details = await call.details()
            assert details == "worker decode-0: no sign of life for 1 s"
            await worker_state(running, "decode-0", "unreachable")
            decode.script = script
            decode.thaw()
            assert (await running.ask()).code is Code.OK
            await worker_state(running, "decode-0", "ready")

    asyncio.run(main())


def test_a_broken_registry_stream_disturbs_nothing_that_runs(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode, go_on = running.decode[0], asyncio.Event()

            async def script(session: Session) -> None:
                await session.reserve()
                await session.arrival()
                await session.send(0, [65])
                await go_on.wait()
                await session.send(1, [66], 1)

            decode.script = script
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            stream = aiter(call)
            await anext(stream)
            health = running.health()
            assert await anext(health) == SERVING
            decode.reports_proxy.reset()
            assert await anext(health) == NOT_SERVING
            assert await anext(health) == SERVING
            go_on.set()
            assert [response.WhichOneof("event") async for response in stream][-1] == "finished"

    asyncio.run(main())
