"""Decode's end of one connection: a thread that reads and places frames, one that writes answers.

Every placement is admitted by its reservation's fence, one bounded copy at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kv_transfer.counters import Tally
from kv_transfer.handshake import Identity, NotAuthentic, answer
from kv_transfer.messages import Abort, Commit, Credit, Message, Open, decode, encode
from kv_transfer.paging import Paging
from kv_transfer.pieces import MAX_FRAME_PAGES, Cursor, spans_of
from kv_transfer.reservation import Reservation
from kv_transfer.transport import Connection, ConnectionLost, InFrame, OutFrame, RegisteredMemory
from kv_transfer.wire import MAX_BODY_BYTES, FrameType, Header, WireError
from tandem.config.tree import TransferConfig
from tandem.errors import (
    LayoutMismatch,
    PeerLost,
    TransferAborted,
    TransferCorrupt,
    TransferError,
    TransferTimeout,
)

logger = logging.getLogger(__name__)
STEP_BYTES = 1 << 20
"""Bytes placed under one admission of the fence; a release waits for one such copy at most."""
_MAX_OUTBOX_FRAMES = 4096
_PINGS_PER_TIMEOUT = 4
_NO_REASON = "this (room, epoch) is not reserved here"


class Rooms(Protocol):
    """Where an inbound connection finds reservations: the receiver."""

    def find(self, room: int, epoch: int) -> Reservation | None:
        """Return the live reservation, or None."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InboundParts:
    """What an inbound connection is built from."""

    connection: Connection
    identity: Identity
    memory: RegisteredMemory
    rooms: Rooms
    config: TransferConfig
    credit_bytes: int
    clock: Callable[[], float]
    tally: Tally
    on_end: Callable[[Inbound], None]


class Inbound:
    """A connection from one prefill incarnation."""

    def __init__(self, parts: InboundParts) -> None:
        self._parts = parts
        self._connection = parts.connection
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._outbox: deque[OutFrame] = deque()
        self._claimed: dict[tuple[int, int], Reservation] = {}
        self._down: tuple[type[TransferError], str] | None = None
        self._heard_s = self._pinged_s = parts.clock()
        self._credit_bytes = parts.credit_bytes  # the reading thread's only
        layout = parts.identity.layout
        self._paging = Paging.between(layout, layout, parts.memory)
        self._incarnation = "not yet known"
        self._reader = threading.Thread(target=self._serve, name="kv-receive", daemon=True)
        self._writer = threading.Thread(target=self._write, name="kv-answers", daemon=True)

    def start(self) -> None:
        """Begin with the handshake."""
        self._reader.start()

    def join(self) -> None:
        """Wait until both threads have ended, after `fail`."""
        self._reader.join()

    def dismiss(self, reservation: Reservation, error: TransferError | None) -> None:
        """A reservation that this connection claimed has ended: tell its sender."""
        with self._lock:
            self._claimed.pop(reservation.key, None)
        if error is None:
            self._post(FrameType.DONE, reservation.key)
        else:
            self._post(FrameType.ABORT, reservation.key, Abort(reason=error.reason))

    def check_idle(self) -> None:
        """Ping a sender that owes us pages; give it up when it has been silent too long."""
        now_s = self._parts.clock()
        timeout_s = self._parts.config.idle_timeout_s
        with self._lock:
            if not self._claimed or self._down is not None:
                return
            silent_s = now_s - self._heard_s
            ping = now_s - self._pinged_s >= timeout_s / _PINGS_PER_TIMEOUT
            if ping:
                self._pinged_s = now_s
        if silent_s >= timeout_s:
            reason = f"prefill worker {self._incarnation} silent for {silent_s:.1f} s"
            self.fail(TransferTimeout, reason)
        elif ping:
            self._post(FrameType.PING)

    def fail(self, kind: type[TransferError], reason: str) -> None:
        """Take the connection down and fail its transfers; idempotent."""
        with self._lock:
            if self._down is not None:
                return
            self._down = (kind, reason)
            claimed = list(self._claimed.values())
            self._claimed.clear()
            self._outbox.clear()
            self._work.notify_all()
        self._connection.shutdown()
        for reservation in claimed:
            reservation.end(kind(reservation.request_id, reason))

    def _serve(self) -> None:
        kind, reason = PeerLost, "its reader ended"
        try:
            if self._greeted():
                self._writer.start()
                while True:
                    self._handle(self._connection.read(MAX_BODY_BYTES))
        except (ConnectionLost, OSError) as error:
            reason = str(error)
        except WireError as error:
            reason = f"it sent a bad frame: {error}"
            self._parts.tally.add(refused_connections=1)
            logger.warning("prefill=%s bad frame: %s", self._incarnation, error)
        finally:
            self.fail(kind, f"prefill worker {self._incarnation}: {reason}")
            if self._writer.ident is not None:
                self._writer.join()
            self._connection.close()
            self._parts.on_end(self)

    def _greeted(self) -> bool:
        try:
            self._connection.set_deadline(time.monotonic() + self._parts.config.connect_timeout_s)
            peer = answer(self._connection, self._parts.identity, self._parts.credit_bytes)
            self._connection.accept_sources()
            self._connection.set_deadline(None)
        except (NotAuthentic, LayoutMismatch, WireError, TimeoutError) as error:
            self._parts.tally.add(refused_connections=1)
            logger.warning("K/V connection refused: %s", error)
            return False
        layout = self._parts.identity.layout
        self._paging = Paging.between(layout, peer.layout, self._parts.memory)
        self._incarnation = peer.incarnation
        logger.info("prefill=%s K/V connection", peer.incarnation)
        return True

    def _handle(self, frame: InFrame) -> None:
        header = frame.header
        self._heard()
        match header.type:
            case FrameType.DATA:
                self._data(frame)
            case FrameType.OPEN:
                decode(Open, frame.body)
                self._open(header)
            case FrameType.COMMIT:
                commit = decode(Commit, frame.body)
                if reservation := self._claim_of(header):
                    reservation.commit(commit)
                else:
                    self._answer_stale(header)
            case FrameType.ABORT:
                reason = decode(Abort, frame.body).reason
                if reservation := self._parts.rooms.find(header.room, header.epoch):
                    reservation.end(TransferAborted(reservation.request_id, reason))
            case FrameType.PING:
                self._post(FrameType.PONG)
            case FrameType.PONG:
                pass
            case _:
                raise WireError(f"{header.type.name} from a prefill worker")

    def _open(self, header: Header) -> None:
        reservation = self._parts.rooms.find(header.room, header.epoch)
        if reservation is None:
            self._answer_stale(header)
            return
        with self._lock:
            if self._down is not None:
                return
            if reservation.claim(self.dismiss, self._paging):
                if not self._claimed:
                    self._pinged_s = self._parts.clock()
                self._claimed[reservation.key] = reservation
                return
        self._answer_stale(header)

    def _claim_of(self, header: Header) -> Reservation | None:
        with self._lock:
            return self._claimed.get((header.room, header.epoch))

    def _answer_stale(self, header: Header) -> None:
        self._post(FrameType.ABORT, (header.room, header.epoch), Abort(reason=_NO_REASON))

    def _data(self, frame: InFrame) -> None:
        header = frame.header
        self._check_data(header)
        self._credit_bytes -= header.payload_bytes
        reservation = self._claim_of(header)
        if reservation is not None and (problem := reservation.check_range(header)):
            self._corrupt(reservation, problem)
            reservation = None
        if reservation is None:
            self._drain(frame, header.payload_bytes)
        else:
            self._place(reservation, frame)
        self._credit_bytes += header.payload_bytes
        self._post(FrameType.CREDIT, message=Credit(frames=1, nbytes=header.payload_bytes))

    def _check_data(self, header: Header) -> None:
        """Refuse what no correct sender sends: after this the frame's sizes can be relied on."""
        groups = self._paging.groups
        if header.group >= len(groups) or header.layer >= groups[header.group].num_layers:
            raise WireError("DATA for an unknown group or layer")
        if not 0 < header.num_pages <= MAX_FRAME_PAGES:
            raise WireError(f"DATA of {header.num_pages} pages")
        if header.payload_bytes != header.num_pages * groups[header.group].page_bytes:
            raise WireError("DATA whose size is not that of its pages")
        if header.checksum is None and self._parts.config.checksum:
            raise WireError("DATA without the checksum that this worker demands")
        if header.payload_bytes > self._credit_bytes:
            raise WireError("DATA beyond the credit")

    def _place(self, reservation: Reservation, frame: InFrame) -> None:
        """Move a payload into the reservation's pages, or nowhere once they are not its own."""
        header, payload = frame.header, frame.payload
        buffer = self._paging.memory.buffers[header.group]
        page_ids = reservation.destination(header)
        cursor = Cursor(
            spans_of(buffer.group, header.group, header.layer, page_ids, buffer.num_pages)
        )
        digest = xxhash.xxh3_64() if self._parts.config.checksum else None
        while cursor.remaining:
            if not reservation.fence.enter():
                self._drain(frame, cursor.remaining)
                return
            try:
                count = payload.place(cursor.window(STEP_BYTES))
                for span in cursor.advance(count):
                    if digest is not None:
                        digest.update(self._parts.memory.view(span))
            finally:
                reservation.fence.leave()
            self._progress(frame, count)
        payload.confirm()
        if digest is not None and digest.intdigest() != header.checksum:
            self._corrupt(reservation, f"layer {header.layer}: checksum differs")
            return
        self._parts.tally.add(frames=1, bytes=header.payload_bytes)
        reservation.landed(header)

    def _drain(self, frame: InFrame, nbytes: int) -> None:
        self._parts.tally.add(stale_frames=1, stale_bytes=nbytes)
        while nbytes:
            count = frame.payload.discard(nbytes)
            nbytes -= count
            self._progress(frame, count)

    def _progress(self, frame: InFrame, count: int) -> None:
        if count:
            self._heard()
        else:
            frame.payload.wait()

    def _corrupt(self, reservation: Reservation, problem: str) -> None:
        reservation.end(TransferCorrupt(reservation.request_id, problem))

    def _heard(self) -> None:
        self._heard_s = self._parts.clock()

    def _post(
        self, kind: FrameType, key: tuple[int, int] = (0, 0), message: Message | None = None
    ) -> None:
        header = Header(type=kind, room=key[0], epoch=key[1])
        frame = OutFrame(header=header, body=b"" if message is None else encode(message))
        with self._lock:
            if self._down is not None:
                return
            self._outbox.append(frame)
            self._work.notify()
            full = len(self._outbox) > _MAX_OUTBOX_FRAMES
        if full:
            self.fail(PeerLost, f"prefill worker {self._incarnation} does not read our answers")

    def _write(self) -> None:
        try:
            while frames := self._next_answers():
                self._connection.write(frames)
        except (ConnectionLost, OSError) as error:
            self.fail(PeerLost, f"prefill worker {self._incarnation}: {error}")
        finally:
            self.fail(PeerLost, f"prefill worker {self._incarnation}: the writer ended")

    def _next_answers(self) -> list[OutFrame]:
        with self._lock:
            while not self._outbox and self._down is None:
                self._work.wait()
            frames = list(self._outbox)
            self._outbox.clear()
            return frames
