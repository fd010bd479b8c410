"""Prefill's end of one connection: one thread writes frames while credit lasts, one reads answers.

All state of the link and of its streams is guarded by the link's one lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kv_transfer.counters import Tally
from kv_transfer.handshake import Peer
from kv_transfer.messages import Abort, Credit, Open, decode
from kv_transfer.paging import Paging
from kv_transfer.pieces import FRAME_BYTES, Piece, checksum, spans_of
from kv_transfer.stream import KVStream
from kv_transfer.transport import Connection, ConnectionLost, InFrame, OutFrame, RegisteredMemory
from kv_transfer.wire import MAX_BODY_BYTES, FrameType, Header, WireError
from tandem.config.tree import TransferConfig
from tandem.errors import PeerLost, TransferAborted, TransferError, TransferTimeout

logger = logging.getLogger(__name__)
_MAX_BATCH_FRAMES = 64
_PINGS_PER_TIMEOUT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkParts:
    """What a link is built from."""

    connection: Connection
    transport: str
    peer: Peer
    paging: Paging
    memory: RegisteredMemory
    config: TransferConfig
    clock: Callable[[], float]
    tally: Tally
    on_down: Callable[[Link], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus:
    """One connection of a sender, for status pages and tests."""

    incarnation: str
    transport: str
    streams: int
    credit_bytes: int
    """Granted by the receiver in all."""
    free_credit_bytes: int
    """What may be written now."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """Something to write for a stream: pages, or a control frame in its place among them."""

    stream: KVStream
    what: Piece | OutFrame


class Link:
    """A live connection to one decode incarnation, shared by all streams to it."""

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._connection = parts.connection
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._urgent: deque[OutFrame] = deque()
        self._queue: deque[_Queued] = deque()
        self._streams: dict[tuple[int, int], KVStream] = {}
        self._credit_bytes = parts.peer.credit_bytes
        self._unacked: deque[tuple[KVStream, int]] = deque()
        self._down: tuple[type[TransferError], str] | None = None
        self._heard_s = self._pinged_s = parts.clock()
        self.paging = parts.paging
        """Our pages as they travel to this peer."""
        name = parts.peer.incarnation[:8]
        self._writer = threading.Thread(target=self._write, name=f"kv-send-{name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"kv-acks-{name}", daemon=True)

    @property
    def incarnation(self) -> str:
        """Which decode worker is at the other end."""
        return self._parts.peer.incarnation

    @property
    def transport(self) -> str:
        """Scheme of the transport."""
        return self._parts.transport

    @property
    def pull(self) -> bool:
        """Whether the receiver reads source pages until it gives their credit back."""
        return self._connection.pull

    @property
    def status(self) -> LinkStatus:
        """How it stands now."""
        with self._lock:
            return LinkStatus(
                incarnation=self.incarnation,
                transport=self.transport,
                streams=len(self._streams),
                credit_bytes=self._parts.peer.credit_bytes,
                free_credit_bytes=self._credit_bytes,
            )

    @property
    def lock(self) -> threading.Lock:
        """Guards this link and its streams."""
        return self._lock

    @property
    def frame_bytes(self) -> int:
        """Size near which payloads are cut, so that several fit the credit."""
        return min(FRAME_BYTES, self._parts.peer.credit_bytes // 4)

    def start(self) -> None:
        """Begin writing and reading."""
        self._writer.start()
        self._reader.start()

    def join(self) -> None:
        """Wait until both threads have ended, after `fail`."""
        self._reader.join()

    @property
    def is_down(self) -> bool:
        """Whether it can carry nothing any more."""
        return self._down is not None

    def add(self, stream: KVStream) -> bool:
        """Announce a stream to the receiver; False when the link is down.

        Raises:
            TransferError: the stream's target is in use.
        """
        with self._lock:
            if self._down is not None:
                return False
            if stream.key in self._streams:
                raise TransferError(stream.request_id, "its target is already in use")
            if not self._owed:
                self._heard_s = self._pinged_s = self._parts.clock()
            self._streams[stream.key] = stream
            self._parts.tally.add(pending=1)
            open_ = Open(request_id=stream.request_id)
            self.enqueue(stream, stream.control(FrameType.OPEN, open_))
            return True

    def enqueue(self, stream: KVStream, what: Piece | OutFrame) -> None:
        """Queue pages or a control frame behind what is already queued; lock held."""
        self._queue.append(_Queued(stream, what))
        self._work.notify()

    def abort(self, stream: KVStream, error: TransferError, *, tell: bool) -> None:
        """Fail a stream and drop what it has queued; idempotent; lock held.

        Args:
            stream: one of this link's.
            error: what its `wait` raises.
            tell: send an ABORT, unless the commit went out: there is one terminal frame.
        """
        if stream.ended:
            return
        self._queue = deque(queued for queued in self._queue if queued.stream is not stream)
        if tell and not stream.committing:
            self._urgent.append(stream.control(FrameType.ABORT, Abort(reason=error.reason)))
            self._work.notify()
        self._end(stream, error)

    def check_idle(self) -> None:
        """Ping a peer that owes us something; give it up when it has been silent too long."""
        now_s = self._parts.clock()
        timeout_s = self._parts.config.idle_timeout_s
        with self._lock:
            if not self._owed or self._down is not None:
                return
            silent_s = now_s - self._heard_s
            if silent_s < timeout_s:
                if now_s - self._pinged_s >= timeout_s / _PINGS_PER_TIMEOUT:
                    self._pinged_s = now_s
                    self._urgent.append(OutFrame(header=Header(type=FrameType.PING)))
                    self._work.notify()
                return
        self.fail(TransferTimeout, f"decode worker {self.incarnation} silent for {silent_s:.1f} s")

    def fail(self, kind: type[TransferError], reason: str) -> None:
        """Take the link down and fail its streams; idempotent."""
        with self._lock:
            if self._down is not None:
                return
            self._down = (kind, reason)
            self._queue.clear()
            self._urgent.clear()
            self._work.notify_all()
        self._parts.on_down(self)
        # Only after this may sources that the peer was still reading be unpinned: it checks.
        self._connection.shutdown()
        with self._lock:
            for stream, _ in self._unacked:
                stream.acknowledged()
            self._unacked.clear()
            for stream in list(self._streams.values()):
                self._end(stream, kind(stream.request_id, reason))

    @property
    def _owed(self) -> bool:
        """Whether the receiver owes an answer to a stream, or credit for an ended one's frames."""
        return bool(self._streams or self._unacked)

    def _end(self, stream: KVStream, error: TransferError | None) -> None:
        del self._streams[stream.key]
        if error is None:
            self._parts.tally.add(pending=-1, completed=1)
        else:
            self._parts.tally.add(pending=-1, aborted=1)
        stream.settle(error)

    def _write(self) -> None:
        try:
            while batch := self._next_batch():
                try:
                    self._connection.write([self._frame(item) for item in batch])
                finally:
                    self._written(batch)
        except (ConnectionLost, OSError) as error:
            self.fail(PeerLost, f"decode worker {self.incarnation}: {error}")
        finally:
            self.fail(PeerLost, f"decode worker {self.incarnation}: the writer ended")

    def _next_batch(self) -> list[_Queued | OutFrame]:
        """Wait for frames that may be written now; empty when the link is down."""
        with self._lock:
            while True:
                if self._down is not None:
                    return []
                if self._urgent:
                    urgent: list[_Queued | OutFrame] = list(self._urgent)
                    self._urgent.clear()
                    return urgent
                if batch := self._take():
                    return batch
                self._work.wait()

    def _take(self) -> list[_Queued | OutFrame]:
        batch: list[_Queued | OutFrame] = []
        nbytes = 0
        while self._queue and len(batch) < _MAX_BATCH_FRAMES:
            queued = self._queue[0]
            if isinstance(queued.what, Piece):
                size = queued.what.nbytes
                if size > self._credit_bytes or (batch and nbytes + size > FRAME_BYTES):
                    break
                nbytes += size
                self._credit_bytes -= size
                self._unacked.append((queued.stream, size))
            queued.stream.taken(queued.what)
            batch.append(self._queue.popleft())
        return batch

    def _frame(self, item: _Queued | OutFrame) -> OutFrame:
        if isinstance(item, OutFrame):
            return item
        if isinstance(item.what, OutFrame):
            return item.what
        piece, memory = item.what, self._parts.memory
        buffer = memory.buffers[piece.group]
        spans = spans_of(buffer.group, piece.group, piece.layer, piece.page_ids, buffer.num_pages)
        header = Header(
            type=FrameType.DATA,
            room=item.stream.key[0],
            epoch=item.stream.key[1],
            layer=piece.layer,
            group=piece.group,
            first_page=piece.first_page,
            num_pages=len(piece.page_ids),
            payload_bytes=piece.nbytes,
            checksum=checksum(memory, spans) if self._parts.config.checksum else None,
        )
        return OutFrame(header=header, spans=spans)

    def _written(self, batch: list[_Queued | OutFrame]) -> None:
        with self._lock:
            for item in batch:
                if isinstance(item, OutFrame):
                    continue
                if isinstance(item.what, Piece):
                    self._parts.tally.add(frames=1, bytes=item.what.nbytes)
                item.stream.written(item.what)

    def _read(self) -> None:
        reason = "its reader ended"
        try:
            while True:
                self._handle(self._connection.read(MAX_BODY_BYTES))
        except (ConnectionLost, OSError) as error:
            reason = str(error)
        except WireError as error:
            reason = f"it sent a bad frame: {error}"
            logger.warning("incarnation=%s bad frame: %s", self.incarnation, error)
        finally:
            self.fail(PeerLost, f"decode worker {self.incarnation}: {reason}")
            self._writer.join()
            self._connection.close()

    def _handle(self, frame: InFrame) -> None:
        header = frame.header
        with self._lock:
            self._heard_s = self._parts.clock()
            match header.type:
                case FrameType.CREDIT:
                    self._credited(decode(Credit, frame.body))
                case FrameType.DONE:
                    if stream := self._streams.get((header.room, header.epoch)):
                        self._end(stream, None)
                case FrameType.ABORT:
                    if stream := self._streams.get((header.room, header.epoch)):
                        reason = decode(Abort, frame.body).reason
                        self.abort(stream, TransferAborted(stream.request_id, reason), tell=False)
                case FrameType.PING:
                    self._urgent.append(OutFrame(header=Header(type=FrameType.PONG)))
                    self._work.notify()
                case FrameType.PONG:
                    pass
                case _:
                    raise WireError(f"{header.type.name} from a decode worker")

    def _credited(self, credit: Credit) -> None:
        if credit.frames > len(self._unacked):
            raise WireError("credit for frames that were not sent")
        if sum(nbytes for _, nbytes in islice(self._unacked, credit.frames)) != credit.nbytes:
            raise WireError("credit of the wrong size")
        freed = [self._unacked.popleft() for _ in range(credit.frames)]
        self._credit_bytes += credit.nbytes
        self._work.notify()
        for stream, _ in freed:
            stream.acknowledged()
