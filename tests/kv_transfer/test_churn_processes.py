"""Thousands of transfers between processes: aborted, killed and stopped, every page checked."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.receiver import KVReceiver
from kv_transfer.testing import SECRET, group, layout_of
from kv_transfer.transports.shm import shared_memory_problem
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig, TransportName
from tandem.errors import TransferError
from tandem.requests import Handover

GROUPS = (group("k", (2, 64)), group("v", (2, 64)))  # pages of 2 KiB
NUM_PAGES = 32
FREE, RESERVED = 0xEE, 0xB0
WARM_UP = 0.3
GROWTH_BYTES = 24 << 20
"""What allocators may keep; one page leaked per transfer would be more."""

WRITER = """
import asyncio, base64, os, random, sys
from kv_transfer.sender import KVSender
from kv_transfer.testing import SECRET, group, handover, layout_of
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import TransferError

groups = (group("k", (2, 64)), group("v", (2, 64)))
NUM_PAGES = 64

async def transfer(sender, pool, free, draw, words):
    room, count, tokens, target = int(words[0]), int(words[1]), int(words[2]), words[3]
    page_ids, free[:] = free[:count], free[count:]
    for name in ("k", "v"):
        pool[name][:, page_ids] = float(room)
    verdict = "ok"
    stream = None
    try:
        stream = await sender.open(base64.b64decode(target), "r")
        aborting = draw.random() < 0.1
        for layer in range(3):
            stream.send_layer(layer, page_ids, 0)
            if aborting and draw.random() < 0.5:
                stream.abort("client left")
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.004)
        stream.finish(handover(tokens))
        await stream.wait()
    except TransferError as error:
        verdict = type(error).__name__
        if stream is not None:
            stream.abort("failed")
            try:
                await stream.wait()
            except TransferError:
                pass
    for name in ("k", "v"):
        pool[name][:, page_ids] = -1.0  # the next prompt's
    free += page_ids
    print(room, verdict, flush=True)

async def main(transport, seed):
    pool, draw = KVPool(groups, NUM_PAGES), random.Random(int(seed))
    free = list(range(1, NUM_PAGES))
    config = TransferConfig(transport=transport, credit_bytes=65536)
    sender = KVSender(pool, layout_of(groups), config, SECRET, f"writer-{os.getpid()}")
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(transfer(sender, pool, free, draw, line.decode().split()))
    assert sorted(free) == list(range(1, NUM_PAGES)), "source pages leaked"
    assert sender.pending == 0
    await sender.close()
    print("whole", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Writer:
    """A prefill worker's process; replaced when it was killed."""

    def __init__(self, transport: TransportName) -> None:
        self.transport = transport
        self.process: asyncio.subprocess.Process | None = None
        self.answers: dict[str, asyncio.Future[list[str]]] = {}
        self.reading: asyncio.Task[None] | None = None

    async def start(self, seed: int) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WRITER,
            self.transport,
            str(seed),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.reading = asyncio.create_task(self.read(self.process))

    async def read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode().split():
            if answer := self.answers.pop(line[0], None):
                answer.set_result(line[1:])
        for answer in self.answers.values():
            answer.set_result(["killed"])
        self.answers.clear()

    async def ask(self, key: str, line: str) -> list[str]:
        assert self.process is not None
        assert self.process.stdin is not None
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        if self.reading is None or self.reading.done():
            return ["killed"]
        self.answers[key] = answer
        self.process.stdin.write(line.encode())
        return await answer

    async def end(self) -> list[str]:
        """Let it finish, and say whether it lost nothing."""
        assert self.process is not None
        assert self.process.stdin is not None
        last: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.answers["whole"] = last
        self.process.stdin.close()
        words = await last
        await self.process.wait()
        return words


def own_sizes() -> tuple[int, int, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Churn:
    """Decode's side: hands pages out, takes them back, checks them each time."""

    def __init__(self, transport: TransportName, transfers: int, seed: int) -> None:
        self.pool = KVPool(GROUPS, NUM_PAGES)
        self.arrays = [
            np.frombuffer(buffer.memory, dtype=np.uint8).reshape(3, NUM_PAGES, -1)
            for buffer in self.pool.buffers
        ]
        self.paint(range(NUM_PAGES), FREE)
        config = TransferConfig(transport=transport, credit_bytes=65536)
        self.receiver = KVReceiver(self.pool, layout_of(GROUPS), config, SECRET, "decode")
        self.random = random.Random(seed)
        self.free = list(range(1, NUM_PAGES))
        self.changed = asyncio.Condition()
        self.transfers = transfers
        self.rooms = iter(range(1, transfers + 1))
        self.writers = [Writer(transport), Writer(transport)]
        self.verdicts: Counter[str] = Counter()
        self.corrupt = self.done = 0

    def paint(self, page_ids: Sequence[int], value: int) -> None:
        for array in self.arrays:
            array[:, list(page_ids)] = value

    def all_are(self, page_ids: Sequence[int], value: int) -> bool:
        return all(bool((array[:, list(page_ids)] == value).all()) for array in self.arrays)

    def landed_from(self, page_ids: Sequence[int], room: int) -> bool:
        """Whether each number in the pages is its room's."""
        names = [buffer.group.name for buffer in self.pool.buffers]
        return all(bool((self.pool[name][:, page_ids] == float(room)).all()) for name in names)

    async def work(self) -> None:
        for room in self.rooms:
            count = self.random.randint(1, 6)
            async with self.changed:
                await self.changed.wait_for(partial(self.has_free, count))
                self.random.shuffle(self.free)
                page_ids, self.free = self.free[:count], self.free[count:]
            self.corrupt += not self.all_are(page_ids, FREE)
            self.paint(page_ids, RESERVED)
            await self.transfer(room, page_ids)
            self.paint(page_ids, FREE)
            self.done += 1
            async with self.changed:
                self.free += page_ids
                self.changed.notify_all()

    def has_free(self, count: int) -> bool:
        return len(self.free) >= count

    async def transfer(self, room: int, page_ids: list[int]) -> None:
        tokens = 4 * len(page_ids)
        reservation = self.receiver.reserve("r", room, page_ids, tokens)
        target = base64.b64encode(reservation.target).decode()
        writer = self.random.choice(self.writers)
        line = f"{room} {len(page_ids)} {tokens} {target}\n"
        prefill = asyncio.create_task(writer.ask(str(room), line))
        prefill.add_done_callback(lambda _: reservation.end(TransferError("r", "as routers tell")))
        if self.random.random() < 0.15:  # the client leaves
            await asyncio.sleep(self.random.random() * 0.004)
            await reservation.release()
            self.paint(page_ids, room % 199)
            await prefill
            self.corrupt += not self.all_are(page_ids, room % 199)
            return
        try:
            assert isinstance(await reservation.wait(), Handover)
            self.corrupt += not self.landed_from(page_ids, room)
            self.verdicts["landed"] += 1
        except TransferError as error:
            self.verdicts[type(error).__name__] += 1
        await reservation.release()
        await prefill

    async def disturb(self) -> None:
        """Stop writers for moments, and kill one now and then, while transfers go on."""
        for milestone in range(40, self.transfers, max(40, self.transfers // 60)):
            async with self.changed:
                await self.changed.wait_for(partial(self.has_done, milestone))
            writer = self.random.choice(self.writers)
            assert writer.process is not None
            if self.random.random() < 0.25:
                writer.process.send_signal(signal.SIGKILL)
                await writer.process.wait()
                if writer.reading is not None:
                    await writer.reading
                await writer.start(milestone)
                self.verdicts["killed"] += 1
            else:
                writer.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self.random.random() * 0.1)
                writer.process.send_signal(signal.SIGCONT)

    def has_done(self, milestone: int) -> bool:
        return self.done >= milestone

    async def sizes(self, milestone: int) -> tuple[int, int, int]:
        """Resident bytes, descriptors and threads of this process at a moment of the churn."""
        async with self.changed:
            await self.changed.wait_for(partial(self.has_done, milestone))
        return own_sizes()

    async def run(self) -> None:
        await self.receiver.start()
        try:
            for number, writer in enumerate(self.writers):
                await writer.start(number)
            async with asyncio.TaskGroup() as tasks:
                warm = tasks.create_task(self.sizes(int(self.transfers * WARM_UP)))
                for number in range(8):
                    tasks.create_task(self.work(), name=f"churn-{number}")
                tasks.create_task(self.disturb(), name="disturb")
            self.check(warm.result(), await self.sizes(self.transfers))
            for writer in self.writers:
                assert await writer.end() == [], "a writer ended badly"
        finally:
            for writer in self.writers:
                if writer.process is not None and writer.process.returncode is None:
                    writer.process.kill()
            await self.receiver.close()

    def check(self, warm: tuple[int, int, int], after: tuple[int, int, int]) -> None:
        assert self.corrupt == 0
        assert sorted(self.free) == list(range(1, NUM_PAGES))
        assert self.receiver.pending == 0
        assert self.receiver.counters.corrupt == 0
        assert self.verdicts["landed"] > self.transfers // 2, self.verdicts
        assert self.verdicts["killed"] > 0
        assert after[0] - warm[0] < GROWTH_BYTES, f"memory grew from {warm[0]} to {after[0]} bytes"
        assert after[1] <= warm[1] + 4, f"descriptors: {warm[1]} and {after[1]}"
        assert after[2] <= warm[2] + 4, f"threads: {warm[2]} and {after[2]}"


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> TransportName:
    if request.param == "shm" and (problem := shared_memory_problem(())):
        pytest.skip(problem)
    name: TransportName = request.param
    return name


async def churn(transport: TransportName, transfers: int, seed: int, guard_s: float) -> None:
    async with asyncio.timeout(guard_s):
        await Churn(transport, transfers, seed).run()


def test_churn_corrupts_leaks_and_grows_nothing(transport: TransportName) -> None:
    asyncio.run(churn(transport, transfers=1_200, seed=1, guard_s=110.0))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_long_churn_corrupts_leaks_and_grows_nothing(transport: TransportName) -> None:
    asyncio.run(churn(transport, transfers=150_000, seed=2, guard_s=1_700.0))
