"""A TCP proxy that tests can cut and stall: a peer that dies or hangs, without another process."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress


class Proxy:
    """Forwards TCP connections until it is told to cut or to stall them."""

    def __init__(self) -> None:
        self.address = ""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listening: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def start(self, target: str, tasks: asyncio.TaskGroup) -> None:
        """Listen on a free port."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._listening = tasks.create_task(self._listen(listener, target, tasks), name="proxy")

    def stall(self) -> None:
        """Let nothing through, but keep the connections."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let everything through again."""
        self._flowing.set()

    def reset(self) -> None:
        """Reset all connections; new ones are accepted."""
        for connection in self._connections:
            connection.cancel()

    def cut(self) -> None:
        """Reset all connections and accept no more."""
        assert self._listening is not None
        self._listening.cancel()
        self.reset()

    async def _listen(self, listener: socket.socket, target: str, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with listener:
            while True:
                near, _ = await loop.sock_accept(listener)
                connection = tasks.create_task(self._forward(near, target), name="proxy/connection")
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)

    async def _forward(self, near: socket.socket, target: str) -> None:
        loop = asyncio.get_running_loop()
        host, port = target.split(":")
        with near, socket.socket() as far, suppress(ConnectionError):
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await loop.sock_connect(far, (host, int(port)))
            out = asyncio.ensure_future(self._pipe(near, far))
            back = asyncio.ensure_future(self._pipe(far, near))
            try:
                await asyncio.wait((out, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pipe in (out, back):
                    pipe.cancel()
                await asyncio.gather(out, back, return_exceptions=True)

    async def _pipe(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 65536):
            await self._flowing.wait()
            await loop.sock_sendall(target, data)
