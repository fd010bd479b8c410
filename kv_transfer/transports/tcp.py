"""K/V over TCP: payloads go from the sender's pages to the socket and from it into pages."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from kv_transfer.transport import (
    ConnectionLost,
    InFrame,
    OutFrame,
    RegisteredMemory,
    Span,
)
from kv_transfer.transports.stream import IOV_MAX, SocketAcceptor, SocketStream
from kv_transfer.transports.tls import TlsContexts, TlsStream
from kv_transfer.wire import HEADER_BYTES, check_frame, decode_header, encode_frame
from tandem.cache.pool import PageBuffer

_SINK_BYTES = 1 << 18
_BACKLOG = 128


class TcpTransport:
    """See `kv_transfer.transport.Transport`."""

    def __init__(self, host: str, silence_timeout_s: float, tls: TlsContexts | None = None) -> None:
        """Bind ``host`` when listening.

        Args:
            host: address of one interface, or of all.
            silence_timeout_s: a peer whose kernel acknowledges nothing for this long is lost.
            tls: encrypt, and demand certificates; the endpoints then begin with ``tls://``.
        """
        self.scheme = "tcp" if tls is None else "tls"
        self._tls = tls
        self._host = host
        self._silence_timeout_s = silence_timeout_s
        self._memory = RegisteredMemory(())

    def register(self, buffers: Sequence[PageBuffer]) -> None:
        """Keep the buffers as sources and destinations."""
        self._memory = RegisteredMemory(buffers)

    def listen(self) -> TcpListener:
        """Listen on a free port of the configured address."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, 0), family=family, backlog=_BACKLOG)
        try:
            return TcpListener(sock, self)
        except OSError:
            sock.close()
            raise

    def reaches(self, endpoint: str) -> bool:
        """Any TCP endpoint may be reachable; encrypted ones only by those who encrypt as well."""
        return endpoint.startswith(f"{self.scheme}://")

    def connect(self, endpoint: str, timeout_s: float) -> TcpConnection:
        """Connect to ``tcp://host:port`` or ``tls://host:port``."""
        host, _, port = endpoint.removeprefix(f"{self.scheme}://").rpartition(":")
        if not port.isdecimal():
            raise ConnectionLost(f"not a TCP endpoint: {endpoint}")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except TimeoutError:
            raise
        except (OSError, OverflowError) as error:
            raise ConnectionLost(f"{endpoint}: {error}") from None
        try:
            return self.adopt(sock, server=False)
        except OSError as error:  # reset before it was set up
            sock.close()
            raise ConnectionLost(f"{endpoint}: {error}") from None

    def adopt(self, sock: socket.socket, *, server: bool) -> TcpConnection:
        """Set a connected socket up for frames."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        silence_s = max(1, round(self._silence_timeout_s))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, silence_s // 3))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, silence_s // 3))
        stream = SocketStream(sock) if self._tls is None else self._tls.wrap(sock, server=server)
        return TcpConnection(stream, self._memory)


class TcpListener:
    """See `kv_transfer.transport.Listener`."""

    def __init__(self, sock: socket.socket, transport: TcpTransport) -> None:
        host, port = sock.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = _address_for_peers(sock.family)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.endpoint = f"{transport.scheme}://{place}"
        self._acceptor = SocketAcceptor(sock)
        self._transport = transport

    def accept(self) -> TcpConnection:
        """Wait for a sender."""
        while True:
            sock = self._acceptor.accept()
            try:
                return self._transport.adopt(sock, server=True)
            except OSError:  # reset before it was set up
                sock.close()

    def close(self) -> None:
        """Stop listening."""
        self._acceptor.close()


class TcpConnection:
    """See `kv_transfer.transport.Connection`."""

    pull = False

    def __init__(self, stream: SocketStream | TlsStream, memory: RegisteredMemory) -> None:
        self._stream = stream
        self._memory = memory
        self._sink = memoryview(bytearray(_SINK_BYTES))
        self.set_deadline = stream.set_deadline
        self.shutdown = stream.shutdown
        self.close = stream.close

    def share_sources(self) -> None:
        """Payloads travel in the frames; there is nothing to share."""

    def accept_sources(self) -> None:
        """Payloads travel in the frames; there is nothing to accept."""

    def write(self, frames: Sequence[OutFrame]) -> None:
        """Send headers, bodies and pages in as few calls as they fit."""
        parts: list[bytes | memoryview] = []
        for frame in frames:
            parts.append(encode_frame(frame.header, frame.body))
            parts.extend(self._memory.view(span) for span in frame.spans)
        self._stream.send(parts)

    def read(self, max_body_bytes: int) -> InFrame:
        """Receive a header and its body; the payload stays in the socket."""
        raw = self._stream.receive(HEADER_BYTES)
        header, body_bytes = decode_header(raw, max_body_bytes)
        body = self._stream.receive(body_bytes) if body_bytes else b""
        check_frame(raw, body)
        return InFrame(header=header, body=body, payload=self)

    def place(self, spans: Sequence[Span]) -> int:
        """Receive into pages what is there."""
        return self._stream.receive_now([self._memory.view(span) for span in spans[:IOV_MAX]])

    def discard(self, nbytes: int) -> int:
        """Receive into the sink what is there."""
        return self._stream.receive_now([self._sink[: min(nbytes, _SINK_BYTES)]])

    def wait(self) -> None:
        """Wait for bytes."""
        self._stream.wait_readable()

    def confirm(self) -> None:
        """The kernel copied the bytes when they were written: nothing can have changed."""


def _address_for_peers(family: int) -> str:
    """Our address towards the default route, when a listener is bound to all; sends nothing."""
    far_away = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far_away, 9))
        except OSError:  # no route to anywhere: peers can only be on this host
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
