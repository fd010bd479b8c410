"""Frames between threads of one process, for tests: every frame can be delayed, damaged or cut.

Bytes are encoded and decoded as on a socket. Faults happen at frames, never at instants.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kv_transfer.transport import (
    ConnectionLost,
    InFrame,
    OutFrame,
    RegisteredMemory,
    Span,
)
from kv_transfer.wire import HEADER_BYTES, Header, check_frame, decode_header, encode_frame
from tandem.cache.pool import PageBuffer

Direction = Literal["to_decode", "to_prefill"]
Fate = Literal["deliver", "hold", "flip_payload", "flip_header", "cut", "half_close"]
Rule = Callable[[Direction, Header], Fate]


def deliver_all(direction: Direction, header: Header) -> Fate:
    """The rule of a network without faults."""
    del direction, header
    return "deliver"


class InprocNetwork:
    """Connects the transports of one test and decides what happens to their frames."""

    def __init__(self) -> None:
        self.rule: Rule = deliver_all
        """Asked for every frame, in the thread that writes it; it may block to slow that thread."""
        self.step_bytes = 1 << 62
        """Payload bytes that arrive at once."""
        self.on_step: Callable[[Header, int], None] = lambda header, placed: None
        """Called in the reading thread between steps, with the bytes taken so far."""
        self.pull = False
        """Whether sources are read when the receiver takes them, as through shared memory."""
        self.on_frame: Callable[[Direction, Header], None] = lambda direction, header: None
        """Told about every frame that was written, in the thread that wrote it."""
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._listeners: dict[str, InprocListener] = {}
        self._connections: list[InprocConnection] = []

    def release(self) -> None:
        """Deliver what was held, in order, and hold nothing until the rule says so again."""
        for connection in self._open_connections():
            connection.deliver_held()

    def cut(self) -> None:
        """End every connection at once; what was on its way is lost."""
        for connection in self._open_connections():
            connection.sever()

    @property
    def connections(self) -> tuple[InprocConnection, ...]:
        """Both ends of every connection there has been, prefill's first."""
        return tuple(self._open_connections())

    def add(self, listener: InprocListener) -> str:
        """Name a new listener."""
        with self._lock:
            name = f"inproc://{next(self._names)}"
            self._listeners[name] = listener
            return name

    def remove(self, name: str) -> None:
        """Forget a listener."""
        with self._lock:
            self._listeners.pop(name, None)

    def connect(self, name: str, memory: RegisteredMemory) -> InprocConnection:
        """Make both ends of a connection; the listener accepts the other."""
        with self._lock:
            listener = self._listeners.get(name)
        if listener is None:
            raise ConnectionLost(f"nobody listens at {name}")
        forth, back = _Pipe(), _Pipe()
        ours = InprocConnection(self, "to_decode", back, forth, memory)
        theirs = InprocConnection(self, "to_prefill", forth, back, listener.memory)
        with self._lock:
            self._connections += [ours, theirs]
        listener.offer(theirs)
        return ours

    def _open_connections(self) -> list[InprocConnection]:
        with self._lock:
            return list(self._connections)


class InprocTransport:
    """See `kv_transfer.transport.Transport`."""

    scheme = "inproc"

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._memory = RegisteredMemory(())

    def register(self, buffers: Sequence[PageBuffer]) -> None:
        """Keep the buffers."""
        self._memory = RegisteredMemory(buffers)

    def listen(self) -> InprocListener:
        """Open an endpoint of the network."""
        return InprocListener(self._network, self._memory)

    def reaches(self, endpoint: str) -> bool:
        """Whether the endpoint is of this kind."""
        return endpoint.startswith("inproc://")

    def connect(self, endpoint: str, timeout_s: float) -> InprocConnection:
        """Connect to a listener of the network."""
        del timeout_s
        return self._network.connect(endpoint, self._memory)


class InprocListener:
    """See `kv_transfer.transport.Listener`."""

    def __init__(self, network: InprocNetwork, memory: RegisteredMemory) -> None:
        self.memory = memory
        self._network = network
        self._arrivals: deque[InprocConnection | None] = deque()
        self._changed = threading.Condition()
        self.endpoint = network.add(self)

    def offer(self, connection: InprocConnection) -> None:
        """A sender connects."""
        with self._changed:
            self._arrivals.append(connection)
            self._changed.notify()

    def accept(self) -> InprocConnection:
        """Wait for a sender."""
        with self._changed:
            while not self._arrivals:
                self._changed.wait()
            connection = self._arrivals.popleft()
        if connection is None:
            raise ConnectionLost("the listener was closed")
        return connection

    def close(self) -> None:
        """Stop listening."""
        self._network.remove(self.endpoint)
        with self._changed:
            self._arrivals.append(None)
            self._changed.notify()


class _Pipe:
    """Frames in one direction: encoded head, then its payload's pieces."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.frames: deque[tuple[bytes, list[memoryview]]] = deque()
        self.held: deque[tuple[bytes, list[memoryview]]] = deque()
        self.ended = False
        self.lost = False


class InprocConnection:
    """See `kv_transfer.transport.Connection`."""

    def __init__(
        self,
        network: InprocNetwork,
        direction: Direction,
        incoming: _Pipe,
        outgoing: _Pipe,
        memory: RegisteredMemory,
    ) -> None:
        self.pull = network.pull
        self._network = network
        self._direction = direction
        self._incoming = incoming
        self._outgoing = outgoing
        self._memory = memory
        self._deadline_s: float | None = None

    def set_deadline(self, deadline_s: float | None) -> None:
        """Bound reads."""
        self._deadline_s = deadline_s

    def share_sources(self) -> None:
        """One process sees all memory."""

    def accept_sources(self) -> None:
        """One process sees all memory."""

    def write(self, frames: Sequence[OutFrame]) -> None:
        """Ask the network's rule about each frame and pass it on."""
        for frame in frames:
            fate = self._network.rule(self._direction, frame.header)
            if fate == "cut":
                self.sever()
            head = encode_frame(frame.header, frame.body)
            if fate == "flip_header":
                head = bytes([head[0] ^ 1]) + head[1:]
            views = [self._memory.view(span) for span in frame.spans]
            if not self.pull or fate == "flip_payload":
                copied = bytearray(b"".join(views))
                if fate == "flip_payload" and copied:
                    copied[len(copied) // 2] ^= 1
                views = [memoryview(copied)] if copied else []
            self._pass((head, views), fate)
            self._network.on_frame(self._direction, frame.header)

    @property
    def num_held(self) -> int:
        """Frames that this end wrote and the network holds; none when they can reach nobody."""
        pipe = self._outgoing
        with pipe.changed:
            return 0 if pipe.lost else len(pipe.held)

    def deliver_held(self, at_most: int | None = None, *, again: bool = False) -> None:
        """Deliver the oldest frames that this end wrote and the network held.

        Args:
            at_most: how many; all when None.
            again: hold copies, which will arrive as well.
        """
        pipe = self._outgoing
        with pipe.changed:
            count = len(pipe.held) if at_most is None else min(at_most, len(pipe.held))
            for entry in [pipe.held.popleft() for _ in range(count)]:
                pipe.frames.append(entry)
                if again:
                    pipe.held.append(entry)
            pipe.changed.notify_all()

    def half_close(self) -> None:
        """Say nothing more; the peer still gets what was delivered."""
        with self._outgoing.changed:
            self._outgoing.ended = True
            self._outgoing.changed.notify_all()

    def read(self, max_body_bytes: int) -> InFrame:
        """Wait for a frame and decode it."""
        pipe = self._incoming
        with pipe.changed:
            while not pipe.frames or pipe.lost:
                if pipe.lost or pipe.ended:
                    raise ConnectionLost("the peer closed the connection")
                self._wait(pipe)
            head, views = pipe.frames.popleft()
        header, body_bytes = decode_header(head[:HEADER_BYTES], max_body_bytes)
        body = head[HEADER_BYTES : HEADER_BYTES + body_bytes]
        check_frame(head[:HEADER_BYTES], body)
        payload = _InprocPayload(self._network, header, views, self._memory, pipe)
        return InFrame(header=header, body=body, payload=payload)

    def shutdown(self) -> None:
        """Hang up: the peer still gets what was delivered, and then the end."""
        with self._outgoing.changed:
            self._outgoing.ended = True
            self._outgoing.changed.notify_all()
        with self._incoming.changed:
            self._incoming.lost = True
            self._incoming.changed.notify_all()

    def sever(self) -> None:
        """The network breaks: nobody gets anything any more."""
        for pipe in (self._incoming, self._outgoing):
            with pipe.changed:
                pipe.lost = True
                pipe.changed.notify_all()

    def close(self) -> None:
        """There is no descriptor."""

    def _pass(self, entry: tuple[bytes, list[memoryview]], fate: Fate) -> None:
        pipe = self._outgoing
        with pipe.changed:
            if pipe.lost or pipe.ended:
                raise ConnectionLost("the connection was cut")
            if fate == "hold" or pipe.held:
                pipe.held.append(entry)
            else:
                pipe.frames.append(entry)
            if fate == "half_close":
                pipe.ended = True
            pipe.changed.notify_all()

    def _wait(self, pipe: _Pipe) -> None:
        if self._deadline_s is None:
            pipe.changed.wait()
        elif not pipe.changed.wait(self._deadline_s - time.monotonic()):
            raise TimeoutError("the peer is silent")


class _InprocPayload:
    """See `kv_transfer.transport.Payload`."""

    def __init__(
        self,
        network: InprocNetwork,
        header: Header,
        views: Sequence[memoryview],
        memory: RegisteredMemory,
        pipe: _Pipe,
    ) -> None:
        self._network = network
        self._header = header
        self._views = deque(views)
        self._memory = memory
        self._pipe = pipe
        self._taken = 0
        self._allowance = network.step_bytes

    def place(self, spans: Sequence[Span]) -> int:
        """Copy as many bytes as one step allows."""
        total = 0
        for span in spans:
            nbytes = min(span.nbytes, self._allowance)
            at = 0
            target = self._memory.view(span)
            for view in self._take(nbytes):
                target[at : at + len(view)] = view
                at += len(view)
            total += nbytes
        return total

    def discard(self, nbytes: int) -> int:
        """Drop as many bytes as one step allows."""
        return sum(len(view) for view in self._take(min(nbytes, self._allowance)))

    def wait(self) -> None:
        """Let the next step begin."""
        if self._pipe.lost:
            raise ConnectionLost("the connection was cut")
        self._network.on_step(self._header, self._taken)
        self._allowance = self._network.step_bytes

    def confirm(self) -> None:
        """A sender hangs up before it reuses pages that were not given back."""
        if self._pipe.lost or self._pipe.ended:
            raise ConnectionLost("the connection was cut")

    def _take(self, nbytes: int) -> list[memoryview]:
        taken: list[memoryview] = []
        self._taken += nbytes
        self._allowance -= nbytes
        while nbytes:
            view = self._views.popleft()
            if len(view) > nbytes:
                self._views.appendleft(view[nbytes:])
                view = view[:nbytes]
            taken.append(view)
            nbytes -= len(view)
        return taken
