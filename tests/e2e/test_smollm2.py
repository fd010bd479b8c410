"""The demo model end to end: transformers' own greedy ids, disaggregated and colocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.testing.calls import OK, Outcome, generate, greedy, idle

pytestmark = [pytest.mark.ray, pytest.mark.weights, pytest.mark.timeout(300)]

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_reference.json"
SAFE_MARGIN = 0.25
"""Below this gap between the two best logits, implementations may round to another token."""


def _cases(kind: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["cases"]
    return [case for case in cases if case["kind"] == kind]


def _check(outcome: Outcome, case: dict[str, Any]) -> int:
    """Fail unless the first difference, if any, is at a near tie; returns the equal steps."""
    assert outcome.code is OK, outcome.message
    steps = zip(outcome.token_ids, case["output_ids"], case["margins"], strict=True)
    for step, (ours, theirs, margin) in enumerate(steps):
        if ours != theirs:
            assert margin < SAFE_MARGIN, f"{case['prompt']}: step {step}"
            return step
    return len(case["output_ids"])


def test_greedy_ids_are_those_of_transformers(with_smollm2: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        equal = 0
        for case in _cases("raw"):
            request = greedy(case["prompt_ids"], max_tokens=len(case["output_ids"]))
            equal += _check(await generate(stub, request), case)
        assert equal > 100
        await idle(stub)

    with_smollm2(scenario)


def test_chat_goes_through_the_template(with_smollm2: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        for case in _cases("chat"):
            request = greedy([0], max_tokens=len(case["output_ids"]), ignore_eos=False)
            request.chat.messages.add(role="user", content=case["prompt"])
            outcome = await generate(stub, request)
            _check(outcome, case)
            assert outcome.usage.prompt_tokens == len(case["prompt_ids"])

    with_smollm2(scenario)


def test_the_capital_of_france_is_paris(with_smollm2: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        outcome = await generate(stub, greedy("The capital of France is", max_tokens=4))
        assert outcome.text.startswith(" Paris")
        assert outcome.usage.prompt_tokens == 5

    with_smollm2(scenario)


def test_the_model_says_what_it_is(with_smollm2: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        info = await stub.GetModelInfo(generate_pb2.GetModelInfoRequest())
        assert info.architecture == "llama"
        assert info.vocab_size == 49152
        assert info.has_chat_template
        assert list(info.eos_token_ids) == [2]

    with_smollm2(scenario)
