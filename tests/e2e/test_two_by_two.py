"""Two workers of each kind, and one that is both, give the answers of one pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.testing.calls import OK, Outcome, generate, greedy, idle

pytestmark = pytest.mark.ray

PROMPTS = [[(7 * n + k) % 256 for k in range(20 + 5 * n)] for n in range(16)]


def _request(prompt: list[int]) -> generate_pb2.GenerateRequest:
    return greedy(prompt, max_tokens=20, top_logprobs=2)


async def _check_alike(stub: generate_pb2_grpc.TandemAsyncStub, expected: list[Outcome]) -> None:
    outcomes = await asyncio.gather(*(generate(stub, _request(prompt)) for prompt in PROMPTS))
    for outcome, reference in zip(outcomes, expected, strict=True):
        assert outcome.code is OK, outcome.message
        assert not outcome.differs_from(reference)
    await idle(stub)


@pytest.fixture(scope="module")
def expected(with_stub: Callable[..., None]) -> list[Outcome]:
    """What one pair answers to each prompt alone."""
    outcomes: list[Outcome] = []

    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        outcomes.extend([await generate(stub, _request(prompt)) for prompt in PROMPTS])

    with_stub(scenario)
    return outcomes


def test_all_four_work_and_answers_are_the_same(
    expected: list[Outcome], with_two_by_two: Callable[..., None]
) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        status = await stub.GetStatus(generate_pb2.GetStatusRequest())
        assert sorted(worker.role for worker in status.workers) == ["decode"] * 2 + ["prefill"] * 2
        await _check_alike(stub, expected)

    with_two_by_two(scenario)


def test_colocated_gives_the_same_answers(
    expected: list[Outcome], with_colocated: Callable[..., None]
) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        status = await stub.GetStatus(generate_pb2.GetStatusRequest())
        assert len({worker.pid for worker in status.workers}) == 1
        await _check_alike(stub, expected)

    with_colocated(scenario)
