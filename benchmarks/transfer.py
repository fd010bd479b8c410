"""How fast K and V pages travel, next to what this machine's memory and sockets can do.

Two processes. For every size, each transport moves the same bytes many times; the ceilings are
measured in the same run: one thread's memcpy, and a bare blocking socket pump with one thread at
each end. A ratio is transport bandwidth over ceiling bandwidth, medians of both.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from kv_transfer.layout import KVLayout
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from tandem.cache.groups import CacheGroup
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig, TransportName
from tandem.requests import Handover, SampledToken

SECRET = b"benchmark"
LAYERS = 24
PAGE_BYTES = 32_768
NUM_PAGES = 400
GROUPS = tuple(
    CacheGroup(name=name, num_layers=LAYERS, page_tokens=16, token_shape=(4, 128), dtype="float32")
    for name in ("k", "v")
)
LAYOUT = KVLayout(model="benchmark", weights_digest="-", groups=GROUPS, rope="-")
BIG_BYTES = 4 << 20


def handover(num_tokens: int) -> Handover:
    """Make the commit's content."""
    return Handover(first_token=SampledToken(token_id=0), prompt_tokens=num_tokens, cached_tokens=0)


async def send(transport: TransportName, checksum: bool) -> None:
    """Child: send what each line of stdin asks for, and say so."""
    pool = KVPool(GROUPS, NUM_PAGES)
    config = TransferConfig(transport=transport, checksum=checksum)
    sender = KVSender(pool, LAYOUT, config, SECRET, "benchmark-prefill")
    while line := await asyncio.to_thread(sys.stdin.readline):
        target, pages, layers = line.split()
        page_ids = [int(page) for page in pages.split(",")]
        stream = await sender.open(base64.b64decode(target), "r")
        for layer in range(LAYERS):
            stream.send_layer(layer % int(layers), page_ids, 0)
        stream.finish(handover(16 * len(page_ids)))
        await stream.wait()
    await sender.close()


class Bench:
    """The decode side, with a child that sends."""

    def __init__(self, transport: TransportName, checksum: bool) -> None:
        self.pool = KVPool(GROUPS, NUM_PAGES)
        config = TransferConfig(transport=transport, checksum=checksum)
        self.receiver = KVReceiver(self.pool, LAYOUT, config, SECRET, "benchmark-decode")
        argv = [sys.executable, __file__, "--send", transport]
        self.child = subprocess.Popen(
            argv if checksum else [*argv, "--no-checksum"], stdin=subprocess.PIPE, text=True
        )
        self.room = 0

    async def transfer(self, ours: Sequence[int], theirs: Sequence[int]) -> float:
        """Move these pages in all layers; returns the seconds from the first page to the commit."""
        self.room += 1
        num_tokens = 16 * len(ours)
        reservation = self.receiver.reserve("r", self.room, ours, num_tokens)
        pages = ",".join(map(str, theirs))
        target = base64.b64encode(reservation.target).decode()
        assert self.child.stdin is not None
        self.child.stdin.write(f"{target} {pages} {LAYERS}\n")
        self.child.stdin.flush()
        await reservation.wait_layer(0)
        start_s = time.perf_counter()
        await reservation.wait()
        taken_s = time.perf_counter() - start_s
        await reservation.release()
        return taken_s * LAYERS / (LAYERS - 1)  # the first layer was over when the clock started

    def close(self) -> None:
        """End the child."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


async def page_bandwidths(
    transport: TransportName, repeats: int, *, checksum: bool
) -> dict[str, float]:
    """GB/s for contiguous and scattered pages of 4 MiB a layer."""
    bench = Bench(transport, checksum)
    await bench.receiver.start()
    pages = BIG_BYTES // (2 * PAGE_BYTES)
    random = np.random.default_rng(0)
    nbytes = LAYERS * BIG_BYTES
    results: dict[str, float] = {}
    for shape in ("contiguous", "scattered"):
        seconds: list[float] = []
        for _ in range(repeats + 2):
            if shape == "contiguous":
                ours = theirs = list(range(1, pages + 1))
            else:
                ours = (1 + random.permutation(NUM_PAGES - 1)[:pages]).tolist()
                theirs = (1 + random.permutation(NUM_PAGES - 1)[:pages]).tolist()
            seconds.append(await bench.transfer(ours, theirs))
        results[shape] = nbytes / statistics.median(seconds[2:]) / 1e9
    bench.close()
    await bench.receiver.close()
    return results


def memcpy_bandwidth(repeats: int) -> float:
    """GB/s of one thread that copies 4 MiB pieces between two large pre-faulted buffers."""
    source = np.ones(LAYERS * BIG_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    seconds: list[float] = []
    for _ in range(repeats + 2):
        start_s = time.perf_counter()
        for at in range(0, len(source), BIG_BYTES):
            target[at : at + BIG_BYTES] = source[at : at + BIG_BYTES]
        seconds.append(time.perf_counter() - start_s)
    return len(source) / statistics.median(seconds[2:]) / 1e9


PUMP = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
data = memoryview(bytearray(b"x") * (24 * 4 << 20))
while sock.recv(1):
    for at in range(0, len(data), 4 << 20):
        sock.sendall(data[at : at + (4 << 20)])
"""


def pump_bandwidth(repeats: int) -> float:
    """GB/s of a bare TCP connection between two processes, one blocking thread at each end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    child = subprocess.Popen(
        [sys.executable, "-c", PUMP, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    target = memoryview(bytearray(b"y") * (LAYERS * BIG_BYTES))
    seconds: list[float] = []
    for _ in range(repeats + 2):
        start_s = time.perf_counter()
        ours.sendall(b"x")
        done = 0
        while done < len(target):
            done += ours.recv_into(target[done : done + BIG_BYTES])
        seconds.append(time.perf_counter() - start_s)
    ours.close()
    child.wait()
    return len(target) / statistics.median(seconds[2:]) / 1e9


def in_thread(call: Callable[[], float]) -> float:
    """Run a ceiling in a thread of its own, as the transports do their work."""
    result: list[float] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Measure everything; ceilings before and after, so that a noisy machine shows."""
    memcpy = [in_thread(lambda: memcpy_bandwidth(repeats))]
    pump = [in_thread(lambda: pump_bandwidth(repeats))]
    shm = asyncio.run(page_bandwidths("shm", repeats, checksum=True))
    tcp = asyncio.run(page_bandwidths("tcp", repeats, checksum=True))
    shm_bare = asyncio.run(page_bandwidths("shm", repeats, checksum=False))
    tcp_bare = asyncio.run(page_bandwidths("tcp", repeats, checksum=False))
    memcpy.append(in_thread(lambda: memcpy_bandwidth(repeats)))
    pump.append(in_thread(lambda: pump_bandwidth(repeats)))
    memcpy_gbs, pump_gbs = statistics.mean(memcpy), statistics.mean(pump)
    return {
        "ratios": {
            "shm_vs_memcpy_4MiB": shm["contiguous"] / memcpy_gbs,
            "shm_scattered_vs_memcpy_32KiB": shm["scattered"] / memcpy_gbs,
            "tcp_vs_pump_4MiB": tcp["contiguous"] / pump_gbs,
            "tcp_scattered_vs_pump_32KiB": tcp["scattered"] / pump_gbs,
            "shm_vs_memcpy_4MiB_without_checksum": shm_bare["contiguous"] / memcpy_gbs,
            "tcp_vs_pump_4MiB_without_checksum": tcp_bare["contiguous"] / pump_gbs,
        },
        "gigabytes_per_second": {
            "memcpy": memcpy_gbs,
            "pump": pump_gbs,
            "shm": shm["contiguous"],
            "shm_scattered": shm["scattered"],
            "tcp": tcp["contiguous"],
            "tcp_scattered": tcp["scattered"],
            "shm_without_checksum": shm_bare["contiguous"],
            "tcp_without_checksum": tcp_bare["contiguous"],
        },
    }


def main() -> None:
    """Parse arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under a minute")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--send", choices=["shm", "tcp"], help=argparse.SUPPRESS)
    parser.add_argument("--no-checksum", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        asyncio.run(send(cast(TransportName, arguments.send), not arguments.no_checksum))
        return
    repeats = 15 if arguments.quick else 60
    results = measure(repeats)
    settings = {
        "repeats": repeats,
        "layers": LAYERS,
        "layer_bytes": BIG_BYTES,
        "page_bytes": PAGE_BYTES,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for section, values in results.items():
        print(section.replace("_", " "))
        for name, value in values.items():
            print(f"  {name:40} {value:6.2f}")
    if arguments.json:
        text = json.dumps({**results, "settings": settings}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
