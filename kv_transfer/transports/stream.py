"""Exact reads and scatter/gather writes on a stream socket, shared by tcp and shm."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from kv_transfer.transport import ConnectionLost

logger = logging.getLogger(__name__)
IOV_MAX = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 1024
_RETRY_MS = 100
_HANGUP = select.POLLERR | select.POLLHUP | getattr(select, "POLLRDHUP", 0)


class SocketStream:
    """A connected stream socket; one thread sends, one receives, any may shut it down."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._deadline_s: float | None = None
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._hangup = select.poll()
        self._hangup.register(sock, _HANGUP)
        sock.setblocking(True)

    @property
    def socket(self) -> socket.socket:
        """The socket itself, for calls that only one transport makes."""
        return self._socket

    def set_deadline(self, deadline_s: float | None) -> None:
        """Calls after this instant of ``time.monotonic`` raise TimeoutError."""
        self._deadline_s = deadline_s
        if deadline_s is None:
            self._socket.settimeout(None)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts, in order, at most ``IOV_MAX`` in one call.

        Raises:
            ConnectionLost: the peer is gone.
        """
        first = 0
        remaining = list(parts)
        while first < len(remaining):
            self._arm()
            try:
                sent = self._socket.sendmsg(remaining[first : first + IOV_MAX])
            except TimeoutError:
                raise TimeoutError("the peer does not read") from None
            except OSError as error:
                raise ConnectionLost(str(error)) from None
            while first < len(remaining) and sent >= len(remaining[first]):
                sent -= len(remaining[first])
                first += 1
            if sent:
                remaining[first] = memoryview(remaining[first])[sent:]

    def receive(self, nbytes: int) -> bytes:
        """Wait for exactly ``nbytes``.

        Raises:
            ConnectionLost: the peer closed before.
        """
        data = bytearray(nbytes)
        view = memoryview(data)
        done = 0
        while done < nbytes:
            self._arm()
            try:
                count = self._socket.recv_into(view[done:])
            except TimeoutError:
                raise TimeoutError("the peer is silent") from None
            except OSError as error:
                raise ConnectionLost(str(error)) from None
            if not count:
                raise ConnectionLost("the peer closed the connection")
            done += count
        return bytes(data)

    def receive_now(self, views: Sequence[memoryview]) -> int:
        """Receive what is there into ``views`` without waiting; 0 when nothing is.

        Raises:
            ConnectionLost: the peer closed.
        """
        try:
            count = self._socket.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not count:
            raise ConnectionLost("the peer closed the connection")
        return count

    def wait_readable(self) -> None:
        """Block until there is something to receive, or the end."""
        self._readable.poll()

    def hung_up(self) -> bool:
        """Whether the peer closed, even if unread bytes remain."""
        return bool(self._hangup.poll(0))

    def shutdown(self) -> None:
        """Cut the connection; wakes the threads that use it."""
        with suppress(OSError):  # the peer may have cut it first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor."""
        self._socket.close()

    def _arm(self) -> None:
        if self._deadline_s is None:
            return
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the peer is silent")
        self._socket.settimeout(left_s)


class SocketAcceptor:
    """A listening socket whose `accept` another thread can end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._wake_in, self._wake_out = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)
        self._wake = select.poll()
        self._wake.register(self._wake_out, select.POLLIN)
        sock.setblocking(False)  # a connection may be gone again when it is accepted

    def accept(self) -> socket.socket:
        """Wait for a connection.

        Raises:
            ConnectionLost: the acceptor was closed.
        """
        while True:
            ready = {number for number, _ in self._poll.poll()}
            if self._wake_out.fileno() in ready:
                self._socket.close()
                self._wake_out.close()
                raise ConnectionLost("the listener was closed")
            try:
                return self._socket.accept()[0]
            except (BlockingIOError, ConnectionError):  # it went away between poll and accept
                continue
            except OSError as error:
                logger.warning("cannot accept a K/V connection, trying again: %s", error)
                self._wake.poll(_RETRY_MS)

    def close(self) -> None:
        """End `accept`, which then frees the descriptors; idempotent."""
        with suppress(OSError):
            self._wake_in.send(b"x")
        self._wake_in.close()
