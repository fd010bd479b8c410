"""K/V through shared memory: the decode side maps the sender's pool read-only and copies.

A Unix socket in the abstract namespace carries frames; it leaves nothing behind, and both ends
check the other's user. After the handshake the sender passes its buffers' sealed memory files.
A DATA frame's body lists spans of them; its credit says that they were copied.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.pieces import MAX_FRAME_PAGES, Cursor
from kv_transfer.transport import (
    ConnectionLost,
    InFrame,
    OutFrame,
    RegisteredMemory,
    Span,
)
from kv_transfer.transports.stream import SocketAcceptor, SocketStream
from kv_transfer.wire import (
    HEADER_BYTES,
    FrameType,
    Header,
    WireError,
    check_frame,
    decode_header,
    encode_frame,
)
from tandem.cache.pool import PageBuffer

_SPAN = struct.Struct("<QII")  # offset, bytes, buffer
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_BACKLOG = 128
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def shared_memory_problem(buffers: Sequence[PageBuffer]) -> str:
    """Say why shared memory cannot be used here, or return an empty string."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        return "this system has no anonymous shared memory with peer credentials"
    if any(buffer.fd is None for buffer in buffers):
        return "the pool is not in shared memory"
    if not host_identity():
        return "the kernel does not tell which host this is"
    return ""


@cache
def host_identity() -> str:
    """The running kernel's own name, or an empty string."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class ShmTransport:
    """See `kv_transfer.transport.Transport`."""

    scheme = "shm"

    def __init__(self) -> None:
        self._memory = RegisteredMemory(())

    def register(self, buffers: Sequence[PageBuffer]) -> None:
        """Keep the buffers; seal their files' size, so that a reader's mapping stays whole."""
        for buffer in buffers:
            if buffer.fd is not None:
                fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = RegisteredMemory(buffers)

    def listen(self) -> ShmListener:
        """Listen under a random name."""
        name = f"tandem-kv-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
        return ShmListener(sock, f"shm://{host_identity()}/{name}", self._memory)

    def reaches(self, endpoint: str) -> bool:
        """Whether the endpoint says that it is on this host; connecting proves it."""
        return endpoint.startswith(f"shm://{host_identity()}/")

    def connect(self, endpoint: str, timeout_s: float) -> ShmConnection:
        """Connect to a listener of the same user on this host."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + endpoint.rpartition("/")[2])
            _check_user(sock)
        except TimeoutError:
            sock.close()
            raise
        except (OSError, ConnectionLost) as error:
            sock.close()
            raise ConnectionLost(str(error)) from None
        return ShmConnection(SocketStream(sock), self._memory)


class ShmListener:
    """See `kv_transfer.transport.Listener`."""

    def __init__(self, sock: socket.socket, endpoint: str, memory: RegisteredMemory) -> None:
        self.endpoint = endpoint
        self._acceptor = SocketAcceptor(sock)
        self._memory = memory

    def accept(self) -> ShmConnection:
        """Wait for a sender of the same user."""
        while True:
            sock = self._acceptor.accept()
            try:
                _check_user(sock)
            except (OSError, ConnectionLost):
                sock.close()
                continue
            return ShmConnection(SocketStream(sock), self._memory)

    def close(self) -> None:
        """Stop listening."""
        self._acceptor.close()


class ShmConnection:
    """See `kv_transfer.transport.Connection`."""

    pull = True

    def __init__(self, stream: SocketStream, memory: RegisteredMemory) -> None:
        self._stream = stream
        self._memory = memory
        self._theirs: tuple[npt.NDArray[np.uint8], ...] = ()
        self.set_deadline = stream.set_deadline
        self.shutdown = stream.shutdown
        self.close = stream.close

    def share_sources(self) -> None:
        """Pass the pool's memory files."""
        files = array.array(
            "i", [buffer.fd for buffer in self._memory.buffers if buffer.fd is not None]
        )
        frame = encode_frame(Header(type=FrameType.SOURCES))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        try:
            sent = self._stream.socket.sendmsg([frame], rights)
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        self._stream.send([frame[sent:]])

    def accept_sources(self) -> None:
        """Map the peer's memory files, one per buffer of ours, read-only."""
        expected = len(self._memory.buffers)
        files = array.array("i")
        room = socket.CMSG_SPACE(expected * files.itemsize)
        cloexec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            first, ancillary, flags, _ = self._stream.socket.recvmsg(HEADER_BYTES, room, cloexec)
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        try:
            raw = first + self._stream.receive(HEADER_BYTES - len(first))
            header, _ = decode_header(raw, 0)
            check_frame(raw, b"")
            if header.type is not FrameType.SOURCES or len(files) != expected:
                raise WireError(f"expected {expected} memory files, got {len(files)}")
            if flags & socket.MSG_CTRUNC:
                raise WireError("more memory files than buffers")
            self._theirs = tuple(_map_sealed(fd) for fd in files)
        finally:
            for fd in files:
                os.close(fd)

    def write(self, frames: Sequence[OutFrame]) -> None:
        """Send headers, bodies and lists of spans."""
        self._stream.send(
            [
                encode_frame(
                    frame.header,
                    b"".join(_SPAN.pack(s.offset, s.nbytes, s.buffer) for s in frame.spans)
                    or frame.body,
                )
                for frame in frames
            ]
        )

    def read(self, max_body_bytes: int) -> InFrame:
        """Receive a header and its body; check a DATA frame's spans against the mappings."""
        raw = self._stream.receive(HEADER_BYTES)
        header, body_bytes = decode_header(raw, max_body_bytes)
        body = self._stream.receive(body_bytes) if body_bytes else b""
        check_frame(raw, body)
        sources = self._spans(header, body) if header.type is FrameType.DATA else ()
        payload = _MappedPayload(self._stream, Cursor(sources), self._theirs, self._memory)
        return InFrame(header=header, body=body, payload=payload)

    def _spans(self, header: Header, body: bytes) -> tuple[Span, ...]:
        if len(body) % _SPAN.size or len(body) > MAX_FRAME_PAGES * _SPAN.size:
            raise WireError("bad list of spans")
        spans = tuple(
            Span(buffer, offset, nbytes) for offset, nbytes, buffer in _SPAN.iter_unpack(body)
        )
        for span in spans:
            if span.buffer >= len(self._theirs):
                raise WireError("span of an unknown buffer")
            if span.offset + span.nbytes > len(self._theirs[span.buffer]):
                raise WireError("span outside its buffer")
        if sum(span.nbytes for span in spans) != header.payload_bytes:
            raise WireError("spans of another size than the payload")
        return spans


class _MappedPayload:
    """See `kv_transfer.transport.Payload`."""

    def __init__(
        self,
        stream: SocketStream,
        sources: Cursor,
        theirs: Sequence[npt.NDArray[np.uint8]],
        memory: RegisteredMemory,
    ) -> None:
        self._stream = stream
        self._sources = sources
        self._theirs = theirs
        self._memory = memory

    def place(self, spans: Sequence[Span]) -> int:
        """Copy into pages; numpy lets other threads run meanwhile."""
        total = 0
        for target in spans:
            ours, at = self._memory.arrays[target.buffer], target.offset
            for source in self._sources.advance(target.nbytes):
                end = source.offset + source.nbytes
                ours[at : at + source.nbytes] = self._theirs[source.buffer][source.offset : end]
                at += source.nbytes
            total += target.nbytes
        return total

    def discard(self, nbytes: int) -> int:
        """Leave the rest where it is."""
        self._sources.advance(nbytes)
        return nbytes

    def wait(self) -> None:
        """The bytes are always there."""

    def confirm(self) -> None:
        """A sender hangs up before it reuses pages that we have not given back."""
        if self._stream.hung_up():
            raise ConnectionLost("the peer closed the connection")


def _map_sealed(fd: int) -> npt.NDArray[np.uint8]:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise WireError("memory file that could shrink under its reader")
        size = os.fstat(fd).st_size
        populate = getattr(mmap, "MAP_POPULATE", 0)
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WireError(f"not a memory file: {error}") from None
    return np.frombuffer(mapping, dtype=np.uint8)


def _check_user(sock: socket.socket) -> None:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(raw)[1]
    if uid != os.geteuid():
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        raise ConnectionLost(f"the peer runs as user {uid}, not as {os.geteuid()}")
