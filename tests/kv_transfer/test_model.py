"""Real senders and receivers, every frame between them moved, copied or lost one step at a time.

Hypothesis chooses the steps. After each one all threads come to rest, and the owner of every page
is compared with its bytes. Time moves by steps too, so a history always repeats.
"""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kv_transfer import inbound, link, receiver, sender
from kv_transfer.fence import Fence
from kv_transfer.receiver import KVReceiver
from kv_transfer.reservation import Reservation
from kv_transfer.sender import KVSender
from kv_transfer.stream import KVStream
from kv_transfer.testing import GROUPS, SECRET, Clock, handover, layout_of
from kv_transfer.transports import inproc
from kv_transfer.transports.inproc import Fate, InprocConnection, InprocNetwork, InprocTransport
from kv_transfer.wire import FrameType, Header
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import TransferCorrupt, TransferError
from tandem.requests import Handover

T = TypeVar("T")
HANG_GUARD_S = 20.0
NUM_PAGES = 10
LAYERS = range(3)
FREE, RESERVED, REUSED = 0xEE, 0xB0, 0xFD
HANDSHAKE = (FrameType.HELLO, FrameType.CHALLENGE, FrameType.PROOF, FrameType.WELCOME)
LEASE_S, IDLE_S = 120.0, 30.0


class Activity:
    """Counts threads of the code under test that are not waiting for anything."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0

    def add(self, amount: int) -> None:
        with self._changed:
            self._busy += amount
            self._changed.notify_all()

    def rest(self) -> None:
        """Return when none of them has anything to do."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._busy, HANG_GUARD_S), "no rest"


ACTIVITY = Activity()


class WatchedCondition(threading.Condition):
    """Whoever waits is at rest, and is not from the moment of its notification on."""

    sleeping = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.sleeping += 1
        ACTIVITY.add(-1)
        notified = super().wait(timeout)
        if not notified:
            self.sleeping -= 1
            ACTIVITY.add(1)
        return notified

    def notify(self, n: int = 1) -> None:
        woken = min(n, self.sleeping)
        self.sleeping -= woken
        ACTIVITY.add(woken)
        super().notify(n)


class WatchedThread(threading.Thread):
    numbers = count()

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.number = next(self.numbers)

    def start(self) -> None:
        ACTIVITY.add(1)
        super().start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            ACTIVITY.add(-1)


class NoWatch:
    """Time-outs are looked at when the machine says so."""

    def __init__(self, *parts: object) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def watched() -> Iterator[pytest.MonkeyPatch]:
    """Let the code under test use threads whose rest can be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        parts: dict[str, Any] = dict(vars(threading))
        parts.update(Condition=WatchedCondition, Thread=WatchedThread)
        for module in (inbound, link, receiver, sender, inproc):
            patch.setattr(module, "threading", types.SimpleNamespace(**parts))
        for module in (receiver, sender):
            patch.setattr(module, "Watch", NoWatch)
        yield patch


class Gate:
    """Stops connections in the middle of a frame."""

    def __init__(self) -> None:
        self.changed = WatchedCondition()
        self.waiting: dict[int, int] = {}
        """By reader, the room whose frame it is placing."""

    def on_step(self, header: Header, taken: int) -> None:
        del taken
        reader = threading.current_thread()
        assert isinstance(reader, WatchedThread)
        with self.changed:
            self.waiting[reader.number] = header.room
            while reader.number in self.waiting:
                self.changed.wait()

    def open_one(self) -> None:
        """Let the oldest connection of those that wait go on to its next step."""
        with self.changed:
            if self.waiting:
                del self.waiting[min(self.waiting)]
            self.changed.notify_all()
        ACTIVITY.rest()

    def open(self) -> None:
        """Let each go on to its next step."""
        for _ in range(len(self.waiting)):
            self.open_one()


class Seat(InprocTransport):
    """Remembers which of a network's connections are its worker's."""

    def __init__(self, network: InprocNetwork) -> None:
        super().__init__(network)
        self.connections: list[tuple[str, InprocConnection]] = []

    def connect(self, endpoint: str, timeout_s: float) -> InprocConnection:
        connection = super().connect(endpoint, timeout_s)
        self.connections.append((endpoint, connection))
        return connection


def paint(pool: KVPool, page_ids: Sequence[int], value: int) -> None:
    for buffer in pool.buffers:
        pages_of(buffer.memory, buffer.num_pages)[:, list(page_ids)] = value


def values(pool: KVPool, page_id: int) -> set[int]:
    found: set[int] = set()
    for buffer in pool.buffers:
        page = pages_of(buffer.memory, buffer.num_pages)[:, page_id]
        found.update(np.flatnonzero(np.bincount(page.ravel(), minlength=256)).tolist())
    return found


def pages_of(memory: memoryview, num_pages: int) -> Any:
    return np.frombuffer(memory, dtype=np.uint8).reshape(len(LAYERS), num_pages, -1)


@dataclass(eq=False)
class Prefill:
    """A sender's process."""

    sender: KVSender
    seat: Seat
    pool: KVPool
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))


@dataclass(eq=False)
class Decode:
    """A receiver's process."""

    receiver: KVReceiver
    pool: KVPool
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))
    ended: int = 0


@dataclass(eq=False)
class Sent:
    """One stream, and the source pages that it has."""

    prefill: Prefill
    page_ids: list[int]
    value: int
    opening: asyncio.Task[KVStream | TransferError]
    stream: KVStream | None = None
    waiting: asyncio.Task[object] | None = None
    next_layer: int = 0
    finished: bool = False
    gone: bool = False


@dataclass(eq=False)
class Transfer:
    """One reservation, from `reserve` until its pages are free."""

    decode: Decode
    reservation: Reservation
    page_ids: list[int]
    first_page: int
    expires_s: float
    waiting: asyncio.Task[object]
    sent: list[Sent] = field(default_factory=list)
    releasing: asyncio.Task[None] | None = None
    landed_value: int | None = None
    counted: bool = False


def chosen(candidates: Sequence[T], index: int) -> Sequence[T]:
    """One of them, or none when there is none: what is drawn never depends on threads."""
    return [candidates[index % len(candidates)]] if candidates else []


async def caught(wait: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await wait
    except TransferError as error:
        return error


async def spin() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class TransferMachine(RuleBasedStateMachine):
    """What can happen to two prefill workers, a decode worker and the network between them."""

    pull = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.network = InprocNetwork()
        self.network.pull = self.pull
        self.network.rule = self.fate
        self.network.step_bytes = 300
        self.gate = Gate()
        self.network.on_step = self.gate.on_step
        self.config = TransferConfig(credit_bytes=2048, lease_s=LEASE_S, idle_timeout_s=IDLE_S)
        self.names = count(1)
        self.source_values = count(1)
        self.flips = 0  # DATA frames to spoil from now on
        self.damaged = False
        self.holding = True
        self.transfers: list[Transfer] = []
        self.past: list[Transfer] = []

    def fate(self, way: str, header: Header) -> Fate:
        del way
        if self.flips and header.type is FrameType.DATA:
            self.flips -= 1
            return "flip_payload"
        return "hold" if self.holding and header.type not in HANDSHAKE else "deliver"

    # ------------------------------------------------------------------ processes

    @initialize()
    def begin(self) -> None:
        self.decode = self.new_decode()
        self.prefills = [self.new_prefill(), self.new_prefill()]

    def new_decode(self) -> Decode:
        pool = KVPool(GROUPS["mha"], NUM_PAGES)
        paint(pool, range(NUM_PAGES), FREE)
        name = f"decode-{next(self.names)}"
        seat = Seat(self.network)
        receiver = KVReceiver(
            pool, layout_of(pool.groups), self.config, SECRET, name, self.clock, [seat]
        )
        self.loop.run_until_complete(receiver.start())
        return Decode(receiver, pool)

    def new_prefill(self) -> Prefill:
        pool = KVPool(GROUPS["mha"], NUM_PAGES)
        paint(pool, range(NUM_PAGES), REUSED)
        name = f"prefill-{next(self.names)}"
        seat = Seat(self.network)
        sender = KVSender(
            pool,
            layout_of(pool.groups),
            self.config,
            SECRET,
            name,
            clock=self.clock,
            transports=[seat],
        )
        return Prefill(sender, seat, pool)

    @rule()
    def decode_dies(self) -> None:
        (endpoint,) = self.decode.receiver.endpoints
        for prefill in self.prefills:
            for where, connection in prefill.seat.connections:
                if where == endpoint:
                    connection.sever()
                    ACTIVITY.rest()
        self.gate.open()
        self.loop.run_until_complete(self.decode.receiver.close())
        self.decode = self.new_decode()

    @rule(which=st.integers(0, 1))
    def prefill_dies(self, which: int) -> None:
        prefill = self.prefills[which]
        for _, connection in prefill.seat.connections:
            connection.sever()
            ACTIVITY.rest()
        self.gate.open()
        self.loop.run_until_complete(prefill.sender.close())
        self.prefills[which] = self.new_prefill()

    # ------------------------------------------------------------------ requests

    @rule(
        num_pages=st.integers(1, 4), first_page=st.sampled_from([0, 0, 1]), spare=st.integers(0, 3)
    )
    def reserve(self, num_pages: int, first_page: int, spare: int) -> None:
        decode = self.decode
        if len(decode.free) < num_pages:
            return
        page_ids = [decode.free.pop(0) for _ in range(num_pages)]
        paint(decode.pool, page_ids, RESERVED)
        room = next(self.names)
        reservation = decode.receiver.reserve(
            f"r{room}", room, page_ids, 4 * num_pages - spare, min(first_page, num_pages)
        )
        self.transfers.append(
            Transfer(
                decode,
                reservation,
                page_ids,
                min(first_page, num_pages),
                self.clock.now_s + LEASE_S,
                self.loop.create_task(caught(reservation.wait())),
            )
        )

    @rule(index=st.integers(0, 7), which=st.integers(0, 1))
    def open(self, index: int, which: int) -> None:
        for transfer in chosen(self.transfers, index):
            self.open_from(transfer, self.prefills[which])

    @rule(index=st.integers(0, 3), which=st.integers(0, 1))
    def open_late(self, index: int, which: int) -> None:
        for transfer in chosen(self.past[-4:], index):
            self.open_from(transfer, self.prefills[which])

    def open_from(self, transfer: Transfer, prefill: Prefill) -> None:
        num_pages = len(transfer.page_ids)
        if len(prefill.free) < num_pages or len(transfer.sent) == 2:
            return
        page_ids = [prefill.free.pop(0) for _ in range(num_pages)]
        value = next(self.source_values) % 0xB0
        paint(prefill.pool, page_ids, value)
        target = transfer.reservation.target
        opening = self.loop.create_task(caught(prefill.sender.open(target, "r")))
        transfer.sent.append(Sent(prefill, page_ids, value, opening))

    def streams(self) -> list[tuple[Transfer, Sent, KVStream]]:
        return [
            (transfer, sent, sent.stream)
            for transfer in self.past + self.transfers
            for sent in transfer.sent
            if sent.stream is not None and not sent.gone
        ]

    @rule(index=st.integers(0, 7), layers=st.integers(1, 4))
    def compute(self, index: int, layers: int) -> None:
        for transfer, sent, stream in chosen(self.streams(), index):
            num_tokens = transfer.reservation.terms.target.num_tokens
            try:
                for _ in range(layers):
                    if sent.next_layer < len(LAYERS):
                        stream.send_layer(sent.next_layer, sent.page_ids, 0)
                        sent.next_layer += 1
                    elif not sent.finished:
                        sent.finished = True
                        stream.finish(handover(num_tokens))
            except TransferError:
                assert stream.ended

    @rule(index=st.integers(0, 7))
    def abort(self, index: int) -> None:
        for _, _, stream in chosen(self.streams(), index):
            stream.abort("client left")

    @rule(index=st.integers(0, 7))
    def release(self, index: int) -> None:
        for transfer in chosen(self.transfers, index):
            self.give_up(transfer)

    @rule()
    def release_in_the_middle_of_a_frame(self) -> None:
        for transfer in self.transfers:
            if transfer.reservation.key[0] in self.gate.waiting.values():
                self.give_up(transfer)

    @rule(
        which=st.integers(0, 1),
        num_pages=st.integers(1, 4),
        layers=st.integers(1, 4),
        at_once=st.booleans(),
    )
    def request(self, which: int, num_pages: int, layers: int, at_once: bool) -> None:
        """What happens most often, in one step."""
        before = len(self.transfers)
        self.reserve(num_pages, 0, 0)
        for transfer in self.transfers[before:]:
            self.open_from(transfer, self.prefills[which])
            self.settle()
            if transfer.sent and transfer.sent[0].stream is not None:
                self.compute(len(self.streams()) - 1, layers)
        ACTIVITY.rest()
        if at_once:
            self.deliver_all()

    def give_up(self, transfer: Transfer) -> None:
        if transfer.releasing is None:
            transfer.releasing = self.loop.create_task(transfer.reservation.release())

    # ------------------------------------------------------------------ network and time

    def holding_ends(self) -> list[InprocConnection]:
        return [end for end in self.network.connections if end.num_held]

    @rule(index=st.integers(0, 7), frames=st.sampled_from([1, 1, 2, 5, 50]))
    def deliver(self, index: int, frames: int) -> None:
        for end in chosen(self.holding_ends(), index):
            end.deliver_held(frames)

    @rule()
    def deliver_all(self) -> None:
        for end in self.holding_ends():  # one by one: threads that race would not repeat
            end.deliver_held()
            ACTIVITY.rest()

    @rule(steps=st.integers(1, 3))
    def place_more(self, steps: int) -> None:
        for _ in range(steps):
            self.gate.open_one()

    @rule(index=st.integers(0, 7))
    def deliver_twice(self, index: int) -> None:
        for end in chosen(self.holding_ends(), index):
            self.damaged = True
            end.deliver_held(1, again=True)

    @rule()
    def spoil(self) -> None:
        """The next pages to be written change on the way; checksums must find out."""
        self.flips, self.damaged = 1, True

    @rule(index=st.integers(0, 7), half=st.booleans())
    def cut(self, index: int, half: bool) -> None:
        for connection in chosen(self.network.connections[-8:], index):
            if half:
                connection.half_close()
            else:
                connection.sever()

    @rule(seconds=st.sampled_from([8.0, IDLE_S, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for prefill in self.prefills:
            prefill.sender.check_deadlines()
            ACTIVITY.rest()
        self.decode.receiver.check_deadlines()

    # ------------------------------------------------------------------ what must be true

    def settle(self) -> None:
        for _ in range(2):
            ACTIVITY.rest()
            self.loop.run_until_complete(spin())
            self.collect()

    def collect(self) -> None:
        for transfer in self.transfers + self.past:
            for sent in transfer.sent:
                self.collect_sent(sent)
            if transfer.waiting.done() and not transfer.counted:
                transfer.counted = True
                transfer.decode.ended += 1
                self.check_verdict(transfer)
        for transfer in list(self.transfers):
            if transfer.decode is not self.decode:
                assert transfer.waiting.done(), "outlived its receiver"
                self.give_up(transfer)
            if transfer.releasing is not None and transfer.releasing.done():
                transfer.releasing.result()
                self.transfers.remove(transfer)
                self.past.append(transfer)
                paint(transfer.decode.pool, transfer.page_ids, FREE)
                transfer.decode.free += transfer.page_ids

    def collect_sent(self, sent: Sent) -> None:
        if sent.gone or not sent.opening.done():
            return
        opened = sent.opening.result()
        if isinstance(opened, KVStream) and sent.waiting is None:
            sent.stream = opened
            sent.waiting = self.loop.create_task(caught(opened.wait()))
        elif sent.waiting is None or sent.waiting.done():
            sent.gone = True
            paint(sent.prefill.pool, sent.page_ids, REUSED)  # at once the next prompt's
            sent.prefill.free += sent.page_ids

    def check_verdict(self, transfer: Transfer) -> None:
        verdict = transfer.waiting.result()
        if isinstance(verdict, Handover):
            found = [values(transfer.decode.pool, page) for page in self.missing(transfer)]
            landed = {value for page in found for value in page}
            assert len(landed) <= 1, f"landed with {landed}"
            assert landed <= {sent.value for sent in transfer.sent if sent.finished}, landed
            transfer.landed_value = min(landed, default=RESERVED)
        elif isinstance(verdict, TransferCorrupt):
            assert self.damaged, verdict

    def missing(self, transfer: Transfer) -> list[int]:
        return transfer.page_ids[transfer.first_page :]

    @invariant()
    def every_page_is_its_owner_s(self) -> None:
        self.settle()
        pool = self.decode.pool
        for page in self.decode.free:
            assert values(pool, page) == {FREE}, f"page {page} was written into after its release"
        for transfer in self.transfers:
            for page in transfer.page_ids[: transfer.first_page]:
                assert values(pool, page) == {RESERVED}
            allowed = {RESERVED} | {sent.value for sent in transfer.sent}
            if self.damaged:
                allowed |= {value ^ 1 for value in allowed}
            if self.pull:  # a writer that was given up; such bytes can arrive, but never land
                allowed.add(REUSED)
            if transfer.landed_value is not None:
                allowed = {transfer.landed_value}
            for page in self.missing(transfer):
                assert values(pool, page) <= allowed, f"page {page} of another request"

    @invariant()
    def every_transfer_ends_once(self) -> None:
        counters = self.decode.receiver.counters
        waiting = [t for t in self.transfers if not t.waiting.done()]
        assert self.decode.receiver.pending == counters.pending == len(waiting)
        assert counters.completed + counters.aborted == self.decode.ended
        for prefill in self.prefills:
            alive = [
                stream
                for _, sent, stream in self.streams()
                if sent.prefill is prefill and not stream.ended
            ]
            assert prefill.sender.pending == len(alive)
        for transfer in waiting:
            assert transfer.expires_s > self.clock.now_s, "outlived its lease"

    def teardown(self) -> None:
        try:
            if hasattr(self, "prefills"):
                self.everything_comes_to_an_end()
        finally:
            self.stop()
            self.loop.close()

    def everything_comes_to_an_end(self) -> None:
        self.flow()
        for transfer, sent, stream in self.streams():
            if sent.finished:
                assert stream.ended, "all frames arrived, and no verdict came"
                assert transfer.waiting.done() or transfer.sent[0] is not sent
        self.time_passes(IDLE_S)
        self.time_passes(LEASE_S)
        self.flow()
        for _, _, stream in self.streams():  # prefill learned it, or its own side gives up
            assert stream.ended, "outlived every time-out"
        for transfer in self.transfers:
            assert transfer.waiting.done()
            self.give_up(transfer)
        self.flow()
        assert not self.transfers
        assert not self.streams()
        assert sorted(self.decode.free) == list(range(1, NUM_PAGES))
        for prefill in self.prefills:
            assert sorted(prefill.free) == list(range(1, NUM_PAGES))
            self.serves_again(prefill)

    def flow(self) -> None:
        """Let the network and the gate hold nothing until all is quiet."""
        self.holding, self.flips = False, 0
        self.deliver_all()
        self.settle()
        while self.gate.waiting:
            self.gate.open()
            self.settle()
        self.every_page_is_its_owner_s()

    def serves_again(self, prefill: Prefill) -> None:
        for attempt in range(2):  # the first may find its connection half closed
            self.reserve(4, 0, 0)
            transfer = self.transfers[-1]
            self.open_from(transfer, prefill)
            self.settle()
            sent = transfer.sent[0]
            if sent.stream is not None:
                self.compute(len(self.streams()) - 1, 4)
                self.flow()
            self.give_up(transfer)
            self.settle()
            if transfer.landed_value == sent.value:
                break
            assert attempt == 0, transfer.waiting.result()
            assert isinstance(transfer.waiting.result(), TransferError)
            self.time_passes(IDLE_S)
            self.flow()
        (status,) = prefill.sender.links
        assert status.free_credit_bytes == status.credit_bytes
        assert status.streams == 0

    def stop(self) -> None:
        self.gate.open()
        self.network.step_bytes = 1 << 30
        for prefill in getattr(self, "prefills", ()):
            self.loop.run_until_complete(prefill.sender.close())
        if hasattr(self, "decode"):
            self.network.cut()
            self.loop.run_until_complete(self.decode.receiver.close())
        ACTIVITY.rest()


class PullMachine(TransferMachine):
    """The same through shared memory, where decode reads prefill's pages itself."""

    pull = True


PROFILE = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)
FIND_ONLY = settings(
    PROFILE, max_examples=1_000, phases=[Phase.generate], report_multiple_bugs=False
)


@pytest.mark.parametrize("machine", [TransferMachine, PullMachine])
def test_no_history_corrupts_loses_or_hangs(machine: type[TransferMachine]) -> None:
    with watched():
        run_state_machine_as_test(machine, settings=PROFILE)


def test_without_the_fence_a_page_of_another_request_is_written_into() -> None:
    """The test above means something: take the fence away, and it fails."""
    with watched() as patch:
        patch.setattr(Fence, "enter", lambda self: True)
        with pytest.raises(AssertionError, match=r"written into|another request"):
            run_state_machine_as_test(TransferMachine, settings=FIND_ONLY)
