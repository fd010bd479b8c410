"""Two hosts, as network namespaces: their link is narrowed, cut in mid-transfer, and restored."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tandem.config.tree import TandemConfig
from tandem.errors import ServingError
from tandem.requests import GenerateRequest
from tandem.testing.pair import Completion, connect
from tandem.testing.reference import new_request, random_prompt
from tandem.weights.store import ModelFolder

pytestmark = pytest.mark.slow

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]

IDLE_S, CONNECT_S, LEASE_S = 2.0, 2.0, 60.0
HANG_GUARD_S = 60.0
BOUND_S = 12.0
"""Far under the lease: what ends by then was ended by the idle or connect time-out."""
ROOT = Path(__file__).parents[2]

_COMMON = """
import asyncio, base64, os, sys
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.testing import SECRET, all_are, group, handover, layout_of, set_pages
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.errors import TransferError

groups = (group("k", (8, 64), 16), group("v", (8, 64), 16))  # 8 MiB for all pages but the first
pool = KVPool(groups, 33)
idle_s, connect_s, lease_s = map(float, sys.argv[1:4])
limits = dict(idle_timeout_s=idle_s, connect_timeout_s=connect_s, lease_s=lease_s)

async def lines():
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()
"""

_RECEIVER = (
    _COMMON
    + """
PAGES = list(range(1, 33))

async def main():
    config = TransferConfig(host=sys.argv[4], **limits)
    receiver = KVReceiver(pool, layout_of(groups), config, SECRET, "decode")
    await receiver.start()
    async for (room,) in lines():
        set_pages(pool, PAGES, 0xB0)
        reservation = receiver.reserve("r", int(room), PAGES, 4 * len(PAGES))
        print(base64.b64encode(reservation.target).decode(), flush=True)
        try:
            await reservation.wait_layer(1)
            print("under way", flush=True)
            await reservation.wait()
            verdict = "whole" if all_are(pool, PAGES, int(room)) else "CORRUPT"
        except TransferError as error:
            verdict = type(error).__name__
        await reservation.release()
        print(verdict, receiver.pending, flush=True)
    await receiver.close()

asyncio.run(main())
"""
)

_SENDER = (
    _COMMON
    + """
async def main():
    sender = KVSender(pool, layout_of(groups), TransferConfig(**limits), SECRET, "prefill")
    async for room, target in lines():
        set_pages(pool, range(1, 33), int(room))
        try:
            stream = await sender.open(base64.b64decode(target), "r")
            try:
                for layer in range(16):
                    stream.send_layer(layer, range(1, 33), 0)
                stream.finish(handover(128))
            finally:
                stats = await stream.wait()
            verdict = stats.transport
        except TransferError as error:
            verdict = type(error).__name__
        print(verdict, sender.pending, flush=True)
    await sender.close()

asyncio.run(main())
"""
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces with a link of their own, and one each to the host for control."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.prefill, self.decode = f"td-p-{tag}", f"td-d-{tag}"
        self.links = {self.prefill: f"tdp{tag}", self.decode: f"tdd{tag}"}
        self.data = {self.prefill: "10.211.7.1", self.decode: "10.211.7.2"}
        net = 10 + 2 * secrets.randbelow(120)  # in the host's own namespace: runs may overlap
        self.control = {self.prefill: f"10.211.{net}.2", self.decode: f"10.211.{net + 1}.2"}

    def make(self) -> None:
        for host in (self.prefill, self.decode):
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        near, far = self.links[self.prefill], self.links[self.decode]
        veth = ("type", "veth", "peer", "name", far, "netns", self.decode)
        ip("link", "add", near, "netns", self.prefill, *veth)
        for host, link in self.links.items():
            ip("-n", host, "addr", "add", f"{self.data[host]}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            outer, inner = f"{link}o", f"{link}c"
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host)
            ours = self.control[host].rpartition(".")[0] + ".1"
            ip("addr", "add", f"{ours}/24", "dev", outer)
            ip("link", "set", outer, "up")
            ip("-n", host, "addr", "add", f"{self.control[host]}/24", "dev", inner)
            ip("-n", host, "link", "set", inner, "up")

    def remove(self) -> None:
        for host in (self.prefill, self.decode):
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)
        for link in self.links.values():  # gone with the namespaces, but not at once
            subprocess.run(["ip", "link", "del", f"{link}o"], check=False, capture_output=True)

    def limit(self, rate: str) -> None:
        """Let prefill send no faster than this from now on."""
        tbf = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        where = ("-n", self.prefill, "qdisc", "replace", "dev", self.links[self.prefill], "root")
        subprocess.run(["tc", *where, *tbf], check=True, capture_output=True)

    def cut(self, host: str) -> None:
        ip("-n", host, "link", "set", self.links[host], "down")

    def restore(self, host: str) -> None:
        ip("-n", host, "link", "set", self.links[host], "up")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root and iproute2")
    made = Hosts()
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


async def start(host: str, code: str, *arguments: str) -> Process:
    command = ("ip", "netns", "exec", host, sys.executable, "-c", code, *arguments)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    assert line, "the process ended"
    return line


def say(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


class Ends:
    """A receiver's and a sender's process, each in its namespace."""

    def __init__(self, receiver: Process, sender: Process) -> None:
        self.receiver, self.sender = receiver, sender

    async def begin(self, room: int) -> None:
        say(self.receiver, str(room))
        say(self.sender, f"{room} {await line_of(self.receiver)}")

    async def verdicts(self) -> tuple[str, str]:
        """Prefill's and decode's, each with the number of transfers still pending there."""
        ours, theirs = await asyncio.gather(line_of(self.sender), line_of(self.receiver))
        return ours, theirs

    async def whole(self, room: int) -> None:
        await self.begin(room)
        assert await line_of(self.receiver) == "under way"
        assert await self.verdicts() == ("tcp 0", "whole 0")


@asynccontextmanager
async def both_ends(hosts: Hosts) -> AsyncIterator[Ends]:
    limits = (str(IDLE_S), str(CONNECT_S), str(LEASE_S))
    receiver = await start(hosts.decode, _RECEIVER, *limits, hosts.data[hosts.decode])
    sender = await start(hosts.prefill, _SENDER, *limits)
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            yield Ends(receiver, sender)
    finally:
        for process in (receiver, sender):
            process.kill()
            await process.wait()


LOST = {f"{name} 0" for name in ("PeerLost", "TransferTimeout", "TransferAborted")}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_cut_link_ends_transfers_and_a_restored_one_carries_them(hosts: Hosts, side: str) -> None:
    where = {"prefill": hosts.prefill, "decode": hosts.decode}[side]

    async def scenario() -> None:
        async with both_ends(hosts) as ends:
            await ends.whole(1)
            hosts.limit("20mbit")  # more than three seconds for all of it
            await ends.begin(2)
            assert await line_of(ends.receiver) == "under way"
            hosts.cut(where)
            async with asyncio.timeout(BOUND_S):
                assert set(await ends.verdicts()) <= LOST
            say(ends.receiver, "3")
            target = await line_of(ends.receiver)
            say(ends.sender, f"3 {target}")
            async with asyncio.timeout(BOUND_S):
                assert await line_of(ends.sender) in LOST
            hosts.restore(where)
            say(ends.sender, f"3 {target}")  # the reservation has its lease, and waits
            assert await line_of(ends.receiver) == "under way"
            assert await ends.verdicts() == ("tcp 0", "whole 0")
            await ends.whole(4)

    asyncio.run(scenario())


def test_a_slow_link_is_no_dead_link(hosts: Hosts) -> None:
    """The transfer takes longer than the idle time-out, and never falls silent."""

    async def scenario() -> None:
        async with both_ends(hosts) as ends:
            hosts.limit("16mbit")
            await ends.whole(1)
            hosts.limit("1gbit")
            await ends.whole(2)

    asyncio.run(scenario())


def test_a_link_that_is_back_in_time_costs_nothing(hosts: Hosts) -> None:
    async def scenario() -> None:
        async with both_ends(hosts) as ends:
            hosts.limit("20mbit")
            await ends.begin(1)
            assert await line_of(ends.receiver) == "under way"
            hosts.cut(hosts.decode)
            await asyncio.sleep(IDLE_S / 8)
            hosts.restore(hosts.decode)
            assert await ends.verdicts() == ("tcp 0", "whole 0")

    asyncio.run(scenario())


_WORKER = """
import asyncio, json, signal, sys
from tandem.config.load import from_mapping
from tandem.weights.store import prepare
if sys.argv[1] == "prefill":
    from prefill_worker.worker import PrefillWorker as Worker
else:
    from decode_worker.worker import DecodeWorker as Worker
config = from_mapping(json.loads(sys.argv[2]))

async def main():
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    worker = Worker(config, prepare(sys.argv[3]), bytes.fromhex(sys.argv[4]), sys.argv[1], None)
    await worker.run(stopping, lambda address: print(address, flush=True))

asyncio.run(main())
"""


def test_workers_whose_link_is_cut_fail_one_request_and_serve_again(
    hosts: Hosts, folder: ModelFolder, config: Configure, expected: Expected, secret: bytes
) -> None:
    def settings(host: str) -> str:
        return json.dumps(
            asdict(
                config(
                    workers={"host": hosts.control[host]},
                    transfer={
                        "host": hosts.data[host],
                        "idle_timeout_s": IDLE_S,
                        "connect_timeout_s": CONNECT_S,
                    },
                )
            )
        )

    async def scenario() -> None:
        processes: list[Process] = []
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                roles = ("prefill", hosts.prefill), ("decode", hosts.decode)
                processes += [
                    await start(host, _WORKER, role, settings(host), str(folder.path), secret.hex())
                    for role, host in roles
                ]
                addresses = [await line_of(process) for process in processes]
                async with connect(addresses[0], addresses[1], secret) as pair:
                    work = new_request(random_prompt(400), max_tokens=6)
                    assert (await pair.generate(work)).token_ids == expected(work).token_ids
                    hosts.limit("500kbit")  # seconds for its pages
                    victim = asyncio.create_task(
                        pair.generate(new_request(random_prompt(400, 1), max_tokens=6))
                    )
                    await pair.until(lambda prefill, _: prefill.transfers_pending > 0)
                    hosts.cut(hosts.decode)
                    async with asyncio.timeout(BOUND_S):
                        (outcome,) = await asyncio.gather(victim, return_exceptions=True)
                    assert isinstance(outcome, ServingError)
                    await pair.idle()
                    hosts.restore(hosts.decode)
                    hosts.limit("1gbit")
                    again = new_request(random_prompt(400, 2), max_tokens=6)
                    assert (await pair.generate(again)).token_ids == expected(again).token_ids
                    await pair.idle()
                for process in processes:  # a worker of `ip netns exec` keeps its process id
                    process.send_signal(signal.SIGTERM)
                assert [await process.wait() for process in processes] == [0, 0]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    asyncio.run(scenario())
