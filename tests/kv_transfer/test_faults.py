"""Networks that hold, damage and cut frames, one frame at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.fence import Fence
from kv_transfer.messages import KVTarget, decode, encode
from kv_transfer.reservation import Reservation
from kv_transfer.testing import MakePair, Pair, all_are, handover, make_pair, set_pages
from kv_transfer.transports.inproc import Direction, Fate
from kv_transfer.wire import FrameType, Header
from tandem.errors import (
    PeerLost,
    TransferAborted,
    TransferCorrupt,
    TransferError,
    TransferTimeout,
)

HANG_GUARD_S = 30.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


def at_frame(number: int, direction: Direction, fate: Fate) -> Callable[..., Fate]:
    """A rule that treats one frame differently: the ``number``-th of its direction."""
    seen = 0

    def rule(way: Direction, header: Header) -> Fate:
        nonlocal seen
        if way != direction:
            return "deliver"
        seen += 1
        return fate if seen == number else "deliver"

    return rule


def hold_types(*types: FrameType) -> Callable[..., Fate]:
    return lambda way, header: "hold" if header.type in types else "deliver"


async def end_of(pair: Pair, reservation: Reservation) -> tuple[object, object]:
    """One transfer of three layers; what each side made of it."""

    async def prefill() -> object:
        stream = await pair.sender.open(reservation.target, "a")
        try:
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
        finally:
            verdict = await asyncio.gather(stream.wait(), return_exceptions=True)
        return verdict[0]

    theirs = asyncio.gather(prefill(), return_exceptions=True)
    ours = await asyncio.gather(reservation.wait(), return_exceptions=True)
    await reservation.release()
    return (await theirs)[0], ours[0]


@pytest.mark.parametrize("direction", ["to_decode", "to_prefill"])
@pytest.mark.parametrize("fate", ["cut", "half_close", "flip_header"])
def test_connection_breaks_at_any_frame(
    inproc_pair: MakePair, direction: Direction, fate: Fate
) -> None:
    """Handshake, open, six frames of pages, commit: broken at each, both sides learn of it."""

    async def scenario() -> None:
        for number in range(1, 12):
            async with inproc_pair(lease_s=5.0) as pair:
                pair.network.rule = at_frame(number, direction, fate)
                reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
                prefill = asyncio.create_task(end_of(pair, reservation))
                done, _ = await asyncio.wait([prefill], timeout=0)
                while not done and pair.receiver.pending:
                    # Whatever the receiver cannot know before the lease ends, the lease ends.
                    if pair.sender.counters.aborted or pair.sender.links == ():
                        pair.clock.now_s += 6.0
                    pair.receiver.check_deadlines()
                    done, _ = await asyncio.wait([prefill], timeout=0.01)
                theirs, ours = await prefill
                if isinstance(ours, TransferError):
                    assert isinstance(ours, PeerLost | TransferTimeout)
                    assert isinstance(theirs, TransferError)
                else:
                    assert pair.same([10, 11], [3, 4])
                assert pair.sender.pending == pair.receiver.pending == 0
                pair.network.rule = lambda way, header: "deliver"
                with suppress(PeerLost):  # the broken connection may not have been noticed yet
                    await pair.transfer(6, [5, 6], [7, 8])
                await pair.transfer(7, [1, 2], [3, 4])
                assert pair.same([1, 2], [3, 4])

    run(scenario())


def test_flipped_byte_is_corrupt(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair() as pair:
            await pair.transfer(4, [1], [3])
            pair.network.rule = at_frame(4, "to_decode", "flip_payload")
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            theirs, ours = await end_of(pair, reservation)
            assert isinstance(ours, TransferCorrupt)
            assert isinstance(theirs, TransferAborted)
            assert "checksum" in theirs.reason
            assert pair.receiver.counters.corrupt == 1
            await pair.transfer(6, [1, 2], [3, 4])  # the connection is as good as before
            assert len(pair.sender.links) == 1
            (link,) = pair.sender.links
            assert link.free_credit_bytes == link.credit_bytes

    run(scenario())


@pytest.mark.parametrize("fenced", [True, False])
def test_release_in_the_middle_of_a_frame(
    inproc_pair: MakePair, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """Pages get a new owner between two steps of one frame; without the fence it would be hurt."""
    if not fenced:
        monkeypatch.setattr(Fence, "enter", lambda self: True)

    async def scenario() -> None:
        async with inproc_pair() as pair:
            loop = asyncio.get_running_loop()
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            pair.network.step_bytes = 100

            async def take_over() -> None:
                await reservation.release()
                set_pages(pair.target, [3, 4], 0xB0)

            def on_step(header: Header, taken: int) -> None:
                if (header.room, header.layer, header.group, taken) == (5, 1, 0, 200):
                    asyncio.run_coroutine_threadsafe(take_over(), loop).result()

            pair.network.on_step = on_step
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [10, 11], 0)
            stream.send_layer(1, [10, 11], 0)
            with pytest.raises(TransferAborted):
                await stream.wait()
            await pair.transfer(6, [1], [7])  # behind all frames of the first on the connection
            assert all_are(pair.target, [3, 4], 0xB0) == fenced

    run(scenario())


def test_release_while_a_placement_runs_waits_for_it(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            assert reservation.fence.enter()
            release = asyncio.create_task(reservation.release())
            with pytest.raises(TransferAborted):
                await reservation.wait()
            assert not reservation.fence.enter()
            assert not release.done()
            reservation.fence.leave()
            await release

    run(scenario())


def test_credit_bounds_what_is_under_way(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair(credit_bytes=4096) as pair:
            pair.network.rule = hold_types(FrameType.CREDIT, FrameType.DONE)
            reservation = pair.receiver.reserve("a", 5, list(range(1, 23)), 88)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, list(range(1, 23)))
            stream.finish(handover(88))
            waiting = asyncio.create_task(stream.wait())
            await pair.sender_says(FrameType.DATA, times=4)
            (link,) = pair.sender.links
            assert link.free_credit_bytes == 0
            assert pair.sender.counters.bytes <= link.credit_bytes
            assert not waiting.done()
            pair.network.rule = lambda way, header: "deliver"
            pair.network.release()
            await waiting
            assert pair.same(range(1, 23), range(1, 23))

    run(scenario())


def test_abort_gets_through_without_credit(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair(credit_bytes=4096) as pair:
            pair.network.rule = hold_types(FrameType.CREDIT)
            reservation = pair.receiver.reserve("a", 5, list(range(1, 23)), 88)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, list(range(1, 23)))
            await pair.sender_says(FrameType.DATA, times=4)
            stream.abort("client left")
            with pytest.raises(TransferAborted, match="client left"):
                await reservation.wait()
            pair.network.rule = lambda way, header: "deliver"
            pair.network.release()
            with pytest.raises(TransferAborted, match="client left"):
                await stream.wait()
            await pair.transfer(6, [1], [7])
            (link,) = pair.sender.links
            assert link.free_credit_bytes == link.credit_bytes

    run(scenario())


def test_source_pages_stay_pinned_while_the_far_side_may_read_them() -> None:
    async def scenario() -> None:
        async with make_pair("inproc-pull") as pair:
            pair.network.rule = hold_types(FrameType.CREDIT)
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [10, 11], 0)
            await reservation.wait_layer(0)
            stream.abort("client left")
            with pytest.raises(TransferAborted):
                await reservation.wait()
            waiting = asyncio.create_task(stream.wait())
            assert not stream.quiet  # the frames' credit is not back
            pair.network.rule = lambda way, header: "deliver"
            pair.network.release()
            with pytest.raises(TransferAborted):
                await waiting

    run(scenario())


def test_pinned_pages_of_an_aborted_stream_are_not_pinned_for_ever() -> None:
    """Nothing but an aborted stream's frames is under way when decode falls silent."""

    async def scenario() -> None:
        async with make_pair("inproc-pull", idle_timeout_s=20.0) as pair:
            pair.network.rule = hold_types(FrameType.CREDIT)
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [10, 11], 0)
            await reservation.wait_layer(0)
            stream.abort("client left")
            with pytest.raises(TransferAborted):
                await reservation.wait()
            waiting = asyncio.create_task(stream.wait())
            assert not stream.quiet
            pair.clock.now_s += 20.0
            pair.sender.check_deadlines()
            with pytest.raises(TransferAborted, match="client left"):
                await waiting
            assert pair.sender.links == ()

    run(scenario())


def test_frames_read_after_the_sender_let_go_are_not_served() -> None:
    """The sender gave the connection up and reused its pages before decode got round to reading."""

    async def scenario() -> None:
        async with make_pair("inproc-pull", checksum=False) as pair:
            gate = threading.Event()

            def wait_for_gate(header: Header, taken: int) -> None:
                gate.wait()

            pair.network.step_bytes = 100
            pair.network.on_step = wait_for_gate
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            await pair.sender_says(FrameType.COMMIT)
            await pair.sender.close()
            with pytest.raises(TransferAborted):
                await stream.wait()
            set_pages(pair.source, [10, 11], 0xEE)
            gate.set()
            with pytest.raises(PeerLost):
                await reservation.wait()

    run(scenario())


def test_source_page_that_changes_under_way_is_corrupt() -> None:
    async def scenario() -> None:
        async with make_pair("inproc-pull") as pair:
            pair.network.rule = hold_types(FrameType.DATA)
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            await pair.sender_says(FrameType.COMMIT)
            set_pages(pair.source, [10], 0xEE)
            pair.network.rule = lambda way, header: "deliver"
            pair.network.release()
            with pytest.raises(TransferCorrupt):
                await reservation.wait()
            with pytest.raises(TransferAborted):
                await stream.wait()

    run(scenario())


def test_no_abort_follows_a_commit(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair() as pair:
            pair.network.rule = hold_types(FrameType.DONE)
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            await pair.sender_says(FrameType.COMMIT)
            stream.abort("too late")
            with pytest.raises(TransferAborted, match="too late"):
                await stream.wait()
            await reservation.wait()
            pair.network.rule = lambda way, header: "deliver"
            pair.network.release()
            await pair.transfer(6, [1], [7])
            assert pair.log.count(FrameType.ABORT) == 0

    run(scenario())


def test_silent_decode_worker_is_given_up(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair(idle_timeout_s=20.0) as pair:
            await pair.transfer(4, [1], [3])
            pair.network.rule = lambda way, header: "hold" if way == "to_prefill" else "deliver"
            pair.clock.now_s += 1000.0  # an idle connection owes nothing
            pair.sender.check_deadlines()
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            pair.clock.now_s += 19.0
            pair.sender.check_deadlines()
            assert pair.sender.pending == 1
            pair.clock.now_s += 1.0
            pair.sender.check_deadlines()
            with pytest.raises(TransferTimeout, match="silent for 20"):
                await stream.wait()
            assert pair.sender.links == ()
            pair.network.rule = lambda way, header: "deliver"
            await pair.transfer(6, [1, 2], [5, 6])  # the peer is not blamed for ever
            assert pair.same([1, 2], [5, 6])

    run(scenario())


def test_silent_listener_times_out(inproc_pair: MakePair) -> None:
    async def scenario() -> None:
        async with inproc_pair(connect_timeout_s=0.05) as pair:
            (transport,) = pair.transports()
            listener = transport.listen()  # nobody accepts
            target = decode(KVTarget, pair.receiver.reserve("a", 5, [3, 4], 8).target)
            silent = encode(replace(target, endpoints=(listener.endpoint,)))
            with pytest.raises(TransferTimeout, match="did not answer"):
                await pair.sender.open(silent, "a")

    run(scenario())


def test_duplicates_of_a_commit_are_answered_and_ignored(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.everything([10, 11])
            raw.commit((2, 2, 2), 8)
            await reservation.wait()
            set_pages(pair.target, [3, 4], 0xB0)  # decode's own from here on
            await asyncio.to_thread(raw.read_until, FrameType.DONE)
            raw.commit((2, 2, 2), 8)
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.abort()
            raw.open()
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.everything([10, 11])
            raw.commit((2, 2, 2), 8)
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.close()
            assert all_are(pair.target, [3, 4], 0xB0)
            assert pair.receiver.counters.completed == 1

    run(scenario())
