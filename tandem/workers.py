"""Who a worker is and how it is doing, as the router and `tandem status` see it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from tandem.config.resolve import ResolvedConfig
from tandem.config.tree import TandemConfig
from tandem.errors import WorkerError
from tandem.pb import generate_pb2, worker_pb2
from tandem.weights.store import ModelFolder

Role = Literal["prefill", "decode"]
State = Literal["ready", "draining", "unreachable"]


def new_incarnation() -> str:
    """A name for this start of a process; peers key what they know about it by this name."""
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """The model a worker has loaded."""

    name: str
    architecture: str
    weights_digest: str
    dtype: str
    vocab_size: int
    max_context_tokens: int


def model_identity(
    config: TandemConfig, folder: ModelFolder, resolved: ResolvedConfig
) -> ModelIdentity:
    """The identity of ``folder`` as this cluster serves it."""
    return ModelIdentity(
        name=config.model.served_name or folder.name,
        architecture=folder.spec.architecture,
        weights_digest=folder.weights_digest,
        dtype=resolved.dtype,
        vocab_size=folder.spec.vocab_size,
        max_context_tokens=resolved.max_context_tokens,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """What stays the same while one worker process lives."""

    role: Role
    worker_id: str
    """Stable over restarts."""
    incarnation: str
    """New with every start of the process."""
    pid: int
    address: str
    """host:port of its gRPC server."""
    model: ModelIdentity
    pages_total: int
    """Pages that requests can hold."""
    page_tokens: int
    layout_digest: str
    """Of its K/V layout; workers pair only when equal."""

    def to_wire(self) -> worker_pb2.WorkerInfo:
        """As the first report of `Registry.Join` carries it."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.incarnation,
            pid=self.pid,
            address=self.address,
            model=worker_pb2.ModelIdentity(
                name=self.model.name,
                architecture=self.model.architecture,
                weights_digest=self.model.weights_digest,
                dtype=self.model.dtype,
                vocab_size=self.model.vocab_size,
                max_context_tokens=self.model.max_context_tokens,
            ),
            pages_total=self.pages_total,
            page_tokens=self.page_tokens,
            layout_digest=self.layout_digest,
        )

    @classmethod
    def from_wire(cls, message: worker_pb2.WorkerInfo) -> WorkerIdentity:
        """The identity in ``message``.

        Raises:
            WorkerError: a field without which the worker cannot be used is absent or unknown.
        """
        for field in ("worker_id", "incarnation", "address", "pages_total", "page_tokens"):
            if not getattr(message, field):
                raise WorkerError(message.worker_id, f"joined without {field}")
        return cls(
            role=_role(message.worker_id, message.role),
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            pid=message.pid,
            address=message.address,
            model=ModelIdentity(
                name=message.model.name,
                architecture=message.model.architecture,
                weights_digest=message.model.weights_digest,
                dtype=message.model.dtype,
                vocab_size=message.model.vocab_size,
                max_context_tokens=message.model.max_context_tokens,
            ),
            pages_total=message.pages_total,
            page_tokens=message.page_tokens,
            layout_digest=message.layout_digest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What changes from one report to the next."""

    state: State = "ready"
    pages_used: int = 0
    """Held by requests; pages that only the prefix cache holds do not count."""
    pages_cached: int = 0
    """Kept for prefix reuse, free to take."""
    pages_swapped: int = 0
    """Decode: held in host memory for preempted requests, on top of ``pages_used``."""
    preemptions: int = 0
    """Decode: requests moved to host memory since the process started."""
    running: int = 0
    queued: int = 0
    transfers_pending: int = 0
    graph: str = ""
    """Decode: which batch sizes replay a graph, or "eager"."""

    def to_wire(self, identity: WorkerIdentity) -> generate_pb2.WorkerState:
        """Status and identity in the one message that reports and `GetStatus` use."""
        return generate_pb2.WorkerState(
            worker_id=identity.worker_id,
            role=identity.role,
            pid=identity.pid,
            incarnation=identity.incarnation,
            state=self.state,
            address=identity.address,
            pages_used=self.pages_used,
            pages_cached=self.pages_cached,
            pages_swapped=self.pages_swapped,
            preemptions=self.preemptions,
            pages_total=identity.pages_total,
            running=self.running,
            queued=self.queued,
            transfers_pending=self.transfers_pending,
            graph=self.graph,
        )

    @classmethod
    def from_wire(cls, message: generate_pb2.WorkerState) -> WorkerStatus:
        """The status in ``message``.

        Raises:
            WorkerError: its state is unknown.
        """
        return cls(
            state=_state(message.worker_id, message.state),
            pages_used=message.pages_used,
            pages_cached=message.pages_cached,
            pages_swapped=message.pages_swapped,
            preemptions=message.preemptions,
            running=message.running,
            queued=message.queued,
            transfers_pending=message.transfers_pending,
            graph=message.graph,
        )


def _role(worker_id: str, name: str) -> Role:
    for role in get_args(Role):
        if role == name:
            return role  # type: ignore[no-any-return]
    raise WorkerError(worker_id, f"has the unknown role {name!r}")


def _state(worker_id: str, name: str) -> State:
    for state in get_args(State):
        if state == name:
            return state  # type: ignore[no-any-return]
    raise WorkerError(worker_id, f"is in the unknown state {name!r}")
