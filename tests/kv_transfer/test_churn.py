"""Two prefill workers, few pages, many transfers, a good part of them aborted by either side."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial

from kv_transfer.reservation import Reservation
from kv_transfer.sender import KVSender
from kv_transfer.stream import KVStream
from kv_transfer.testing import SECRET, MakePair, Pair, all_are, handover, set_pages
from tandem.errors import TransferError

HANG_GUARD_S = 100.0
TRANSFERS = 240


class Churn:
    """Decode's pages change hands among tasks; every content is checked when it matters."""

    def __init__(self, pair: Pair, senders: list[KVSender]) -> None:
        self.pair = pair
        self.senders = senders
        self.random = random.Random(7)
        self.free = list(range(1, 24))
        self.changed = asyncio.Condition()
        self.rooms = iter(range(1, TRANSFERS + 1))
        self.completed = self.taken_back = 0

    async def work(self) -> None:
        for room in self.rooms:
            count = self.random.randint(1, 6)
            async with self.changed:
                await self.changed.wait_for(partial(self.has_free, count))
                self.random.shuffle(self.free)
                page_ids, self.free = self.free[:count], self.free[count:]
            await self.transfer(room, page_ids)
            async with self.changed:
                self.free += page_ids
                self.changed.notify_all()

    def has_free(self, count: int) -> bool:
        return len(self.free) >= count

    async def transfer(self, room: int, page_ids: list[int]) -> None:
        sources = [self.random.randint(1, 23) for _ in page_ids]
        num_tokens = 4 * len(page_ids) - self.random.randint(0, 3)
        reservation = self.pair.receiver.reserve(f"r{room}", room, page_ids, num_tokens)
        prefill = asyncio.create_task(self.prefill(reservation, room, sources, num_tokens))
        if self.random.random() < 0.3:
            await self.pause(8)
            await reservation.release()
            set_pages(self.pair.target, page_ids, room % 251)
            await prefill
            await self.pause(20)
            assert all_are(self.pair.target, page_ids, room % 251)
            self.taken_back += 1
            return
        with suppress(TransferError):
            await reservation.wait()
            assert self.pair.same(sources, page_ids)
            self.completed += 1
        await reservation.release()
        await prefill

    async def prefill(
        self, reservation: Reservation, room: int, sources: list[int], num_tokens: int
    ) -> None:
        stream: KVStream | None = None
        try:
            stream = await self.random.choice(self.senders).open(reservation.target, f"r{room}")
            aborting = self.random.random() < 0.15
            for layer in range(3):
                stream.send_layer(layer, sources, 0)
                if aborting:
                    stream.abort("client left")
                await self.pause(1)
            stream.finish(handover(num_tokens))
            await stream.wait()
        except TransferError:
            if stream is not None:
                with suppress(TransferError):
                    await stream.wait()
            await reservation.release()  # as the router tells decode

    async def pause(self, at_most: int) -> None:
        for _ in range(self.random.randint(0, at_most)):
            await asyncio.sleep(0)


def test_nothing_is_corrupted_lost_or_left_over(any_pair: MakePair) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(HANG_GUARD_S), any_pair(credit_bytes=8192) as pair:
            other = KVSender(
                pair.source, pair.layout, pair.config, SECRET, "p2", transports=pair.transports()
            )
            churn = Churn(pair, [pair.sender, other])
            async with asyncio.TaskGroup() as tasks:
                for number in range(6):
                    tasks.create_task(churn.work(), name=f"churn-{number}")
            assert churn.completed > TRANSFERS // 4
            assert churn.taken_back > TRANSFERS // 8
            assert sorted(churn.free) == list(range(1, 24))
            for sender in churn.senders:
                pair.sender = sender
                await pair.transfer(1_000, [1], [1])
                (link,) = sender.links
                assert link.free_credit_bytes == link.credit_bytes
                assert sender.pending == 0
            assert pair.receiver.pending == 0
            assert pair.receiver.counters.corrupt == 0
            for sender in churn.senders:
                await sender.close()

    asyncio.run(scenario())


def test_scattered_pages_take_few_more_frames_than_neighbours(any_pair: MakePair) -> None:
    async def frames(pair: Pair, room: int, page_ids: list[int]) -> int:
        reservation = pair.receiver.reserve("r", room, page_ids, 4 * len(page_ids))
        stream = await pair.sender.open(reservation.target, "r")
        pair.send(stream, page_ids)
        stream.finish(handover(4 * len(page_ids)))
        stats = await stream.wait()
        await reservation.release()
        assert pair.same(page_ids, page_ids)
        return stats.frames

    async def scenario() -> None:
        async with asyncio.timeout(HANG_GUARD_S), any_pair() as pair:
            neighbours = await frames(pair, 1, list(range(1, 13)))
            scattered = list(range(1, 24, 2))
            random.Random(3).shuffle(scattered)
            assert await frames(pair, 2, scattered) <= 3 * neighbours

    asyncio.run(scenario())
