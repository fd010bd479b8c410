"""One deployment from start to end: started in order, stopped in order, watched in between."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.cluster import Cluster, Placement
from launcher.supervise import Member, Show
from tandem.actors import HostState
from tandem.config.tree import TandemConfig
from tandem.errors import WorkerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DRAIN_MARGIN_S = 10.0  # for what a server does after its last request has ended


class Deployment:
    """A router and its workers on a Ray cluster."""

    def __init__(
        self, config: TandemConfig, cluster: Cluster, placement: Placement, show: Show
    ) -> None:
        """Nothing is started yet.

        Args:
            config: with all ports fixed.
            cluster: where to place the actors.
            placement: creates them.
            show: told how they start.
        """
        self._config = config
        self._cluster = cluster
        self._placement = placement
        self._show = show
        self._router: Member | None = None
        self._workers: list[Member] = []
        self._stopping = asyncio.Event()

    async def run(self, serving: Callable[[str], Awaitable[bool]]) -> None:
        """Start, serve, and stop at SIGINT, SIGTERM or when ``serving`` says so.

        Args:
            serving: called with the public address once requests are served; whether to go on.

        Raises:
            WorkerError: a member cannot start, or cannot be restarted any more.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        address = await self._unless_stopped(self._start())
        if address is None:
            return
        try:
            async with asyncio.TaskGroup() as watch:
                followers = [
                    watch.create_task(member.follow(self._restart), name=f"follow/{member.name}")
                    for member in self._members
                ]
                if await self._unless_stopped(serving(address)):
                    await self._stopping.wait()
                for follower in followers:
                    follower.cancel()
        except* WorkerError as group:
            raise group.exceptions[0] from None
        finally:
            self._stopping.clear()  # from here on a second signal means at once
            await self._unless_stopped(self._drain())

    @property
    def _members(self) -> Sequence[Member]:
        return [*([self._router] if self._router else []), *self._workers]

    async def _start(self) -> str:
        timeout_s = self._config.ray.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                router = self._router = self._member("router", self._placement.router())
                public, registry = (await router.ready()).addresses
                self._workers = [
                    self._member(name, actor)
                    for name, actor in self._placement.workers(registry).items()
                ]
                await self._all_ready()
                await _health_is_serving(public)
                return public
        except TimeoutError:
            late = next((m for m in self._members if not _is_ready(m.state)), self._members[0])
            doing = late.state.detail if late.state and late.state.detail else "no answer yet"
            raise WorkerError(
                late.name, f"not ready after {timeout_s:g} s (ray.start_timeout_s): {doing}"
            ) from None

    def _member(self, name: str, actor: Any) -> Member:
        return Member(name, actor, self._show, self._cluster.last_words)

    async def _all_ready(self) -> None:
        try:
            async with asyncio.TaskGroup() as starts:
                for member in self._workers:
                    starts.create_task(member.ready(), name=f"start/{member.name}")
        except* WorkerError as group:
            raise group.exceptions[0] from None

    def _restart(self, actor: Any) -> None:
        self._cluster.ray.kill(actor, no_restart=False)

    async def _drain(self) -> None:
        """Router first, so that nothing new reaches the workers, which finish what runs."""
        timeout_s = self._config.workers.drain_timeout_s + _DRAIN_MARGIN_S
        router = self._router
        assert router is not None
        await router.stop(timeout_s)
        await asyncio.gather(*(worker.stop(timeout_s) for worker in self._workers))

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of ``work``, or None after a signal, with ``work`` cancelled."""
        working = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._stopping.wait(), name="signal")
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            return None
        return working.result()


def _is_ready(state: HostState | None) -> bool:
    return state is not None and state.phase == "ready"


async def _health_is_serving(address: str) -> None:
    """Wait until the server calls itself SERVING: requests find workers."""
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
