"""Two real processes: the writer is killed, or stopped while its pages find a new owner."""

from __future__ import annotations

import asyncio
import base64
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kv_transfer.fence import Fence
from kv_transfer.inbound import Inbound
from kv_transfer.receiver import KVReceiver
from kv_transfer.reservation import Reservation
from kv_transfer.testing import SECRET, all_are, group, layout_of, set_pages
from kv_transfer.transports.shm import shared_memory_problem
from kv_transfer.wire import Header
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig, TransportName
from tandem.errors import PeerLost, TransferAborted, TransferTimeout

HANG_GUARD_S = 60.0
GROUPS = (group("k", (8, 64), 64), group("v", (8, 64), 64))
PAGES = list(range(1, 33))
OTHER_PAGES = list(range(33, 40))

WRITER = """
import asyncio, base64, sys
from kv_transfer.sender import KVSender
from kv_transfer.testing import SECRET, group, layout_of
from kv_transfer.wire import Header
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import TransferError

async def main(transport):
    groups = (group("k", (8, 64), 64), group("v", (8, 64), 64))
    pool = KVPool(groups, 40)
    for buffer in pool.buffers:
        buffer.memory[:] = bytes([0xA1]) * len(buffer.memory)
    config = TransferConfig(transport=transport)
    sender = KVSender(pool, layout_of(groups), config, SECRET, "writer")
    while line := await asyncio.to_thread(sys.stdin.readline):
        count, target = line.split()
        try:
            stream = await sender.open(base64.b64decode(target), "a")
            for layer in 20 * list(range(64)):  # far more than arrives before the test acts
                stream.send_layer(layer, range(1, int(count) + 1), 0)
            await stream.wait()
        except TransferError as error:
            print(type(error).__name__, flush=True)
    await sender.close()

asyncio.run(main(sys.argv[1]))
"""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


@dataclass
class Workers:
    receiver: KVReceiver
    pool: KVPool
    writer: subprocess.Popen[bytes]

    def transfer(self, room: int, page_ids: list[int]) -> Reservation:
        """Have the writer write into these pages, over and over."""
        reservation = self.receiver.reserve("a", room, page_ids, 4 * len(page_ids))
        assert self.writer.stdin is not None
        target = base64.b64encode(reservation.target)
        self.writer.stdin.write(b"%d %s\n" % (len(page_ids), target))
        self.writer.stdin.flush()
        return reservation

    async def writer_says(self) -> str:
        assert self.writer.stdout is not None
        line = await asyncio.to_thread(self.writer.stdout.readline)
        return line.decode().strip()


def start_writer(transport: TransportName) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@asynccontextmanager
async def two_processes(
    transport: TransportName, idle_timeout_s: float = 30.0
) -> AsyncIterator[Workers]:
    pool = KVPool(GROUPS, 40)
    config = TransferConfig(transport=transport, idle_timeout_s=idle_timeout_s)
    receiver = KVReceiver(pool, layout_of(GROUPS), config, SECRET, "decode")
    await receiver.start()
    with start_writer(transport) as writer:
        try:
            yield Workers(receiver, pool, writer)
        finally:
            writer.kill()
            await receiver.close()


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> TransportName:
    if request.param == "shm" and (problem := shared_memory_problem(())):
        pytest.skip(problem)
    name: TransportName = request.param
    return name


def test_killed_writer_is_lost_at_once(transport: TransportName) -> None:
    async def scenario() -> None:
        async with two_processes(transport) as workers:
            reservation = workers.transfer(1, PAGES)
            await reservation.wait_layer(2)
            workers.writer.kill()
            with pytest.raises(PeerLost):
                await reservation.wait()
            await reservation.release()
            assert workers.receiver.pending == 0

    run(scenario())


def test_stopped_writer_cannot_touch_pages_that_were_given_away(
    transport: TransportName,
) -> None:
    async def scenario() -> None:
        async with two_processes(transport) as workers:
            for room in range(1, 9, 2):
                reservation = workers.transfer(room, PAGES)
                await reservation.wait_layer(room)
                workers.writer.send_signal(signal.SIGSTOP)
                await reservation.release()
                set_pages(workers.pool, PAGES, 0xB0)
                workers.writer.send_signal(signal.SIGCONT)
                assert await workers.writer_says() == "TransferAborted"
                # What the writer sends now comes behind everything it sent before.
                behind = workers.transfer(room + 1, OTHER_PAGES)
                await behind.wait_layer(0)
                await behind.release()
                assert await workers.writer_says() == "TransferAborted"
                assert all_are(workers.pool, PAGES, 0xB0)

    run(scenario())


def test_without_the_fence_a_stopped_writer_does_touch_them(
    transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above means something: take the fence away, and it would fail."""
    monkeypatch.setattr(Fence, "enter", lambda self: True)
    monkeypatch.setattr(Inbound, "dismiss", lambda self, reservation, error: None)
    given_away, written_again = threading.Event(), threading.Event()
    landed = Reservation.landed

    def note(self: Reservation, header: Header) -> None:
        landed(self, header)
        if given_away.is_set():
            written_again.set()

    monkeypatch.setattr(Reservation, "landed", note)

    async def scenario() -> None:
        async with two_processes(transport) as workers:
            reservation = workers.transfer(1, PAGES)
            await reservation.wait_layer(1)
            workers.writer.send_signal(signal.SIGSTOP)
            await reservation.release()
            set_pages(workers.pool, PAGES, 0xB0)
            given_away.set()
            workers.writer.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(written_again.wait, HANG_GUARD_S)
            assert not all_are(workers.pool, PAGES, 0xB0)

    run(scenario())


def test_silent_writer_is_found_and_welcome_again(transport: TransportName) -> None:
    async def scenario() -> None:
        async with two_processes(transport, idle_timeout_s=1.5) as workers:
            reservation = workers.transfer(1, PAGES)
            await reservation.wait_layer(2)
            workers.writer.send_signal(signal.SIGSTOP)
            with pytest.raises(TransferTimeout, match="silent"):
                await reservation.wait()
            await reservation.release()
            workers.writer.send_signal(signal.SIGCONT)
            assert await workers.writer_says() == "PeerLost"
            again = workers.transfer(2, PAGES)
            await again.wait_layer(0)
            await again.release()
            with pytest.raises(TransferAborted):
                await again.wait()
            assert await workers.writer_says() == "TransferAborted"

    run(scenario())
