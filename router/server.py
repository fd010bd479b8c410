"""The router's two gRPC servers: one for callers, one by which workers join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.admission import Admission
from router.join import RegistryService
from router.life import Lives
from router.links import WorkerLink
from router.registry import Registry
from router.service import ModelCard, TandemService
from router.tokenize import PromptEncoder
from router.validation import Rules
from tandem.auth import ClusterAuth, ClusterToken
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError
from tandem.pb import generate_pb2, generate_pb2_grpc, worker_pb2_grpc
from tandem.rpc import server_options
from tandem.tokenizer.tokenizer import load_tokenizer
from tandem.weights.store import ModelFolder
from tandem.workers import WorkerIdentity

logger = logging.getLogger(__name__)

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["Tandem"].full_name
"""Name of the public service, for health checks and reflection."""

_SPARE_CALLS = 256  # beside Generate: status, health watches, calls that are being refused
_STREAMS_PER_CONNECTION = 1024
_STOP_GRACE_S = 0.5  # for calls that are no requests, such as health watches


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where the router listens, host:port each."""

    public: str
    registry: str


class RouterServer:
    """One router; `run` is its life."""

    def __init__(self, config: TandemConfig, folder: ModelFolder, secret: bytes) -> None:
        """Load the tokenizer.

        Args:
            config: of the whole cluster.
            folder: the served model.
            secret: of the cluster; workers without it cannot join.

        Raises:
            TokenizerError: the model's tokenizer cannot be used.
        """
        self._config = config
        self._token = ClusterToken(secret)
        self._tokenizer = load_tokenizer(folder)
        spec = folder.spec
        self._card = ModelCard(
            name=config.model.served_name or folder.name,
            architecture=spec.architecture,
            weights_digest=folder.weights_digest,
            vocab_size=min(spec.vocab_size, self._tokenizer.vocab_size),
            max_context_tokens=config.model.max_context_tokens or spec.max_context_tokens,
            dtype=config.model.dtype,
            has_chat_template=self._tokenizer.has_chat_template,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_token_ids)),
        )

    async def run(self, stopping: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
        """Serve until ``stopping`` is set and running requests are over.

        Args:
            stopping: starts the drain: health says NOT_SERVING, new requests are refused, and
                running ones have `workers.drain_timeout_s` to finish.
            on_ready: called once both ports are open; workers may not have joined yet.

        Raises:
            ConfigError: a port cannot be bound.
        """
        config, loop = self._config, asyncio.get_running_loop()
        registry = Registry(config.router, config.mode, self._card.weights_digest, self._open_link)
        admission = Admission(
            config.router.max_running_requests, config.router.max_queued_requests, loop.time
        )
        encoder = PromptEncoder(self._tokenizer)
        lives = Lives(self._rules(), encoder, admission, registry, config.router.worker_wait_s)
        service = TandemService(config.mode, self._card, lives, admission, registry)
        checks = health.aio.HealthServicer()
        public, joins = self._public_server(service, checks), self._registry_server(registry)
        try:
            addresses = self._bind(public, joins)
            await _set_health(checks, serving=False)
            await joins.start()
            await public.start()
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(registry.run(), name="registry")
                watching = tasks.create_task(_show_health(checks, registry), name="health")
                logger.info(
                    "serving on %s, workers join at %s", addresses.public, addresses.registry
                )
                on_ready(addresses)
                await stopping.wait()
                await checks.enter_graceful_shutdown()
                await lives.drain(config.workers.drain_timeout_s)
                keeping.cancel()
                watching.cancel()
        finally:
            encoder.close()
            await public.stop(_STOP_GRACE_S)
            await joins.stop(None)

    def _rules(self) -> Rules:
        return Rules(
            model=self._card.name,
            vocab_size=self._card.vocab_size,
            max_context_tokens=self._card.max_context_tokens,
            has_chat_template=self._card.has_chat_template,
            limits=self._config.limits,
        )

    def _public_server(
        self, service: TandemService, checks: health.aio.HealthServicer
    ) -> grpc.aio.Server:
        router = self._config.router
        server = grpc.aio.server(
            options=(
                *server_options(self._config.limits),
                ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
            ),
            maximum_concurrent_rpcs=router.max_running_requests
            + router.max_queued_requests
            + _SPARE_CALLS,
        )
        generate_pb2_grpc.add_TandemServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server

    def _registry_server(self, registry: Registry) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=(ClusterAuth(self._token),), options=server_options(self._config.limits)
        )
        worker_pb2_grpc.add_RegistryServicer_to_server(
            RegistryService(registry, self._config.router.heartbeat_interval_s), server
        )
        return server

    def _bind(self, public: grpc.aio.Server, joins: grpc.aio.Server) -> Addresses:
        router = self._config.router
        return Addresses(
            public=_bind(public, router.host, router.port, "router.port"),
            registry=_bind(joins, router.host, router.registry_port, "router.registry_port"),
        )

    def _open_link(self, worker: WorkerIdentity) -> WorkerLink:
        return WorkerLink(worker, self._token, self._config.limits)


def _bind(server: grpc.aio.Server, host: str, port: int, field: str) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_insecure_port(f"{bracketed}:{port}")
    except RuntimeError as problem:
        raise ConfigError(
            field,
            f"{port} on {host} cannot be bound; is another program using it? Stop that one or "
            f"choose another port (--set {field}=0 takes a free one)",
        ) from problem
    return f"{bracketed}:{bound}"


async def _show_health(checks: health.aio.HealthServicer, registry: Registry) -> None:
    """Report SERVING while a pair of workers is ready."""
    while True:
        change = registry.next_change()
        await _set_health(checks, serving=bool(registry.pairs()))
        await change.wait()


async def _set_health(checks: health.aio.HealthServicer, *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse
    for service in ("", SERVICE):
        await checks.set(service, status.SERVING if serving else status.NOT_SERVING)
