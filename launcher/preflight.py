"""Checks before anything is started: each failure is one line with its remedy."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from dataclasses import dataclass, replace

from tandem.config.resolve import (
    ResolvedConfig,
    available_memory_bytes,
    resolve,
    usable_cores,
    workers_of,
)
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError
from tandem.weights.store import ModelFolder, Progress, prepare

logger = logging.getLogger(__name__)

RAY_BYTES = 500_000_000
"""What a local Ray takes at rest, its object store's bookkeeping included."""
WORKER_BYTES = 350_000_000
"""What a worker takes besides weights, K and V: the interpreter, PyTorch, activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A deployment that passed all checks."""

    config: TandemConfig
    """With concrete ports, and with concrete pages where all workers run on this machine."""
    resolved: ResolvedConfig
    folder: ModelFolder

    @property
    def cpus(self) -> int:
        """Compute threads of all workers together."""
        config, resolved = self.config, self.resolved
        if config.mode == "colocated":
            return config.decode.replicas * resolved.decode_threads
        return (
            config.prefill.replicas * resolved.prefill_threads
            + config.decode.replicas * resolved.decode_threads
        )


def prepare_deployment(config: TandemConfig, progress: Progress) -> Plan:
    """Make all checks, and the model ready to load.

    Raises:
        ConfigError: a setting cannot work on this machine.
        WeightsError: the model cannot be had.
    """
    config = fix_ports(config)
    check_compiler(config)
    folder = prepare(config.model.name, progress)
    available_bytes = available_memory_bytes()
    resolved = resolve(config, folder.spec, usable_cores(), available_bytes)
    if not config.ray.address:
        check_memory(config, resolved, folder, available_bytes)
        # Every start of a worker, also after a death, takes the same pages.
        config = replace(
            config,
            prefill=replace(config.prefill, num_pages=resolved.prefill_pages),
            decode=replace(config.decode, num_pages=resolved.decode_pages),
        )
    return Plan(config=config, resolved=resolved, folder=folder)


def fix_ports(config: TandemConfig) -> TandemConfig:
    """Replace ports 0 by free ones, so that a restarted router is found where it was.

    Raises:
        ConfigError: a port cannot be bound.
    """
    port = _bindable(config.router.host, config.router.port, "router.port")
    registry_port = _bindable(
        config.router.host, config.router.registry_port, "router.registry_port"
    )
    return replace(config, router=replace(config.router, port=port, registry_port=registry_port))


def _bindable(host: str, port: int, setting: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC binds it: connections of an earlier run that linger do not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                setting,
                f"{host}:{port} cannot be bound ({error.strerror}); stop what uses it, or choose "
                f"another with --set {setting}=N (0 takes a free one)",
            ) from error
        bound: int = probe.getsockname()[1]
        return bound


def check_compiler(config: TandemConfig) -> None:
    """Look for the C++ compiler that graph mode builds its kernels with.

    Raises:
        ConfigError: there is none, and `decode.graph` is on.
    """
    compiler = os.environ.get("CXX") or "g++"
    if config.decode.graph == "off" or shutil.which(compiler):
        return
    problem = f"graph mode needs a C++ compiler, and {compiler} was not found"
    if config.decode.graph == "on":
        raise ConfigError("decode.graph", f"{problem}; install g++, set CXX, or set it to auto")
    logger.warning("%s: decode steps run eagerly, slower; install g++ or set CXX", problem)


def check_memory(
    config: TandemConfig, resolved: ResolvedConfig, folder: ModelFolder, available_bytes: int
) -> None:
    """Compare what Ray and all workers will take with what there is.

    Raises:
        ConfigError: it is too much.
    """
    weights_bytes = sum(file.stat().st_size for file in folder.path.glob("*.safetensors"))
    token_bytes = sum(group.nbytes(1) for group in folder.spec.cache_groups(1, resolved.dtype))
    prefill_tokens = (resolved.prefill_pages + 1) * config.prefill_page_tokens
    decode_tokens = (resolved.decode_pages + 1) * config.decode_page_tokens
    tokens = config.prefill.replicas * prefill_tokens + config.decode.replicas * decode_tokens
    workers = workers_of(config)
    needed_bytes = RAY_BYTES + workers * (WORKER_BYTES + weights_bytes) + tokens * token_bytes
    if needed_bytes > available_bytes:
        raise ConfigError(
            "model.name",
            f"{folder.name} on {workers} workers needs about {_gb(needed_bytes)} "
            f"({_gb(weights_bytes)} of weights each, {_gb(tokens * token_bytes)} of K and V in "
            f"all), but {_gb(available_bytes)} are available; close other programs, take fewer "
            "replicas or num_pages, a smaller model, or mode=colocated",
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
