"""Measures a running server from a client's side; formulas in README.md."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.client import Client
from launcher.commands.generate import add_address_argument
from tandem.pb import generate_pb2


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
    """Command line of ``make bench``."""
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    add_address_argument(parser)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=4, help="requests that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    return parser


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


async def run(arguments: argparse.Namespace) -> str:
    """Send all requests; the report."""
    rng = random.Random(arguments.seed)
    room = asyncio.Semaphore(arguments.concurrency)

    async with Client(arguments.address) as client:
        info = await client.model_info()

        async def one() -> Measured:
            async with room:
                return await measure(
                    client,
                    make_request(
                        rng, info.vocab_size, arguments.prompt_tokens, arguments.output_tokens
                    ),
                )

        await asyncio.gather(*(one() for _ in range(arguments.warm_up)))
        start_s = time.perf_counter()
        measured = await asyncio.gather(*(one() for _ in range(arguments.requests)))
        span_s = time.perf_counter() - start_s
    return report(arguments, info.model, measured, span_s)


def report(
    arguments: argparse.Namespace, model: str, measured: Sequence[Measured], span_s: float
) -> str:
    """The figures as a Markdown table."""
    lines = [
        f"model={model} " + " ".join(f"{name}={value}" for name, value in vars(arguments).items()),
        "",
        "| figure | p50 | p90 | p99 |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in (
        ("TTFT ms", sorted(m.ttft_s * 1000 for m in measured)),
        ("TPOT ms", sorted(m.tpot_s * 1000 for m in measured)),
    ):
        ranks = " | ".join(f"{nearest_rank(values, percent):.2f}" for percent in (50, 90, 99))
        lines.append(f"| {name} | {ranks} |")
    tokens = sum(m.tokens for m in measured)
    lines += [
        "",
        f"output tokens/s: {tokens / span_s:.1f}",
        f"requests/s: {len(measured) / span_s:.2f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(asyncio.run(run(arguments_parser().parse_args())))
