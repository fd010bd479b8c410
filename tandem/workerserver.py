"""What prefill and decode workers share: gRPC server, health, membership, draining.

A worker is `ready` until it is told to stop, then `draining`: it refuses new requests, lets those
that run finish for `workers.drain_timeout_s`, ends the rest with an error, and leaves the registry
last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from tandem.auth import ClusterAuth, ClusterToken
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError, WorkerLost
from tandem.membership import Membership
from tandem.pb import generate_pb2
from tandem.rpc import server_options
from tandem.serving import Calls
from tandem.workers import WorkerIdentity, WorkerStatus

logger = logging.getLogger(__name__)

_WILDCARDS = ("", "0.0.0.0", "::", "[::]")


class Engine(Protocol):
    """The part of a worker that computes."""

    async def run(self) -> None:
        """Compute until cancelled."""
        ...

    def status(self) -> WorkerStatus:
        """Counts as of now."""
        ...


GetState = Callable[[], generate_pb2.WorkerState]
"""Who the worker is and how it is doing, as of now."""


class WorkerServer:
    """Serves one engine to the router."""

    def __init__(
        self,
        config: TandemConfig,
        secret: bytes,
        worker_id: str,
        registry_address: str | None,
        engine: Engine,
    ) -> None:
        """Nothing happens before `run`.

        Args:
            config: the whole tree.
            secret: the cluster's.
            worker_id: stable over restarts.
            registry_address: host:port at which the router registers workers; None joins nowhere.
            engine: runs as long as the server does.
        """
        self._config = config
        self._token = ClusterToken(secret)
        self._worker_id = worker_id
        self._registry_address = registry_address
        self._engine = engine
        self.calls = Calls(worker_id)
        """Every request of the router is served inside `calls.serve`."""

    async def run(
        self,
        stopping: asyncio.Event,
        on_ready: Callable[[str], None],
        describe: Callable[[str], WorkerIdentity],
        add_service: Callable[[grpc.aio.Server, GetState], None],
    ) -> None:
        """Serve until ``stopping`` is set and the worker has drained.

        Args:
            stopping: set by whoever wants the worker to stop.
            on_ready: called with host:port once requests are accepted.
            describe: makes the worker's identity from its address.
            add_service: adds the role's own service to the server.

        Raises:
            ConfigError: the server cannot be bound.
            ExceptionGroup: the engine failed; the process must end.
        """
        server = grpc.aio.server(
            interceptors=(ClusterAuth(self._token),), options=server_options(self._config.limits)
        )
        identity = describe(_bind(server, self._config.workers.host))
        add_service(server, lambda: self._status().to_wire(identity))
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = tasks.create_task(self._engine.run(), name=f"{self._worker_id}/engine")
                await server.start()
                membership = self._membership(identity)
                joined = tasks.create_task(membership.run()) if membership else None
                on_ready(identity.address)
                logger.info("worker=%s ready address=%s", self._worker_id, identity.address)
                await stopping.wait()
                await self._drain(checks.enter_graceful_shutdown, membership)
                if joined is not None:
                    joined.cancel()
                engine.cancel()
        finally:
            await server.stop(grace=0)
        logger.info("worker=%s stopped", self._worker_id)

    def _status(self) -> WorkerStatus:
        status = self._engine.status()
        return replace(status, state="draining") if self.calls.closing else status

    def _membership(self, identity: WorkerIdentity) -> Membership | None:
        if self._registry_address is None:
            return None
        return Membership(
            self._registry_address, identity, self._status, self._token, self._config.limits
        )

    async def _drain(
        self, say_not_serving: Callable[[], Awaitable[None]], membership: Membership | None
    ) -> None:
        self.calls.close()
        await say_not_serving()
        if membership is not None:
            membership.report_now()
        limit_s = self._config.workers.drain_timeout_s
        logger.info("worker=%s draining timeout_s=%g", self._worker_id, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                await self.calls.drained()
        except TimeoutError:
            self.calls.end(
                WorkerLost(self._worker_id, f"stopped; the request ran longer than {limit_s:g} s")
            )
            await self.calls.drained()


def _bind(server: grpc.aio.Server, host: str) -> str:
    if host in _WILDCARDS:
        raise ConfigError(
            "workers.host", f"{host!r} is no address to call; name this machine's own"
        )
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        port = server.add_insecure_port(f"{bracketed}:0")
    except RuntimeError as error:
        raise ConfigError("workers.host", f"cannot listen on {host}: {error}") from None
    return f"{bracketed}:{port}"
