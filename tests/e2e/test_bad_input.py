"""Every bad field is refused with INVALID_ARGUMENT and its name, and the server goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.testing.calls import OK, generate, greedy, idle

pytestmark = pytest.mark.ray

NAN = float("nan")


def _request(
    *, sampling: dict[str, object] | None = None, stopping: dict[str, object] | None = None
) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        text="hello",
        sampling=generate_pb2.SamplingParams(**(sampling or {})),  # type: ignore[arg-type]
        stopping=generate_pb2.StopParams(**({"max_tokens": 4} | (stopping or {}))),  # type: ignore[arg-type]
    )


def _ids(ids: list[int]) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=ids))


CASES: list[tuple[str, generate_pb2.GenerateRequest]] = [
    ("prompt", generate_pb2.GenerateRequest()),
    ("text", generate_pb2.GenerateRequest(text="")),
    ("token_ids", _ids([])),
    ("chat", generate_pb2.GenerateRequest(chat=generate_pb2.ChatMessages())),
    ("token_ids", _ids([1, 4_000_000_000])),
    ("token_ids", _ids([1] * 5000)),
    ("max_tokens", _request(stopping={"max_tokens": 0})),
    ("max_tokens", _request(stopping={"max_tokens": -1})),
    ("max_tokens", _request(stopping={"max_tokens": 2**31 - 1})),
    ("temperature", _request(sampling={"temperature": -0.5})),
    ("temperature", _request(sampling={"temperature": NAN})),
    ("top_p", _request(sampling={"top_p": 0.0})),
    ("top_p", _request(sampling={"top_p": 2.0})),
    ("min_p", _request(sampling={"min_p": 2.0})),
    ("top_k", _request(sampling={"top_k": -2})),
    ("logit_bias", _request(sampling={"logit_bias": {2**40: 1.0}})),
    ("logit_bias", _request(sampling={"logit_bias": {1: NAN}})),
    ("top_logprobs", _request(sampling={"top_logprobs": 1_000_000})),
    ("stop", _request(stopping={"stop": ["x"] * 1000})),
    ("model", generate_pb2.GenerateRequest(text="hello", model="no-such-model")),
    ("text", generate_pb2.GenerateRequest(text="word " * (2 * 1024 * 1024))),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda n: f"{n}-{CASES[n][0]}")
def test_refused_by_name(with_stub: Callable[..., None], case: int) -> None:
    field, request = CASES[case]

    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        outcome = await generate(stub, request)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT, outcome
        assert field in outcome.message
        assert not outcome.token_ids
        assert (await generate(stub, greedy("hello", max_tokens=2))).code is OK

    with_stub(scenario)


def test_a_second_request_with_a_living_id_is_refused(with_stub: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        first = stub.Generate(greedy("hello", max_tokens=400, request_id="twin"))
        await first.read()
        second = await generate(stub, greedy("hello", max_tokens=2, request_id="twin"))
        assert second.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in second.message
        first.cancel()
        await idle(stub)
        again = await generate(stub, greedy("hello", max_tokens=2, request_id="twin"))
        assert again.code is OK, again.message

    with_stub(scenario)


def test_abort_ends_the_stream_as_cancelled_once(with_stub: Callable[..., None]) -> None:
    async def scenario(stub: generate_pb2_grpc.TandemAsyncStub) -> None:
        running = asyncio.create_task(
            generate(stub, greedy("hello", max_tokens=400, request_id="to-abort"))
        )
        found = False
        async with asyncio.timeout(10):
            while not found:
                reply = await stub.Abort(generate_pb2.AbortRequest(request_id="to-abort"))
                found = reply.found
        outcome = await running
        assert outcome.code is grpc.StatusCode.CANCELLED
        reply = await stub.Abort(generate_pb2.AbortRequest(request_id="to-abort"))
        assert not reply.found
        await idle(stub)

    with_stub(scenario)
