"""Measures a server from a client's side, one request at a time and several at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.client import Client
from tandem.pb import generate_pb2
from tandem.testing.cluster import served_cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One request, in seconds on the client's clock."""

    ttft_s: float
    span_s: float
    """First to last chunk."""
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return self.span_s / max(1, self.tokens - 1)


def arguments_parser() -> argparse.ArgumentParser:
    """The script's command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="a running server (default: start the demo model)"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=4, help="requests that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 requests, in less than a minute")
    parser.add_argument("--json", metavar="FILE", help="write ratios, figures and settings")
    return parser


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """All requests of one load."""

    measured: Sequence[Measured]
    span_s: float
    """First call to last chunk."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, over all requests."""
        return sum(m.tokens for m in self.measured) / self.span_s

    def ttft_ms(self, percent: float) -> float:
        """Time to first token."""
        return 1000 * nearest_rank(sorted(m.ttft_s for m in self.measured), percent)

    def tpot_ms(self, percent: float) -> float:
        """Time per output token after the first."""
        return 1000 * nearest_rank(sorted(m.tpot_s for m in self.measured), percent)

    def figures(self) -> dict[str, float]:
        """All figures by name."""
        return {
            "output tokens/s": self.tokens_per_s,
            "requests/s": len(self.measured) / self.span_s,
            **{f"TTFT ms p{p}": self.ttft_ms(p) for p in (50, 90, 99)},
            **{f"TPOT ms p{p}": self.tpot_ms(p) for p in (50, 90, 99)},
        }


def nearest_rank(sorted_values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all values do not exceed."""
    return sorted_values[max(0, math.ceil(percent / 100 * len(sorted_values)) - 1)]


def make_request(
    rng: random.Random, vocab_size: int, prompt_tokens: int, output_tokens: int
) -> generate_pb2.GenerateRequest:
    """A prompt of random ids with an answer of exactly ``output_tokens``."""
    ids = [rng.randrange(vocab_size) for _ in range(prompt_tokens)]
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=ids),
        sampling=generate_pb2.SamplingParams(temperature=0),
        stopping=generate_pb2.StopParams(max_tokens=output_tokens, ignore_eos=True),
    )


async def measure(client: Client, request: generate_pb2.GenerateRequest) -> Measured:
    """Send one request and time its chunks."""
    start_s = first_s = last_s = time.perf_counter()
    tokens = 0
    async for response in client.stream(request):
        if response.HasField("chunk"):
            last_s = time.perf_counter()
            first_s = first_s if tokens else last_s
            tokens += len(response.chunk.token_ids)
    assert tokens == request.stopping.max_tokens
    return Measured(ttft_s=first_s - start_s, span_s=last_s - first_s, tokens=tokens)


async def run(arguments: argparse.Namespace, address: str) -> dict[str, Any]:
    """Send all requests one by one, then as many again at once; ratios, figures and settings."""
    rng = random.Random(arguments.seed)
    async with Client(address) as client:
        info = await client.model_info()

        async def send(count: int, concurrency: int) -> Load:
            room = asyncio.Semaphore(concurrency)
            requests = [
                make_request(rng, info.vocab_size, arguments.prompt_tokens, arguments.output_tokens)
                for _ in range(count)
            ]

            async def one(request: generate_pb2.GenerateRequest) -> Measured:
                async with room:
                    return await measure(client, request)

            start_s = time.perf_counter()
            measured = await asyncio.gather(*map(one, requests))
            return Load(measured=measured, span_s=time.perf_counter() - start_s)

        await send(arguments.warm_up, arguments.concurrency)
        alone = await send(arguments.requests, 1)
        together = await send(arguments.requests, arguments.concurrency)
    return {
        "ratios": {
            "tokens_per_s_together_vs_alone": together.tokens_per_s / alone.tokens_per_s,
            "tpot_together_vs_alone": together.tpot_ms(50) / alone.tpot_ms(50),
            "ttft_together_vs_alone": together.ttft_ms(50) / alone.ttft_ms(50),
        },
        "alone": alone.figures(),
        "together": together.figures(),
        "settings": {**vars(arguments), "model": info.model, "dtype": info.dtype},
    }


def report(results: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    alone, together = results["alone"], results["together"]
    lines = ["| figure | one by one | together |", "| --- | --- | --- |"]
    lines += [f"| {name} | {alone[name]:.2f} | {together[name]:.2f} |" for name in alone]
    lines += ["", *(f"{name}: {value:.2f}" for name, value in results["ratios"].items())]
    return "\n".join(lines)


def main() -> None:
    """Measure one server."""
    arguments = arguments_parser().parse_args()
    if arguments.quick:
        arguments.requests = 8
    with ExitStack() as stack:
        address = arguments.address or stack.enter_context(served_cluster([])).address
        results = asyncio.run(run(arguments, address))
    print(report(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
