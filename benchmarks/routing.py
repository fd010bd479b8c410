"""What the router costs: tokens streamed through it, next to those straight from a worker.

Three processes: this one is the client, one runs the router, one runs fake workers that stream
tokens as fast as gRPC takes them. Direct and routed runs alternate. The ratio is routed over
direct, each the median of its runs, for one stream and for several at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import grpc.aio

from router.server import RouterServer
from router.testing import SECRET, FakeDecode, FakePrefill, answer
from router.validation import new_room
from tandem.auth import ClusterToken
from tandem.config.tree import RouterConfig, TandemConfig
from tandem.pb import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.rpc import channel_options
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import prepare

CONFIG = dataclasses.replace(TandemConfig(), router=RouterConfig(port=0))
PROMPT = (1, 2, 3, 4)


async def run_router(model: str) -> None:
    """Child: route, and say where."""
    server = RouterServer(CONFIG, prepare(model), SECRET)
    await server.run(
        asyncio.Event(), lambda addresses: print(addresses.public, addresses.registry, flush=True)
    )


async def run_workers(model: str, registry: str, num_tokens: int) -> None:
    """Child: stream ``num_tokens`` tokens for each request, and say where."""
    folder = prepare(model)
    prefill, decode = FakePrefill("prefill-0", folder), FakeDecode("decode-0", folder, 1 << 20)
    decode.script = answer([65] * num_tokens)
    async with asyncio.TaskGroup() as tasks:
        for worker in (prefill, decode):
            await worker.start(registry, tasks, proxied=False)
        print(prefill.identity.address, decode.identity.address, flush=True)


class Direct:
    """The two calls of a request, made without a router."""

    def __init__(self, prefill: grpc.aio.Channel, decode: grpc.aio.Channel) -> None:
        self._prefill: worker_pb2_grpc.PrefillWorkerAsyncStub = worker_pb2_grpc.PrefillWorkerStub(
            prefill
        )
        self._decode: worker_pb2_grpc.DecodeWorkerAsyncStub = worker_pb2_grpc.DecodeWorkerStub(
            decode
        )
        self._metadata = ClusterToken(SECRET).metadata

    async def stream(self) -> tuple[int, float]:
        """Tokens received, and seconds until the first."""
        started = time.perf_counter()
        count, first_s = 0, 0.0
        request = worker_pb2.WorkRequest(
            request_id="direct",
            room=new_room(),
            token_ids=PROMPT,
            stopping=worker_pb2.Stopping(max_tokens=1),
        )
        events = self._decode.Decode(
            worker_pb2.DecodeRequest(request=request), metadata=self._metadata
        )
        async with asyncio.TaskGroup() as tasks:
            async for event in events:
                if event.WhichOneof("event") == "reserved":
                    target = event.reserved.target
                    tasks.create_task(self._call_prefill(request, target), name="prefill")
                    continue
                first_s = first_s or time.perf_counter() - started
                count += len(event.chunk.chunk.token_ids)
        return count, first_s

    async def _call_prefill(self, request: worker_pb2.WorkRequest, target: bytes) -> None:
        await self._prefill.Prefill(
            worker_pb2.PrefillRequest(request=request, target=target), metadata=self._metadata
        )


class Routed:
    """A request to the router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: generate_pb2_grpc.TandemAsyncStub = generate_pb2_grpc.TandemStub(channel)
        self._request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=PROMPT),
            stopping=generate_pb2.StopParams(max_tokens=1),
        )

    async def stream(self) -> tuple[int, float]:
        """Tokens received, and seconds until the first."""
        started = time.perf_counter()
        count, first_s = 0, 0.0
        async for response in self._stub.Generate(self._request):
            first_s = first_s or time.perf_counter() - started
            count += len(response.chunk.token_ids)
        return count, first_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one way, medians over the runs."""

    tokens_per_s: float
    first_token_ms: float


async def measure(
    ways: Mapping[str, Callable[[], Awaitable[tuple[int, float]]]], streams: int, runs: int
) -> dict[str, Figures]:
    """Alternate between the ways; the first run of each warms up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, stream in ways.items():
            started = time.perf_counter()
            results = await asyncio.gather(*(stream() for _ in range(streams)))
            rates[name].append(sum(r[0] for r in results) / (time.perf_counter() - started))
            firsts[name].append(1000 * statistics.median(r[1] for r in results))
    return {
        name: Figures(
            tokens_per_s=statistics.median(rates[name][1:]),
            first_token_ms=statistics.median(firsts[name][1:]),
        )
        for name in ways
    }


async def compare(
    prefill: str, decode: str, public: str, streams: list[int], runs: int
) -> dict[str, object]:
    """All figures by number of streams."""
    options = channel_options(CONFIG.limits)
    report: dict[str, object] = {}
    async with (
        grpc.aio.insecure_channel(prefill, options=options) as to_prefill,
        grpc.aio.insecure_channel(decode, options=options) as to_decode,
        grpc.aio.insecure_channel(public, options=options) as to_router,
    ):
        ways = {"direct": Direct(to_prefill, to_decode).stream, "routed": Routed(to_router).stream}
        for number in streams:
            figures = await measure(ways, number, runs)
            direct, routed = figures["direct"], figures["routed"]
            report[str(number)] = {
                "direct": dataclasses.asdict(direct),
                "routed": dataclasses.asdict(routed),
                "ratio": routed.tokens_per_s / direct.tokens_per_s,
                "added_us_per_token": 1e6 * (1 / routed.tokens_per_s - 1 / direct.tokens_per_s),
            }
            print(f"{number} streams: {json.dumps(report[str(number)])}")
    return report


def start_child(children: ExitStack, *arguments: str) -> tuple[str, str]:
    """Start this script in a child's role; the two addresses it prints."""
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
    )
    children.callback(child.wait)
    children.callback(child.terminate)
    output: IO[str] | None = child.stdout
    assert output is not None
    children.callback(output.close)
    first, second = output.readline().split()
    return first, second


def main() -> None:
    """Run the benchmark, or one of its children."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds; for smoke tests")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        role, *arguments = options.child
        if role == "router":
            asyncio.run(run_router(*arguments))
        else:
            model, registry, tokens = arguments
            asyncio.run(run_workers(model, registry, int(tokens)))
        return
    num_tokens, runs = (500, 3) if options.quick else (3000, 9)
    with ExitStack() as children:
        folder = children.enter_context(tempfile.TemporaryDirectory())
        write_tiny_llama(Path(folder))
        public, registry = start_child(children, "--child", "router", folder)
        prefill, decode = start_child(
            children, "--child", "workers", folder, registry, str(num_tokens)
        )
        streams = asyncio.run(compare(prefill, decode, public, [1, 8], runs))
    report = {
        "tokens_per_stream": num_tokens,
        "runs": runs,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "streams": streams,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
