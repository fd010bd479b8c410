"""The live view of the workers, from the streams by which they join.

A worker takes new requests while its stream is open, its reports are fresh and its state is ready.
When the stream breaks it takes none; when it has also been silent for the heartbeat time-out, or a
newer incarnation took its place, it is lost and what runs on it ends. States of a member:

    joined <-> left         its stream broke and came back; what runs on it goes on
    joined <-> suspect      a call to it failed; it takes no requests until its next report
    any     -> lost         for good; the same process may join anew
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from router import policy
from router.links import WorkerLink
from router.policy import Candidate, Load, Need, Pair, View
from tandem.config.tree import Mode, RouterConfig
from tandem.errors import WorkerLost
from tandem.workers import Role, WorkerIdentity, WorkerStatus

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 64  # lost workers kept for `status`; the oldest go first


class Member:
    """One incarnation of one worker."""

    def __init__(self, identity: WorkerIdentity, link: WorkerLink) -> None:
        self.identity = identity
        self.link = link
        self.status = WorkerStatus()
        """From its newest report."""
        self.load = Load()
        self.picked = 0
        self.reported_at = 0.0
        self.stream = 0
        """Number of the stream by which it is joined now; 0 while it has none."""
        self.suspect = False
        self.warned = ""
        """The problem with it that was logged."""
        self.lost = False
        self._on_lost: set[Callable[[WorkerLost], None]] = set()

    @property
    def ready(self) -> bool:
        """Whether it may take a new request."""
        alive = self.stream > 0 and not self.suspect and not self.lost
        return alive and self.status.state == "ready"

    @contextmanager
    def watch(self, on_lost: Callable[[WorkerLost], None]) -> Iterator[None]:
        """Have ``on_lost`` called when the member is lost within the block."""
        self._on_lost.add(on_lost)
        try:
            yield
        finally:
            self._on_lost.discard(on_lost)

    def lose(self, reason: str) -> None:
        """Tell everybody who watches."""
        self.lost, self.stream = True, 0
        error = WorkerLost(self.identity.worker_id, reason)
        for on_lost in tuple(self._on_lost):
            on_lost(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One stream by which a member is joined."""

    member: Member
    stream: int


class Placement:
    """Two members that serve a request; both count it as load until `Registry.charge` ends."""

    def __init__(self, prefill: Member, decode: Member, need: Need) -> None:
        self.prefill = prefill
        self.decode = decode
        self._tokens = need.prompt_tokens
        self._pages = policy.pages_for(need.total_tokens, decode.identity)
        self._count(1)
        prefill.load = replace(prefill.load, tokens=prefill.load.tokens + self._tokens)

    def prefilled(self) -> None:
        """The prompt needs no more computing; happens once at most."""
        load = self.prefill.load
        self.prefill.load = replace(load, tokens=load.tokens - self._tokens)
        self._tokens = 0

    def end(self) -> None:
        """Take the request's load off both members."""
        self.prefilled()
        self._count(-1)

    def _count(self, sign: int) -> None:
        prefill, decode = self.prefill, self.decode
        prefill.load = replace(prefill.load, requests=prefill.load.requests + sign)
        decode.load = replace(
            decode.load,
            requests=decode.load.requests + sign,
            pages=decode.load.pages + sign * self._pages,
        )


class Registry:
    """Who is there, and how much each has to do."""

    def __init__(
        self,
        config: RouterConfig,
        mode: Mode,
        weights_digest: str,
        open_link: Callable[[WorkerIdentity], WorkerLink],
    ) -> None:
        """Start empty, in the running event loop.

        Args:
            config: heartbeats and how long to wait for workers.
            mode: colocated pairs only roles of one process.
            weights_digest: of the model that the router tokenizes for.
            open_link: connects to a worker that joined.
        """
        self._config = config
        self._colocated = mode == "colocated"
        self._weights_digest = weights_digest
        self._open_link = open_link
        self._loop = asyncio.get_running_loop()
        self._members: dict[tuple[Role, str], Member] = {}
        self._closing: list[WorkerLink] = []
        self._changed = asyncio.Event()
        self._streams = 0
        self._placements = 0

    @property
    def members(self) -> list[Member]:
        """All known workers, lost ones included: prefill first, then by name."""
        order = sorted(self._members, key=lambda key: (key[0] != "prefill", key[1]))
        return [self._members[key] for key in order]

    def join(self, identity: WorkerIdentity, status: WorkerStatus) -> Seat:
        """Take in a worker whose stream has just opened."""
        key = (identity.role, identity.worker_id)
        member = self._members.get(key)
        if member is None or member.lost or member.identity != identity:
            if member is not None:
                self._lose(member, "another incarnation took its place")
                self._members.pop(key, None)
            member = self._members[key] = Member(identity, self._open_link(identity))
            logger.info(
                "worker=%s role=%s incarnation=%s address=%s joined",
                *(identity.worker_id, identity.role, identity.incarnation, identity.address),
            )
        self._streams += 1
        member.stream = self._streams
        seat = Seat(member=member, stream=self._streams)
        self.report(seat, status)
        self._warn_of_mismatches()
        self._announce()
        return seat

    def report(self, seat: Seat, status: WorkerStatus) -> bool:
        """Take in a report; False when the seat is no longer valid: the worker must join anew."""
        member = seat.member
        if member.lost or member.stream != seat.stream:
            return False
        was_ready = member.ready
        member.status, member.suspect, member.reported_at = status, False, self._loop.time()
        if member.ready != was_ready:
            self._announce()
        return True

    def leave(self, seat: Seat) -> None:
        """The stream of ``seat`` is over."""
        member = seat.member
        if member.lost or member.stream != seat.stream:
            return
        member.stream = 0
        logger.info("worker=%s left", member.identity.worker_id)
        if member.status.state == "draining":
            self._lose(member, "it has stopped", logging.INFO)
            del self._members[member.identity.role, member.identity.worker_id]
        self._announce()

    def suspect(self, worker_id: str) -> None:
        """A call failed as if the worker were gone: use others until it reports again."""
        for member in self._members.values():
            if member.identity.worker_id == worker_id:
                member.suspect = True
        self._announce()

    def problem(self, member: Member) -> str:
        """Why a worker that looks alive can never be used; empty when it can."""
        own = member.identity
        if own.model.weights_digest != self._weights_digest:
            theirs = own.model.weights_digest
            return f"weights ({theirs}) are not those of the router ({self._weights_digest})"
        others = [
            other for other in self.members if other.ready and other.identity.role != own.role
        ]
        problems = []
        for other in others:
            prefill, decode = (
                (own, other.identity) if own.role == "prefill" else (other.identity, own)
            )
            problems.append(policy.mismatch(prefill, decode))
        return problems[0] if problems and all(problems) else ""

    def pairs(self) -> list[tuple[Candidate, Candidate]]:
        """All pairs of workers that may take a request now."""
        roles: dict[Role, list[Candidate]] = {"prefill": [], "decode": []}
        for member in self._members.values():
            own = member.identity
            if member.ready and own.model.weights_digest == self._weights_digest:
                candidate = Candidate(identity=own, load=member.load, picked=member.picked)
                roles[own.role].append(candidate)
        view = View(prefill=tuple(roles["prefill"]), decode=tuple(roles["decode"]))
        return policy.pairs(view, colocated=self._colocated)

    def pools(self) -> policy.Pools | None:
        """The largest K/V pools in use, or None while no pair of workers is ready."""
        return policy.pools(self.pairs())

    async def wait(self, wait_s: float) -> None:
        """Wait until a pair of workers is ready.

        Raises:
            WorkerLost: none was within ``wait_s``.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self.pairs():
                    await self.next_change().wait()
        except TimeoutError:
            raise self._missing(wait_s) from None

    def choose(self, need: Need) -> Pair | None:
        """The least loaded ready pair; None if the request fits on none."""
        return policy.choose(self.pairs(), need)

    @contextmanager
    def charge(self, pair: Pair, need: Need) -> Iterator[Placement]:
        """Count a request as load of both workers for the length of the block."""
        prefill = self._members["prefill", pair.prefill.worker_id]
        decode = self._members["decode", pair.decode.worker_id]
        self._placements += 1
        prefill.picked = decode.picked = self._placements
        placement = Placement(prefill, decode, need)
        try:
            yield placement
        finally:
            placement.end()

    def next_change(self) -> asyncio.Event:
        """Set when, after this call, a worker becomes ready or ceases to be."""
        return self._changed

    async def run(self) -> None:
        """Lose members that fall silent and close connections to lost ones, until cancelled."""
        try:
            while True:
                await self._close_links()
                due = self._next_expiry()
                try:
                    async with asyncio.timeout_at(due):
                        await self.next_change().wait()
                except TimeoutError:
                    assert due is not None
                    self.expire(due)
        finally:
            self._closing += [member.link for member in self._members.values()]
            await self._close_links()

    def expire(self, due: float) -> None:
        """Lose members whose last report is older than the time-out; `run` does it in time.

        Args:
            due: when this should have happened. If the process itself slept through that moment,
                reports may lie unread in its sockets: everybody gets another time-out.
        """
        now = self._loop.time()
        timeout_s = self._config.heartbeat_timeout_s
        slept = now - due > min(self._config.heartbeat_interval_s, timeout_s / 2)
        for member in self.members:
            if member.lost or member.reported_at + timeout_s > now:
                continue
            if slept:
                member.reported_at = now
            else:
                self._lose(member, f"no sign of life for {timeout_s:g} s")
        self._announce()

    def _next_expiry(self) -> float | None:
        reports = [member.reported_at for member in self._members.values() if not member.lost]
        return min(reports) + self._config.heartbeat_timeout_s if reports else None

    def _lose(self, member: Member, reason: str, level: int = logging.WARNING) -> None:
        if member.lost:
            return
        logger.log(level, "worker=%s is lost: %s", member.identity.worker_id, reason)
        member.lose(reason)
        self._closing.append(member.link)
        lost = [key for key, other in self._members.items() if other.lost]
        for key in lost[:-_MAX_REMEMBERED]:
            del self._members[key]

    async def _close_links(self) -> None:
        while self._closing:
            await self._closing.pop().close()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _missing(self, waited_s: float) -> WorkerLost:
        ready = [member for member in self.members if member.ready]
        for role in ("prefill", "decode"):
            if not any(member.identity.role == role for member in ready):
                return WorkerLost(role, f"none is ready; waited {waited_s:g} s for one")
        problem = next(filter(None, map(self.problem, ready)), "they are not in one process")
        return WorkerLost("prefill and decode", f"none can be paired: {problem}")

    def _warn_of_mismatches(self) -> None:
        """Log what keeps workers from being used, whichever of two came second."""
        for member in self.members:
            problem = self.problem(member) if member.ready else ""
            if problem and problem != member.warned:
                logger.warning(
                    "worker=%s gets no requests: %s; start it with the same model and settings",
                    *(member.identity.worker_id, problem),
                )
            member.warned = problem
