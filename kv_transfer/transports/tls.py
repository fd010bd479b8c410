"""Mutual TLS for the TCP transport: both ends show a certificate of the deployment's own authority.

OpenSSL lets only one thread use a connection at a time, and one of ours reads while the other
writes. So the socket does not block: each call into OpenSSL holds a lock, waiting does not.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kv_transfer.handshake import NotAuthentic
from kv_transfer.transport import ConnectionLost
from tandem.config.tree import TlsConfig
from tandem.errors import ConfigError

_SEND_BYTES = 1 << 18
"""Encrypted in one call, and so the time that a read may wait for the lock."""
_FAREWELL_S = 1.0
_FAREWELL_BYTES = 1 << 16
T = TypeVar("T")


class TlsContexts:
    """What a worker shows and demands, as the one that connects and as the one that accepts."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, config)

    def wrap(self, sock: socket.socket, *, server: bool) -> TlsStream:
        """Prepare a connected socket; TLS begins with the first byte sent or received."""
        context = self._server if server else self._client
        sock.setblocking(False)
        return TlsStream(
            context.wrap_socket(
                sock,
                server_side=server,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,
            )
        )


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # workers have no names; the authority vouches for nobody else
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=config.ca_file)
    except OSError as error:
        raise ConfigError("transfer.tls.ca_file", f"{config.ca_file}: {error}") from None
    try:
        context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
    except OSError as error:
        files = f"{config.cert_file} with {config.key_file}"
        raise ConfigError("transfer.tls.cert_file", f"{files}: {error}") from None
    return context


def _no_password() -> str:
    return ""  # an encrypted key fails to load instead of asking on the terminal


class TlsStream:
    """Like `kv_transfer.transports.stream.SocketStream`, encrypted."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._greeting = threading.Lock()
        self._greeted = False
        self._deadline_s: float | None = None

    def set_deadline(self, deadline_s: float | None) -> None:
        """Calls after this instant of ``time.monotonic`` raise TimeoutError."""
        self._deadline_s = deadline_s

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts, in order.

        Raises:
            ConnectionLost: the peer is gone.
        """
        self._greet()
        for part in parts:
            view = memoryview(part)
            while view:
                piece = view[:_SEND_BYTES]
                sent = self._do(lambda piece=piece: self._socket.send(piece))  # type: ignore[misc]
                view = view[sent:]

    def receive(self, nbytes: int) -> bytes:
        """Wait for exactly ``nbytes``.

        Raises:
            ConnectionLost: the peer closed before.
        """
        self._greet()
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            count = self._do(lambda view=view: self._socket.recv_into(view))  # type: ignore[misc]
            if not count:
                raise ConnectionLost("the peer closed the connection")
            view = view[count:]
        return bytes(data)

    def receive_now(self, views: Sequence[memoryview]) -> int:
        """Receive what is there into ``views`` without waiting; 0 when nothing is.

        Raises:
            ConnectionLost: the peer closed.
        """
        total = 0
        for view in views:
            while view:
                try:
                    with self._lock:
                        count = self._socket.recv_into(view)
                except ssl.SSLWantReadError:
                    return total
                except OSError as error:
                    raise ConnectionLost(_problem(error)) from None
                if not count:
                    raise ConnectionLost("the peer closed the connection")
                total += count
                view = view[count:]
        return total

    def wait_readable(self) -> None:
        """Block until there is something to receive, or the end."""
        with self._lock:
            pending = self._socket.pending()
        if not pending:
            self._wait(select.POLLIN)

    def shutdown(self) -> None:
        """Cut the connection; wakes the threads that use it."""
        # not SSLSocket.shutdown: after that, reads would return ciphertext as if it were plain
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor."""
        self._socket.close()

    def _greet(self) -> None:
        """TLS's own handshake, by whichever thread comes first."""
        with self._greeting:
            if self._greeted:
                return
            try:
                self._do(self._socket.do_handshake)
            except ssl.SSLError as error:
                self._farewell()
                raise NotAuthentic(_problem(error)) from None
            self._greeted = True

    def _farewell(self) -> None:
        """Let the peer read why it was refused: closing at once would take that from it."""
        end_s = time.monotonic() + _FAREWELL_S
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while (left_s := end_s - time.monotonic()) > 0 and select.select(
                [self._socket.fileno()], [], [], left_s
            )[0]:
                if not socket.socket.recv(self._socket, _FAREWELL_BYTES):
                    return

    def _do(self, call: Callable[[], T]) -> T:
        """Repeat a call into OpenSSL until it need not wait."""
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except ssl.SSLEOFError:
                raise ConnectionLost("the peer closed the connection") from None
            except ssl.SSLError as error:
                if self._greeted:
                    raise ConnectionLost(_problem(error)) from None
                raise
            except OSError as error:
                raise ConnectionLost(str(error)) from None

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if self._deadline_s is None:
            poll.poll()
            return
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError("the peer is silent")


def _problem(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the peer's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {error.reason.lower().replace('_', ' ')}"
    return str(error)
