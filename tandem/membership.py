"""A worker's side of `Registry.Join`: one stream that says who it is, then that it is alive."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
import grpc.aio

from tandem.auth import ClusterToken
from tandem.config.tree import LimitsConfig
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.rpc import channel_options
from tandem.workers import WorkerIdentity, WorkerStatus

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 3.0


def backoff_s(attempt: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """How long to wait before another try: doubles each time, half of it drawn.

    Args:
        attempt: tries that failed in a row, at least 1.
        uniform: draws a number between two others.
    """
    longest = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempt - 1, 10))
    return uniform(longest / 2, longest)


class Membership:
    """Keeps a worker joined to the router until it is cancelled, over restarts of the router."""

    def __init__(
        self,
        registry_address: str,
        identity: WorkerIdentity,
        status: Callable[[], WorkerStatus],
        token: ClusterToken,
        limits: LimitsConfig,
    ) -> None:
        """Nothing happens before `run`.

        Args:
            registry_address: host:port of the router's registry.
            identity: sent first, on every new stream.
            status: asked for each report.
            token: proves that the worker belongs to the cluster.
            limits: message sizes.
        """
        self._registry_address = registry_address
        self._identity = identity
        self._status = status
        self._token = token
        self._limits = limits
        self._report_now = asyncio.Event()
        self._interval_s = 1.0
        self._failures = 0

    def report_now(self) -> None:
        """Report at once and not at the next heartbeat: something changed."""
        self._report_now.set()

    async def run(self) -> None:
        """Join, report, and join again when the stream breaks; never returns."""
        while True:
            try:
                await self._join()
                reason = "the registry closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            self._failures += 1
            pause_s = backoff_s(self._failures)
            logger.log(
                logging.WARNING if self._failures == 1 else logging.DEBUG,
                "worker=%s left registry=%s reason=%s; joining again in %.1f s",
                self._identity.worker_id,
                self._registry_address,
                reason,
                pause_s,
            )
            await asyncio.sleep(pause_s)

    async def _join(self) -> None:
        async with grpc.aio.insecure_channel(
            self._registry_address, options=channel_options(self._limits)
        ) as channel:
            stub: worker_pb2_grpc.RegistryAsyncStub = worker_pb2_grpc.RegistryStub(channel)
            replies = stub.Join(self._reports(), metadata=self._token.metadata)
            joined = False
            async for reply in replies:
                if reply.heartbeat_interval_s > 0:
                    self._interval_s = reply.heartbeat_interval_s
                    self._report_now.set()  # the pause that has begun may be too long
                if not joined:
                    joined = True
                    self._failures = 0
                    logger.info(
                        "worker=%s joined registry=%s heartbeat_interval_s=%g",
                        self._identity.worker_id,
                        self._registry_address,
                        self._interval_s,
                    )

    async def _reports(self) -> AsyncIterator[worker_pb2.WorkerReport]:
        yield worker_pb2.WorkerReport(info=self._identity.to_wire(), status=self._state())
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._report_now.wait()
            self._report_now.clear()
            yield worker_pb2.WorkerReport(status=self._state())

    def _state(self) -> generate_pb2.WorkerState:
        return self._status().to_wire(self._identity)
