"""Decode's side: reserves pages, lets prefill workers fill them, and guards them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer.counters import Tally, TransferCounters
from kv_transfer.handshake import Identity
from kv_transfer.inbound import Inbound, InboundParts
from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVTarget
from kv_transfer.reservation import Reservation, Terms
from kv_transfer.transport import ConnectionLost, Listener, RegisteredMemory, Transport
from kv_transfer.transports.choose import receiving_transports
from kv_transfer.watch import Watch, interval_s
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import (
    ConfigError,
    TransferAborted,
    TransferCorrupt,
    TransferError,
    TransferTimeout,
)

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
"""Connections at once, those still in the handshake included."""
_FRAMES_IN_CREDIT = 4


class KVReceiver:
    """Listens for prefill workers and keeps the reservations."""

    def __init__(  # noqa: PLR0913 - what a worker knows, plus seams for tests
        self,
        pool: KVPool,
        layout: KVLayout,
        config: TransferConfig,
        secret: bytes,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        transports: Sequence[Transport] | None = None,
    ) -> None:
        """Register ``pool`` with every transport that ``config`` allows and this system has.

        Raises:
            ConfigError: the configured transport is not available here.
        """
        assert tuple(layout.groups) == pool.groups
        self._identity = Identity(layout=layout, secret=secret, incarnation=incarnation)
        self._config = config
        self._clock = clock
        self._num_pages = pool.num_pages
        self._memory = RegisteredMemory(pool.buffers)
        self._transports = tuple(receiving_transports(config) if transports is None else transports)
        for transport in self._transports:
            transport.register(pool.buffers)
        largest_page = max(group.page_bytes for group in pool.groups)
        self._credit_bytes = max(config.credit_bytes, _FRAMES_IN_CREDIT * largest_page)
        self._lock = threading.Lock()
        self._rooms: dict[int, Reservation] = {}
        self._inbound: set[Inbound] = set()
        self._epochs = itertools.count(1)
        self._listeners: list[Listener] = []
        self._acceptors: list[threading.Thread] = []
        self._closed = False
        self._tally = Tally()
        self._watch = Watch("kv-receiver-watch", interval_s(config), self.check_deadlines)

    @property
    def pending(self) -> int:
        """Reservations whose transfer has neither landed nor failed."""
        with self._lock:
            return len(self._rooms)

    @property
    def counters(self) -> TransferCounters:
        """Totals so far."""
        return self._tally.read()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where senders can connect, best first; empty before `start`."""
        return tuple(listener.endpoint for listener in self._listeners)

    async def start(self) -> None:
        """Listen, and watch leases.

        Raises:
            ConfigError: the configured address cannot be used.
        """
        for transport in self._transports:
            try:
                listener = transport.listen()
            except OSError as error:
                problem = f"cannot listen for {transport.scheme} on {self._config.host}: {error}"
                if transport is not self._transports[-1]:  # a better way, not the last one
                    logger.warning("%s; peers will use another transport", problem)
                    continue
                await self.close()
                raise ConfigError("transfer.host", problem) from None
            self._listeners.append(listener)
            acceptor = threading.Thread(
                target=self._accept,
                args=(listener,),
                name=f"kv-accept-{transport.scheme}",
                daemon=True,
            )
            acceptor.start()
            self._acceptors.append(acceptor)
        self._watch.start()

    async def close(self) -> None:
        """Fail what is under way and stop listening."""
        await asyncio.to_thread(self._close)

    def reserve(
        self,
        request_id: str,
        room: int,
        page_ids: Sequence[int],
        num_tokens: int,
        first_page: int = 0,
    ) -> Reservation:
        """Hand pages to the transfer of one prompt; its lease starts now.

        Args:
            request_id: for logs and errors.
            room: the attempt; not in use by another live reservation.
            page_ids: the prompt's pages in order; more than the prompt needs are ignored.
            num_tokens: length of the prompt.
            first_page: pages before this one hold the right bytes already.

        Raises:
            TransferAborted: the receiver is closed.
            TransferError: the room is in use.
        """
        num_pages = -(-num_tokens // self._identity.layout.page_tokens)
        used = tuple(page_ids[:num_pages])
        assert len(used) == num_pages, "fewer pages than the prompt needs"
        assert 0 <= first_page <= num_pages
        assert all(0 < page < self._num_pages for page in used)
        with self._lock:
            if self._closed:
                raise TransferAborted(request_id, "the decode worker is stopping")
            if room in self._rooms:
                raise TransferError(request_id, f"room {room} is in use")
            target = KVTarget(
                endpoints=self.endpoints,
                incarnation=self._identity.incarnation,
                room=room,
                epoch=next(self._epochs),
                num_tokens=num_tokens,
                num_pages=num_pages,
                first_page=first_page,
            )
            terms = Terms(
                request_id=request_id,
                target=target,
                page_ids=used,
                expires_s=self._clock() + self._config.lease_s,
            )
            reservation = Reservation(terms, self._identity.layout.groups, self._ended)
            self._rooms[room] = reservation
            self._tally.add(pending=1)
        return reservation

    def find(self, room: int, epoch: int) -> Reservation | None:
        """Return the live reservation of exactly this epoch, or None."""
        with self._lock:
            reservation = self._rooms.get(room)
        return reservation if reservation is not None and reservation.key[1] == epoch else None

    def check_deadlines(self) -> None:
        """Look for expired leases and silent peers now; a watch does it at intervals."""
        now_s = self._clock()
        with self._lock:
            expired = [r for r in self._rooms.values() if r.terms.expires_s <= now_s]
            inbound = list(self._inbound)
        for reservation in expired:
            reason = f"not complete within its lease of {self._config.lease_s:g} s"
            reservation.end(TransferTimeout(reservation.request_id, reason))
        for connection in inbound:
            connection.check_idle()

    def _ended(self, reservation: Reservation, error: TransferError | None) -> None:
        with self._lock:
            if self._rooms.get(reservation.key[0]) is reservation:
                del self._rooms[reservation.key[0]]
        if error is None:
            self._tally.add(pending=-1, completed=1)
            return
        self._tally.add(pending=-1, aborted=1, corrupt=int(isinstance(error, TransferCorrupt)))
        logger.debug("request_id=%s transfer ended: %s", reservation.request_id, error.reason)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except ConnectionLost:
                return
            inbound = Inbound(
                InboundParts(
                    connection=connection,
                    identity=self._identity,
                    memory=self._memory,
                    rooms=self,
                    config=self._config,
                    credit_bytes=self._credit_bytes,
                    clock=self._clock,
                    tally=self._tally,
                    on_end=self._gone,
                )
            )
            with self._lock:
                refused = self._closed or len(self._inbound) >= MAX_CONNECTIONS
                if not refused:
                    self._inbound.add(inbound)
            if refused:
                connection.shutdown()
                connection.close()
            else:
                inbound.start()

    def _gone(self, inbound: Inbound) -> None:
        with self._lock:
            self._inbound.discard(inbound)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            inbound = list(self._inbound)
            reservations = list(self._rooms.values())
        for listener in self._listeners:
            listener.close()
        for acceptor in self._acceptors:
            acceptor.join()
        for reservation in reservations:
            reservation.end(
                TransferAborted(reservation.request_id, "the decode worker is stopping")
            )
        for connection in inbound:
            connection.fail(TransferAborted, "the decode worker is stopping")
            connection.join()
        self._watch.stop()
