"""What every transport must do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVTarget, decode, encode
from kv_transfer.testing import MakePair, Pair, handover
from kv_transfer.wire import FrameType
from tandem.errors import (
    LayoutMismatch,
    PeerLost,
    TransferAborted,
    TransferCorrupt,
    TransferError,
    TransferTimeout,
)
from tandem.requests import Handover, SampledToken, TokenLogprobs

HANG_GUARD_S = 30.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


def untouched(pair: Pair, page_ids: Sequence[int]) -> bool:
    return not any(
        any(pair.target[buffer.group.name][:, list(page_ids)].flatten().tolist())
        for buffer in pair.target.buffers
    )


async def credit_is_whole(pair: Pair) -> bool:
    """After one more transfer every answer that was on its way has arrived."""
    await pair.transfer(999_999, [1], [23])
    (link,) = pair.sender.links
    whole: bool = link.free_credit_bytes == link.credit_bytes
    return whole and link.streams == 0


@pytest.mark.parametrize("groups", ["mha", "mla"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 16, 37])
def test_every_page_arrives(any_pair: MakePair, groups: str, num_tokens: int) -> None:
    async def scenario() -> None:
        async with any_pair(groups=groups) as pair:
            num_pages = -(-num_tokens // 4)
            shuffled = random.Random(num_tokens)
            ours = shuffled.sample(range(1, 24), num_pages)
            theirs = shuffled.sample(range(1, 24), num_pages)
            reservation = pair.receiver.reserve("r", 5, theirs, num_tokens)
            stream = await pair.sender.open(reservation.target, "r")
            sent = Handover(
                first_token=SampledToken(
                    token_id=11, logprobs=TokenLogprobs(logprob=-0.5, top=((11, -0.5), (3, -2.0)))
                ),
                prompt_tokens=num_tokens,
                cached_tokens=num_tokens // 2,
            )
            pair.send(stream, ours)
            stream.finish(sent)
            assert await reservation.wait() == sent
            stats = await stream.wait()
            await reservation.release()
            assert stats.nbytes == sum(3 * num_pages * g.page_bytes for g in pair.source.groups)
            assert pair.same(ours, theirs)
            assert untouched(pair, sorted(set(range(24)) - set(theirs)))
            assert pair.sender.pending == pair.receiver.pending == 0

    run(scenario())


def test_chunks_and_repeated_pages(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            ours, theirs = [9, 8, 1, 2, 20], [3, 4, 5, 19, 18]
            reservation = pair.receiver.reserve("r", 5, theirs, 18)
            stream = await pair.sender.open(reservation.target, "r")
            pair.send(stream, ours[:3])
            pair.send(stream, ours[2:], first_page=2)  # the third page was half full before
            stream.finish(handover(18))
            await reservation.wait()
            await stream.wait()
            assert pair.same(ours, theirs)

    run(scenario())


def test_pages_that_decode_has_are_not_sent(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4, 5, 6], 16, first_page=2)
            stream = await pair.sender.open(reservation.target, "r")
            pair.send(stream, [10, 11, 12, 13])
            stream.finish(handover(16))
            await reservation.wait()
            await stream.wait()
            assert pair.same([12, 13], [5, 6])
            assert untouched(pair, [3, 4])

    run(scenario())


def test_nothing_to_send_still_commits(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8, first_page=2)
            stream = await pair.sender.open(reservation.target, "r")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            assert (await reservation.wait()).first_token.token_id == 7
            assert (await stream.wait()).nbytes == 0

    run(scenario())


def test_layers_travel_while_later_ones_are_computed(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            for layer in range(3):
                stream.send_layer(layer, [10, 11], 0)
                await reservation.wait_layer(layer)  # before the next is even handed over
            stream.finish(handover(8))
            await reservation.wait()
            stats = await stream.wait()
            assert stats.early_bytes >= stats.nbytes * 2 // 3  # the last may be just written

    run(scenario())


def test_streams_share_one_connection(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair(credit_bytes=4096) as pair:
            async with asyncio.TaskGroup() as group:
                for room in range(1, 8):
                    ids = list(range(3 * room - 2, 3 * room + 1))
                    group.create_task(pair.transfer(room, ids, ids))
            assert pair.same(range(1, 22), range(1, 22))
            assert len(pair.sender.links) == 1
            assert await credit_is_whole(pair)

    run(scenario())


def test_without_checksums(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair(checksum=False) as pair:
            await pair.transfer(1, [5, 6], [7, 8])
            assert pair.same([5, 6], [7, 8])

    run(scenario())


@pytest.mark.parametrize("layers_sent", [0, 1, 3])
def test_prefill_aborts(any_pair: MakePair, layers_sent: int) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            for layer in range(layers_sent):
                stream.send_layer(layer, [10, 11], 0)
            stream.abort("client left")
            stream.abort("again")
            with pytest.raises(TransferAborted, match="client left"):
                await stream.wait()
            with pytest.raises(TransferAborted, match="client left"):
                await reservation.wait()
            with pytest.raises(TransferAborted):
                stream.send_layer(0, [10], 0)
            with pytest.raises(TransferAborted):
                stream.finish(handover(8))
            await reservation.release()
            await reservation.release()
            assert await credit_is_whole(pair)
            assert pair.sender.pending == pair.receiver.pending == 0

    run(scenario())


def test_prefill_aborts_around_the_commit(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            stream.abort("too late or just in time")
            with pytest.raises(TransferAborted):
                await stream.wait()
            # Exactly one terminal frame went out: whichever it was, decode has a verdict.
            (verdict,) = await asyncio.gather(reservation.wait(), return_exceptions=True)
            assert isinstance(verdict, Handover | TransferAborted)
            assert pair.same([10, 11], [3, 4]) or isinstance(verdict, TransferAborted)
            await reservation.release()
            assert await credit_is_whole(pair)

    run(scenario())


def test_ends_after_the_commit_change_nothing(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            pair.send(stream, [10, 11])
            stream.finish(handover(8))
            first = await reservation.wait()
            stats = await stream.wait()
            stream.abort("late")
            await reservation.release()
            assert await reservation.wait() == first
            assert await stream.wait() == stats
            assert pair.receiver.counters.completed == 1
            assert pair.receiver.counters.aborted == 0
            assert await credit_is_whole(pair)

    run(scenario())


@pytest.mark.parametrize("layers_sent", [0, 1, 3])
def test_decode_releases(any_pair: MakePair, layers_sent: int) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            for layer in range(layers_sent):
                stream.send_layer(layer, [10, 11], 0)
            await reservation.release()
            await reservation.release()
            with pytest.raises(TransferAborted):
                await reservation.wait()
            with pytest.raises(TransferAborted):
                await stream.wait()
            assert await credit_is_whole(pair)
            assert pair.sender.pending == pair.receiver.pending == 0

    run(scenario())


def test_released_before_anybody_connects(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            await reservation.release()
            stream = await pair.sender.open(reservation.target, "r")
            with pytest.raises(TransferAborted, match="not reserved"):
                await stream.wait()

    run(scenario())


def test_pages_outside_the_reservation_are_refused(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("r", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "r")
            with pytest.raises(TransferError, match="page 2 of layer 0"):
                stream.send_layer(0, [1, 2, 3], 0)
            with pytest.raises(TransferError, match="no layer 3"):
                stream.send_layer(3, [1], 0)
            with pytest.raises(TransferError, match="already in use"):
                await pair.sender.open(reservation.target, "r")

    run(scenario())


def test_stale_frames_never_touch_reused_pages(any_pair: MakePair) -> None:
    """The writer goes on after the release, and the pages have a new owner already."""

    async def scenario() -> None:
        async with any_pair() as pair:
            first = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, first.target)
            raw.open()
            raw.data(0, 0, [10, 11])
            await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
            await first.release()
            await pair.transfer(5, [1, 2], [3, 4])  # same room, same pages, next epoch
            raw.data(0, 0, [10, 11])
            raw.data(2, 1, [10, 11])
            raw.commit((2, 2, 2), 8)
            await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
            await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
            answer = await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            assert answer.header.epoch == raw.epoch
            raw.close()
            assert pair.same([1, 2], [3, 4])
            assert pair.receiver.counters.stale_frames == 2
            assert pair.receiver.counters.stale_bytes == 2 * 2 * pair.source.groups[0].page_bytes

    run(scenario())


def test_an_older_epoch_of_a_room_has_no_say(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            old = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, old.target)
            await old.release()
            new = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw.open()
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.everything([10, 11])
            raw.commit((2, 2, 2), 8)
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.abort()
            raw.say(FrameType.PING)
            await asyncio.to_thread(raw.read_until, FrameType.PONG)
            raw.close()
            assert untouched(pair, range(24))
            stream = await pair.sender.open(new.target, "a")
            pair.send(stream, [1, 2])
            stream.finish(handover(8))
            await new.wait()
            await stream.wait()
            assert pair.same([1, 2], [3, 4])

    run(scenario())


def test_a_reservation_has_one_writer(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [1, 2], 0)
            await reservation.wait_layer(0)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.everything([10, 11])
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.close()
            stream.send_layer(1, [1, 2], 0)
            stream.send_layer(2, [1, 2], 0)
            stream.finish(handover(8))
            await reservation.wait()
            await stream.wait()
            assert pair.same([1, 2], [3, 4])

    run(scenario())


def test_wrong_checksum_is_never_served(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.data(1, 1, [10, 11], change=lambda h: replace(h, checksum=(h.checksum or 0) ^ 1))
            with pytest.raises(TransferCorrupt, match="layer 1"):
                await reservation.wait()
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.everything([10, 11])
            raw.commit((2, 2, 2), 8)
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            assert pair.receiver.counters.corrupt == 1
            raw.close()
            await reservation.release()
            assert await credit_is_whole(pair)

    run(scenario())


@pytest.mark.parametrize(
    ("pages_by_layer", "prompt_tokens", "problem"),
    [
        ((2, 2, 1), 8, "pages sent by layer"),
        ((2, 2), 8, "pages sent by layer"),
        ((2, 2, 2), 7, "7 prompt tokens, 8 reserved"),
    ],
)
def test_manifest_must_match(
    any_pair: MakePair, pages_by_layer: tuple[int, ...], prompt_tokens: int, problem: str
) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.everything([10, 11])
            raw.commit(pages_by_layer, prompt_tokens)
            with pytest.raises(TransferCorrupt, match=problem):
                await reservation.wait()
            await asyncio.to_thread(raw.read_until, FrameType.ABORT)
            raw.close()

    run(scenario())


def test_a_missing_layer_or_page_is_noticed(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [1, 2], 0)
            stream.send_layer(1, [1], 0)
            stream.send_layer(1, [1], 0)  # the count is right, the second page is missing
            stream.send_layer(2, [1, 2], 0)
            stream.finish(handover(8))
            with pytest.raises(TransferCorrupt, match="layer 1 is not whole"):
                await reservation.wait()
            with pytest.raises(TransferAborted, match="layer 1 is not whole"):
                await stream.wait()

    run(scenario())


def test_pages_below_or_beyond_the_reservation_fail_it(any_pair: MakePair) -> None:
    async def scenario(first_page: int, problem: str) -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4, 5], 12, first_page=1)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.data(0, 0, [10, 11], first_page)
            with pytest.raises(TransferCorrupt, match=problem):
                await reservation.wait()
            raw.close()
            assert untouched(pair, range(24))

    run(scenario(0, "below"))
    run(scenario(2, "beyond"))


def test_prefill_vanishes_after_any_frame(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            for room, frames in enumerate(range(7), start=1):
                reservation = pair.receiver.reserve("a", room, [3, 4], 8)
                raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
                raw.open()
                raw.say(FrameType.PING)
                await asyncio.to_thread(raw.read_until, FrameType.PONG)
                for count in range(frames):
                    raw.data(count // 2, count % 2, [10, 11])
                if frames % 2:
                    await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
                raw.close()
                with pytest.raises(PeerLost, match="raw-prefill"):
                    await reservation.wait()
                await reservation.release()
            assert pair.receiver.pending == 0
            await pair.transfer(99, [1], [3])

    run(scenario())


def test_decode_vanishes(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [1, 2], 0)
            await reservation.wait_layer(0)
            await pair.receiver.close()
            with pytest.raises((PeerLost, TransferAborted)):
                await stream.wait()
            with pytest.raises(TransferAborted):
                await reservation.wait()
            await reservation.release()
            with pytest.raises(PeerLost):
                await pair.sender.open(reservation.target, "a")
            assert pair.sender.pending == 0
            assert pair.sender.links == ()

    run(scenario())


def test_lease_runs_out_without_new_work(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair(lease_s=10.0) as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [1, 2], 0)
            await reservation.wait_layer(0)
            pair.clock.now_s += 9.0
            pair.receiver.check_deadlines()
            assert pair.receiver.pending == 1
            pair.clock.now_s += 1.0
            pair.receiver.check_deadlines()
            with pytest.raises(TransferTimeout, match="lease"):
                await reservation.wait()
            with pytest.raises(TransferAborted, match="lease"):
                await stream.wait()
            await reservation.release()

    run(scenario())


def test_silent_prefill_is_pinged_and_then_given_up(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair(idle_timeout_s=20.0, lease_s=1e6) as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            raw.data(0, 0, [10, 11])
            await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
            for _ in range(4):  # computing for long, but alive
                pair.clock.now_s += 15.0
                pair.receiver.check_deadlines()
                await asyncio.to_thread(raw.read_until, FrameType.PING)
                raw.say(FrameType.PONG)
                raw.say(FrameType.PING)
                await asyncio.to_thread(raw.read_until, FrameType.PONG)
            assert pair.receiver.pending == 1
            pair.clock.now_s += 20.0
            pair.receiver.check_deadlines()
            with pytest.raises(TransferTimeout, match="silent for 20"):
                await reservation.wait()
            raw.close()
            await reservation.release()

    run(scenario())


def test_another_secret_is_refused(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair(receiver_secret=b"other") as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            with pytest.raises(PeerLost, match="same secret"):
                await pair.sender.open(reservation.target, "a")
            assert pair.sender.pending == 0

    run(scenario())


def test_another_decode_worker_at_the_same_place_is_refused(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            target = decode(KVTarget, pair.receiver.reserve("a", 5, [3, 4], 8).target)
            old = encode(replace(target, incarnation="decode-0"))
            with pytest.raises(PeerLost, match="decode-0 is gone"):
                await pair.sender.open(old, "a")

    run(scenario())


def test_closing_the_sender_fails_its_streams(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [1, 2], 0)
            await reservation.wait_layer(0)
            await pair.sender.close()
            with pytest.raises(TransferAborted, match="stopping"):
                await stream.wait()
            with pytest.raises(PeerLost):
                await reservation.wait()
            with pytest.raises(TransferAborted):
                await pair.sender.open(reservation.target, "b")

    run(scenario())


def test_bad_target_is_an_error(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with any_pair() as pair:
            target = decode(KVTarget, pair.receiver.reserve("a", 5, [3, 4], 8).target)
            bad = [
                b"\xc1 nonsense",
                encode(replace(target, epoch=2**32)),
                encode(replace(target, num_pages=2**40)),
                encode(replace(target, first_page=3)),
            ]
            for raw in bad:
                with pytest.raises(TransferError, match="bad target"):
                    await pair.sender.open(raw, "a")
            with pytest.raises(TransferError, match="room 5 is in use"):
                pair.receiver.reserve("b", 5, [6], 4)

    run(scenario())


MISMATCHES: dict[str, dict[str, Any]] = {
    "protocol_version": {"protocol_version": 2},
    "model": {"model": "other"},
    "weights_digest": {"weights_digest": "other"},
    "rope": {"rope": "other"},
    "groups": {"groups": ("k", "w")},
    "k.dtype": {"k": {"dtype": "bfloat16"}},
    "k.num_layers": {"k": {"num_layers": 4}},
    "v.num_layers": {"v": {"num_layers": 4}},
    "k.page_tokens": {"k": {"page_tokens": 6}, "v": {"page_tokens": 6}},
    "v.token_shape": {"v": {"token_shape": (4, 4)}},
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_layout_mismatch_names_the_field(
    any_pair: MakePair, mha_layout: KVLayout, field: str
) -> None:
    k, v = mha_layout.groups
    change = dict(MISMATCHES[field])
    k = replace(k, **change.pop("k", {}))
    v = replace(v, **change.pop("v", {}))
    if names := change.pop("groups", None):
        k, v = replace(k, name=names[0]), replace(v, name=names[1])
    theirs = replace(mha_layout, groups=(k, v), **change)

    async def scenario() -> None:
        async with any_pair(receiver_layout=theirs) as pair:
            num_tokens = theirs.page_tokens
            reservation = pair.receiver.reserve("a", 5, [3], num_tokens)
            with pytest.raises(LayoutMismatch) as caught:
                await pair.sender.open(reservation.target, "a")
            assert caught.value.field == field
            assert caught.value.ours != caught.value.theirs
            await pair.receiver.close()
            assert pair.receiver.counters.refused_connections == 1

    run(scenario())
