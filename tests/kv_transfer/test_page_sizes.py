"""Workers whose pages differ in size: every token's K and V still arrive in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.testing import GROUPS, MakePair, Pair, handover, layout_of, page, set_pages
from kv_transfer.transport import ConnectionLost
from kv_transfer.wire import FrameType
from tandem.cache.pool import KVPool

HANG_GUARD_S = 30.0
SIZES = [(4, 8), (8, 4), (4, 16), (16, 4), (1, 4), (4, 1)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


def layout(page_tokens: int) -> KVLayout:
    return layout_of([replace(group, page_tokens=page_tokens) for group in GROUPS["mha"]])


def tokens(pool: KVPool, index: int, layer: int, page_ids: Sequence[int]) -> list[bytes]:
    """One entry for each token in these pages."""
    group = pool.groups[index]
    size = group.page_bytes // group.page_tokens
    data = b"".join(page(pool, index, layer, page_id) for page_id in page_ids)
    return [data[start : start + size] for start in range(0, len(data), size)]


def same_tokens(
    pair: Pair, source_ids: Sequence[int], target_ids: Sequence[int], those: slice
) -> bool:
    return all(
        tokens(pair.source, index, layer, source_ids)[those]
        == tokens(pair.target, index, layer, target_ids)[those]
        for index, group in enumerate(pair.source.groups)
        for layer in range(group.num_layers)
    )


def spread(count: int, seed: int) -> list[int]:
    """Different pages out of order, a few of them neighbours."""
    ids = [1 + (7 * i + seed) % 23 for i in range(count)]
    assert len(set(ids)) == count
    return ids


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_every_length_arrives(any_pair: MakePair, prefill: int, decode: int) -> None:
    async def scenario() -> None:
        async with any_pair(sender_layout=layout(prefill), receiver_layout=layout(decode)) as pair:
            large = max(prefill, decode)
            for room, num_tokens in enumerate(range(1, min(2 * large + 2, 23)), 1):
                source_ids = spread(-(-num_tokens // prefill), room)
                target_ids = spread(-(-num_tokens // decode), room + 3)
                others = sorted(set(range(24)) - set(target_ids))
                set_pages(pair.target, range(24), 0xEE)
                reservation = pair.receiver.reserve("a", room, target_ids, num_tokens)
                stream = await pair.sender.open(reservation.target, "a")
                pair.send(stream, source_ids)
                stream.finish(handover(num_tokens))
                await stream.wait()
                assert (await reservation.wait()).prompt_tokens == num_tokens
                await reservation.release()
                assert same_tokens(pair, source_ids, target_ids, slice(num_tokens)), num_tokens
                for index in range(2):
                    for layer in range(3):
                        for other in others:
                            assert set(page(pair.target, index, layer, other)) == {0xEE}

    run(scenario())


@pytest.mark.parametrize(("prefill", "decode"), [(4, 16), (16, 4)])
def test_chunks_and_pages_that_decode_has(any_pair: MakePair, prefill: int, decode: int) -> None:
    """Prefill sends 32 and then 13 tokens; decode has the first 16 of them."""

    async def scenario() -> None:
        async with any_pair(sender_layout=layout(prefill), receiver_layout=layout(decode)) as pair:
            source_ids, target_ids = spread(-(-45 // prefill), 1), spread(-(-45 // decode), 5)
            set_pages(pair.target, range(24), 0xEE)
            reservation = pair.receiver.reserve("a", 1, target_ids, 45, 16 // decode)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, source_ids[: 32 // prefill])
            pair.send(stream, source_ids[32 // prefill :], 32 // prefill)
            stream.finish(handover(45))
            await stream.wait()
            await asyncio.gather(*[reservation.wait_layer(layer) for layer in range(3)])
            await reservation.wait()
            await reservation.release()
            assert same_tokens(pair, source_ids, target_ids, slice(16, 45))
            for token in tokens(pair.target, 0, 0, target_ids)[:16]:
                assert set(token) == {0xEE}

    run(scenario())


@pytest.mark.parametrize(("prefill", "decode"), [(4, 16), (16, 4)])
def test_what_decode_has_whole_still_commits(any_pair: MakePair, prefill: int, decode: int) -> None:
    async def scenario() -> None:
        async with any_pair(sender_layout=layout(prefill), receiver_layout=layout(decode)) as pair:
            pages = -(-21 // decode)
            reservation = pair.receiver.reserve("a", 1, spread(pages, 1), 21, pages)
            stream = await pair.sender.open(reservation.target, "a")
            pair.send(stream, spread(-(-21 // prefill), 2))
            stream.finish(handover(21))
            assert (await stream.wait()).nbytes == 0
            await reservation.wait()
            await reservation.release()

    run(scenario())


def test_frames_of_the_larger_pages_are_refused(any_pair: MakePair) -> None:
    """A peer with small pages that sends frames sized by our own large ones breaks the rules."""

    async def scenario() -> None:
        async with any_pair(sender_layout=layout(4), receiver_layout=layout(16)) as pair:
            reservation = pair.receiver.reserve("a", 1, [1], 16)
            peer = await asyncio.to_thread(pair.raw_peer, reservation.target)

            def talk() -> None:
                peer.open()
                peer.data(0, 0, [1], change=lambda header: replace(header, num_pages=2))
                with pytest.raises(ConnectionLost):
                    peer.read_until(FrameType.DONE)

            await asyncio.to_thread(talk)
            peer.close()
            await reservation.release()

    run(scenario())
