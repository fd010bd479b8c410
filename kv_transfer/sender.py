"""Prefill's side: streams of pages to whatever decode worker a target names."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer.counters import Tally, TransferCounters
from kv_transfer.handshake import Identity, NotAuthentic, greet
from kv_transfer.layout import KVLayout
from kv_transfer.link import Link, LinkParts, LinkStatus
from kv_transfer.messages import KVTarget, decode_target
from kv_transfer.outcome import Outcome
from kv_transfer.paging import Paging
from kv_transfer.stream import KVStream
from kv_transfer.transport import Connection, ConnectionLost, RegisteredMemory, Transport
from kv_transfer.transports.choose import sending_transports
from kv_transfer.watch import Watch, interval_s
from kv_transfer.wire import WireError
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import LayoutMismatch, PeerLost, TransferAborted, TransferError, TransferTimeout

logger = logging.getLogger(__name__)


class KVSender:
    """Keeps one link per decode incarnation and opens streams on it."""

    def __init__(  # noqa: PLR0913 - what a worker knows, plus seams for tests
        self,
        pool: KVPool,
        layout: KVLayout,
        config: TransferConfig,
        secret: bytes,
        incarnation: str,
        *,
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
        self._memory = RegisteredMemory(pool.buffers)
        self._transports = tuple(
            sending_transports(config, pool.buffers) if transports is None else transports
        )
        for transport in self._transports:
            transport.register(pool.buffers)
        self._lock = threading.Lock()
        self._links: dict[str, Outcome[Link]] = {}
        self._live: set[Link] = set()
        self._closed = False
        self._tally = Tally()
        self._watch = Watch("kv-sender-watch", interval_s(config), self.check_deadlines)
        self._watching = False

    @property
    def pending(self) -> int:
        """Streams not yet ended."""
        return self._tally.read().pending

    @property
    def counters(self) -> TransferCounters:
        """Totals so far."""
        return self._tally.read()

    @property
    def links(self) -> tuple[LinkStatus, ...]:
        """Live connections."""
        with self._lock:
            live = list(self._live)
        return tuple(link.status for link in live)

    async def open(self, target: bytes, request_id: str) -> KVStream:
        """Start a stream to ``target``, connecting to its decode worker if need be.

        Raises:
            PeerLost: the decode worker is gone or does not hold our secret.
            LayoutMismatch: it keeps its caches differently.
            TransferTimeout: it did not answer in time.
            TransferError: ``target`` is not a target.
        """
        try:
            where = decode_target(target)
        except WireError as error:
            raise TransferError(request_id, f"bad target: {error}") from None
        for _ in range(2):  # the link at hand may have died unnoticed: then once more, afresh
            try:
                link = await self._link_to(where, request_id).wait()
            except LayoutMismatch:
                raise
            except TransferError as error:  # it may name another request that waited as well
                raise type(error)(request_id, error.reason) from None
            groups = link.paging.groups
            stream = KVStream(link, where, request_id, groups, clock=self._clock)
            if link.add(stream):
                return stream
        raise PeerLost(request_id, f"decode worker {where.incarnation} drops connections")

    async def close(self) -> None:
        """Fail what is under way and disconnect."""
        await asyncio.to_thread(self._close)

    def check_deadlines(self) -> None:
        """Look for silent peers now; the sender's own watch does it at intervals."""
        with self._lock:
            links = list(self._live)
        for link in links:
            link.check_idle()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._live)
            watching = self._watching
        for link in links:
            link.fail(TransferAborted, "the prefill worker is stopping")
            link.join()
        if watching:
            self._watch.stop()

    def _link_to(self, where: KVTarget, request_id: str) -> Outcome[Link]:
        with self._lock:
            if self._closed:
                raise TransferAborted(request_id, "the prefill worker is stopping")
            if not self._watching:
                self._watching = True
                self._watch.start()
            outcome = self._links.get(where.incarnation)
            if outcome is None or (outcome.value is not None and outcome.value.is_down):
                outcome = self._links[where.incarnation] = Outcome()
                threading.Thread(
                    target=self._connect,
                    args=(where, request_id, outcome),
                    name=f"kv-connect-{where.incarnation[:8]}",
                    daemon=True,
                ).start()
            return outcome

    def _connect(self, where: KVTarget, request_id: str, outcome: Outcome[Link]) -> None:
        """Connect and shake hands; all who wait for the same worker share the result."""
        problem: TransferError = PeerLost(request_id, "connecting failed")
        link: Link | None = None
        try:
            link = self._reach(where, request_id)
        except TransferError as error:
            problem = error
        finally:
            if link is None:
                with self._lock:
                    self._links.pop(where.incarnation, None)
                outcome.fail(problem)
        if link is None:
            logger.warning("decode=%s no K/V connection: %s", where.incarnation, problem)
            return
        with self._lock:
            refused = self._closed
            self._live.add(link)
        link.start()
        if refused:
            link.fail(TransferAborted, "the prefill worker is stopping")
        logger.info("decode=%s K/V connection over %s", where.incarnation, link.transport)
        outcome.succeed(link)

    def _reach(self, where: KVTarget, request_id: str) -> Link:
        problems: list[str] = []
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        try:
            for endpoint in where.endpoints:
                for transport in self._transports:
                    if not transport.reaches(endpoint):
                        continue
                    left_s = max(0.001, deadline_s - time.monotonic())
                    try:
                        connection = transport.connect(endpoint, left_s)
                    except ConnectionLost as error:
                        problems.append(f"{transport.scheme}: {error}")
                        continue
                    return self._greet(connection, transport.scheme, where, deadline_s)
        except (ConnectionLost, NotAuthentic, WireError) as error:
            raise PeerLost(request_id, str(error)) from None
        except TimeoutError:
            waited = f"{self._config.connect_timeout_s:g} s"
            reason = f"decode worker {where.incarnation} did not answer within {waited}"
            raise TransferTimeout(request_id, reason) from None
        raise PeerLost(
            request_id,
            f"no way to decode worker {where.incarnation}: "
            + ("; ".join(problems) or f"none of {', '.join(where.endpoints) or 'its 0 endpoints'}"),
        )

    def _greet(
        self, connection: Connection, scheme: str, where: KVTarget, deadline_s: float
    ) -> Link:
        greeted = False
        try:
            connection.set_deadline(deadline_s)
            peer = greet(connection, self._identity, where.incarnation)
            connection.share_sources()
            connection.set_deadline(None)
            greeted = True
        finally:
            if not greeted:
                connection.shutdown()
                connection.close()
        paging = Paging.between(self._identity.layout, peer.layout, self._memory)
        return Link(
            LinkParts(
                connection=connection,
                transport=scheme,
                peer=peer,
                paging=paging,
                memory=paging.memory,
                config=self._config,
                clock=self._clock,
                tally=self._tally,
                on_down=self._link_down,
            )
        )

    def _link_down(self, link: Link) -> None:
        with self._lock:
            self._live.discard(link)
            outcome = self._links.get(link.incarnation)
            if outcome is not None and outcome.value is link:
                del self._links[link.incarnation]
        logger.info("decode=%s K/V connection ended", link.incarnation)
