"""Which transports a worker uses, from its configuration and what the system has."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transport import Transport
from kv_transfer.transports.shm import ShmTransport, shared_memory_problem
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tls import TlsContexts
from tandem.cache.pool import PageBuffer
from tandem.config.tree import TransferConfig
from tandem.errors import ConfigError


def receiving_transports(config: TransferConfig) -> list[Transport]:
    """Transports a decode worker listens on, best first.

    Raises:
        ConfigError: shared memory is demanded and this system has none, or a file of
            ``transfer.tls`` cannot be used.
    """
    return _allowed(config, shared_memory_problem(()))


def sending_transports(config: TransferConfig, buffers: Sequence[PageBuffer]) -> list[Transport]:
    """Transports a prefill worker can use for its pool.

    Raises:
        ConfigError: shared memory is demanded and this system has none, or a file of
            ``transfer.tls`` cannot be used.
    """
    return _allowed(config, shared_memory_problem(buffers))


def _allowed(config: TransferConfig, problem: str) -> list[Transport]:
    if problem and config.transport == "shm":
        raise ConfigError("transfer.transport", f"shm is not available: {problem}; use tcp")
    allowed: list[Transport] = []
    if config.transport in ("auto", "shm") and not problem:
        allowed.append(ShmTransport())
    if config.transport in ("auto", "tcp"):
        tls = TlsContexts(config.tls) if config.tls.enabled else None
        allowed.append(TcpTransport(config.host, config.idle_timeout_s, tls))
    return allowed
