"""What a transport is: registered memory, connections that carry frames, and payloads in flight.

The protocol above (fence, credits, epochs) is the same for all of them. Destinations and sources
are named as spans of registered buffers, never as addresses, so a transport that moves bytes by
itself (RDMA reads posted by decode) fits behind the same verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.wire import Header
from tandem.cache.pool import PageBuffer


class ConnectionLost(Exception):
    """The other end closed, died, or was cut off."""


class Span(NamedTuple):
    """Consecutive bytes of one registered buffer."""

    buffer: int
    """Position of the buffer as registered, which is its group's position in the layout."""
    offset: int
    nbytes: int


class RegisteredMemory:
    """A pool's buffers, in the forms that transports need."""

    def __init__(self, buffers: Sequence[PageBuffer]) -> None:
        self.buffers = tuple(buffers)
        self.arrays: tuple[npt.NDArray[np.uint8], ...] = tuple(
            np.frombuffer(buffer.memory, dtype=np.uint8) for buffer in buffers
        )

    def view(self, span: Span) -> memoryview:
        """Bytes of ``span``, writable."""
        return self.buffers[span.buffer].memory[span.offset : span.offset + span.nbytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutFrame:
    """A frame to write; the bytes of ``spans`` are its payload, in order."""

    header: Header
    body: bytes = b""
    spans: tuple[Span, ...] = ()


class Payload(Protocol):
    """The bytes of one DATA frame, on their way into pages. Used by the reading thread only."""

    def place(self, spans: Sequence[Span]) -> int:
        """Move the next bytes into our own registered ``spans``, without waiting for the peer.

        Args:
            spans: where they go; never more than what is left of the payload.

        Returns:
            Bytes moved; 0 when none are there yet.

        Raises:
            ConnectionLost: no more will come.
        """
        ...

    def discard(self, nbytes: int) -> int:
        """Drop up to ``nbytes``; like `place`, but into nothing."""
        ...

    def wait(self) -> None:
        """Block until more bytes can be moved.

        Raises:
            ConnectionLost: no more will come.
        """
        ...

    def confirm(self) -> None:
        """After the last byte: make sure they were the sender's pages when they were read.

        Raises:
            ConnectionLost: the sender let go of the connection, so its pages may have been reused.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InFrame:
    """A frame that arrived; a DATA frame's payload is consumed before the next is read."""

    header: Header
    body: bytes
    payload: Payload


class Connection(Protocol):
    """Two-way, ordered frames. At most one thread reads and one thread writes."""

    pull: bool
    """The far side reads source pages after `write` returned, until it gives the credit back."""

    def set_deadline(self, deadline_s: float | None) -> None:
        """Reads and writes after this instant of ``time.monotonic`` raise TimeoutError."""
        ...

    def share_sources(self) -> None:
        """Sender, once, after the handshake: let the far side reach the registered memory."""
        ...

    def accept_sources(self) -> None:
        """Receiver, once, after the handshake: the other half of `share_sources`."""
        ...

    def write(self, frames: Sequence[OutFrame]) -> None:
        """Hand frames over, in order; blocks while the peer is slow.

        Raises:
            ConnectionLost: the peer is gone; some frames may have arrived.
        """
        ...

    def read(self, max_body_bytes: int) -> InFrame:
        """Wait for the next frame.

        Raises:
            ConnectionLost: there will be none.
            WireError: what came is no frame.
        """
        ...

    def shutdown(self) -> None:
        """Cut the connection, from any thread; wakes both users. The peer sees the end."""
        ...

    def close(self) -> None:
        """Free the descriptor; only when no thread uses the connection any more."""
        ...


class Listener(Protocol):
    """Where senders connect."""

    endpoint: str
    """Address in the form that `Transport.connect` takes."""

    def accept(self) -> Connection:
        """Wait for a sender.

        Raises:
            ConnectionLost: the listener was closed.
        """
        ...

    def close(self) -> None:
        """Stop listening and wake `accept`; from any thread, idempotent."""
        ...


class Transport(Protocol):
    """One way to carry frames."""

    scheme: str
    """First part of its endpoints, before ``://``."""

    def register(self, buffers: Sequence[PageBuffer]) -> None:
        """Make a pool's buffers usable as sources and destinations; once, before all else."""
        ...

    def listen(self) -> Listener:
        """Open an endpoint.

        Raises:
            OSError: the address cannot be used.
        """
        ...

    def reaches(self, endpoint: str) -> bool:
        """Whether ``endpoint`` may be reachable from here; `connect` finds out for certain."""
        ...

    def connect(self, endpoint: str, timeout_s: float) -> Connection:
        """Connect to a listener.

        Raises:
            ConnectionLost: nobody is there.
            TimeoutError: nobody answered in time.
        """
        ...
