from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.auth import ClusterAuth, ClusterToken
from tandem.config.tree import LimitsConfig
from tandem.membership import Membership, backoff_s
from tandem.pb import worker_pb2, worker_pb2_grpc
from tandem.workers import ModelIdentity, WorkerIdentity, WorkerStatus

TOKEN = ClusterToken(bytes(32))
IDENTITY = WorkerIdentity(
    role="prefill",
    worker_id="prefill-0",
    incarnation="abc",
    pid=1,
    address="127.0.0.1:1",
    model=ModelIdentity(
        name="m",
        architecture="llama",
        weights_digest="d",
        dtype="float32",
        vocab_size=10,
        max_context_tokens=10,
    ),
    pages_total=4,
    page_tokens=16,
    layout_digest="l",
)


class Registry(worker_pb2_grpc.RegistryServicer):
    """Replies once per stream and keeps what it hears."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.heard: asyncio.Queue[worker_pb2.WorkerReport | None] = asyncio.Queue()

    async def Join(  # noqa: N802 - the name in the proto
        self, request_iterator: AsyncIterator[worker_pb2.WorkerReport], context: Any
    ) -> AsyncIterator[worker_pb2.JoinReply]:
        try:
            async for report in request_iterator:
                self.heard.put_nowait(report)
                if report.HasField("info"):
                    yield worker_pb2.JoinReply(heartbeat_interval_s=self.interval_s)
        finally:
            self.heard.put_nowait(None)


async def serve(registry: Registry, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(interceptors=(ClusterAuth(TOKEN),))
    worker_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


async def heard(registry: Registry) -> worker_pb2.WorkerReport:
    async with asyncio.timeout(30):
        report = await registry.heard.get()
    assert report is not None, "the worker left"
    return report


def test_backoff_doubles_up_to_a_bound_and_is_drawn() -> None:
    longest = [backoff_s(attempt, lambda low, high: high) for attempt in (1, 2, 3, 9, 10_000)]
    assert longest == [0.1, 0.2, 0.4, 3.0, 3.0]
    assert backoff_s(3, lambda low, high: low) == pytest.approx(0.2)
    assert 0.05 <= backoff_s(1) <= 0.1


def test_says_who_it_is_once_and_then_that_it_is_alive() -> None:
    async def scenario() -> None:
        registry = Registry(interval_s=0.01)
        server, port = await serve(registry)
        statuses = iter(WorkerStatus(running=count) for count in range(10_000))
        member = Membership(
            f"127.0.0.1:{port}", IDENTITY, lambda: next(statuses), TOKEN, LimitsConfig()
        )
        run = asyncio.create_task(member.run())
        reports = [await heard(registry) for _ in range(4)]
        assert WorkerIdentity.from_wire(reports[0].info) == IDENTITY
        assert [report.HasField("info") for report in reports] == [True, False, False, False]
        assert [report.status.running for report in reports] == [0, 1, 2, 3]
        assert reports[1].status.worker_id == "prefill-0"
        run.cancel()
        async with asyncio.timeout(30):  # the registry hears of the end by the stream's end
            while await registry.heard.get() is not None:
                pass
        await server.stop(None)

    asyncio.run(scenario())


def test_news_do_not_wait_for_the_next_heartbeat() -> None:
    async def scenario() -> None:
        registry = Registry(interval_s=3600)
        server, port = await serve(registry)
        member = Membership(
            f"127.0.0.1:{port}", IDENTITY, lambda: WorkerStatus(), TOKEN, LimitsConfig()
        )
        run = asyncio.create_task(member.run())
        await heard(registry)
        member.report_now()
        assert not (await heard(registry)).HasField("info")
        run.cancel()
        await server.stop(None)

    asyncio.run(scenario())


def test_joins_again_after_the_registry_was_away() -> None:
    async def scenario() -> None:
        registry = Registry(interval_s=3600)
        server, port = await serve(registry)
        member = Membership(
            f"127.0.0.1:{port}", IDENTITY, lambda: WorkerStatus(), TOKEN, LimitsConfig()
        )
        run = asyncio.create_task(member.run())
        await heard(registry)
        await server.stop(None)
        successor = Registry(interval_s=3600)
        server, _ = await serve(successor, port)
        assert (await heard(successor)).info.incarnation == "abc"
        run.cancel()
        await server.stop(None)

    asyncio.run(scenario())


def test_keeps_trying_when_it_is_refused() -> None:
    async def scenario() -> None:
        registry = Registry(interval_s=3600)
        server, port = await serve(registry)
        stranger = Membership(
            f"127.0.0.1:{port}",
            IDENTITY,
            lambda: WorkerStatus(),
            ClusterToken(bytes(31) + b"x"),
            LimitsConfig(),
        )
        run = asyncio.create_task(stranger.run())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await registry.heard.get()
        assert not run.done()
        run.cancel()
        await server.stop(None)

    asyncio.run(scenario())
