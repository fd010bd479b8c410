"""Many requests of awkward lengths at once, a third cancelled: answers and pages stay right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import pytest

from tandem.pb import generate_pb2_grpc
from tandem.testing.calls import OK, Outcome, generate, greedy, idle

pytestmark = pytest.mark.ray

PAGE_TOKENS = 16
NUM_REQUESTS = 200


def _prompts(rng: random.Random) -> list[list[int]]:
    """Lengths 1 to several pages, dense around every page boundary; some share a beginning."""
    around = [
        pages * PAGE_TOKENS + off for pages in range(6) for off in (-1, 0, 1) if pages or off == 1
    ]
    shared = [rng.randrange(256) for _ in range(6 * PAGE_TOKENS)]
    prompts = []
    for number in range(NUM_REQUESTS):
        length = around[number % len(around)]
        fresh = [rng.randrange(256) for _ in range(length)]
        prompts.append(shared[: length - 1] + fresh[-1:] if number % 5 == 0 else fresh)
    return prompts


def test_others_are_untouched_and_nothing_is_left(
    with_stub: Callable[..., None],
) -> None:
    rng = random.Random(20261201)
    prompts = _prompts(rng)
    budgets = [rng.choice((1, 2, 15, 16, 17, 40)) for _ in prompts]
    cancel_after_s = [rng.uniform(0, 0.3) if n % 3 == 0 else None for n in range(NUM_REQUESTS)]

    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        room = asyncio.Semaphore(48)
        solo: dict[int, Outcome] = {}
        for number in range(NUM_REQUESTS):
            if cancel_after_s[number] is None:
                request = greedy(prompts[number], max_tokens=budgets[number], top_logprobs=2)
                solo[number] = await generate(stub, request)
                assert solo[number].code is OK, solo[number].message

        async def one(number: int) -> Outcome:
            request = greedy(prompts[number], max_tokens=budgets[number], top_logprobs=2)
            if cancel_after_s[number] is not None:
                return await generate(stub, request, cancel_after_s=cancel_after_s[number])
            async with room:
                return await generate(stub, request)

        outcomes = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
        for number, outcome in enumerate(outcomes):
            if number in solo:
                assert outcome.code is OK, outcome.message
                assert not outcome.differs_from(solo[number]), number
            else:
                assert outcome.code in (OK, grpc.StatusCode.CANCELLED), outcome.message
        await idle(stub)

    with_stub(scenario)
