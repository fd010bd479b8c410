"""Generate calls for tests: each ends in one record, whatever its status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from tandem.pb import generate_pb2, generate_pb2_grpc

OK = grpc.StatusCode.OK


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one Generate call brought."""

    code: grpc.StatusCode = OK
    message: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_margins: list[float] = field(default_factory=list)
    """Gap between the two most likely tokens at each position, when asked for."""
    finished: generate_pb2.Finished | None = None

    @property
    def usage(self) -> generate_pb2.Usage:
        """Usage of a call that ended OK."""
        assert self.finished is not None, self
        return self.finished.usage

    def differs_from(self, reference: Outcome, *, near_tie: float = 1e-3) -> str:
        """Why this is another answer than ``reference``; empty when it is the same.

        A first difference is allowed where the reference's two best tokens are less than
        ``near_tie`` apart: batches of other sizes round differently.
        """
        for index, (ours, theirs) in enumerate(
            zip(self.token_ids, reference.token_ids, strict=False)
        ):
            if ours != theirs:
                margin = reference.top_margins[index] if reference.top_margins else near_tie
                return "" if margin < near_tie else f"token {index}: {ours}, expected {theirs}"
        if len(self.token_ids) != len(reference.token_ids):
            return f"{len(self.token_ids)} tokens, expected {len(reference.token_ids)}"
        return "" if self.text == reference.text else f"text {self.text!r}"


def greedy(
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    ignore_eos: bool = True,
    top_logprobs: int = 0,
    request_id: str | None = None,
) -> generate_pb2.GenerateRequest:
    """A greedy request for text or token ids."""
    request = generate_pb2.GenerateRequest(
        request_id=request_id,
        sampling=generate_pb2.SamplingParams(temperature=0.0, top_logprobs=top_logprobs or None),
        stopping=generate_pb2.StopParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


async def generate(
    stub: generate_pb2_grpc.TandemAsyncStub,
    request: generate_pb2.GenerateRequest,
    *,
    cancel_after_s: float | None = None,
    deadline_s: float = 60.0,
) -> Outcome:
    """Make one call, cancel it after ``cancel_after_s`` if given, and check its stream.

    Raises:
        AssertionError: chunks are out of order, or an OK stream does not end in ``finished``.
    """
    outcome = Outcome()
    call = stub.Generate(request, timeout=deadline_s)
    try:
        async with asyncio.timeout(cancel_after_s):
            async for response in call:
                _take(outcome, response)
        assert outcome.finished is not None, "the stream ended without a last message"
    except TimeoutError:
        call.cancel()
        outcome.code = grpc.StatusCode.CANCELLED
    except grpc.aio.AioRpcError as error:
        outcome.code, outcome.message = error.code(), error.details() or ""
    if outcome.finished is not None:
        _check_finished(outcome, request)
    return outcome


def _take(outcome: Outcome, response: generate_pb2.GenerateResponse) -> None:
    assert outcome.finished is None, "a message followed the last one"
    if response.WhichOneof("event") == "finished":
        outcome.finished = response.finished
        return
    chunk = response.chunk
    assert chunk.index == len(outcome.token_ids), "a token was lost, repeated or out of order"
    outcome.token_ids.extend(chunk.token_ids)
    outcome.text += chunk.text
    for entry in chunk.logprobs:
        outcome.logprobs.append(entry.logprob)
        if len(entry.top) > 1:
            outcome.top_margins.append(entry.top[0].logprob - entry.top[1].logprob)


def _check_finished(outcome: Outcome, request: generate_pb2.GenerateRequest) -> None:
    assert outcome.usage.completion_tokens == len(outcome.token_ids)
    assert outcome.usage.cached_tokens < outcome.usage.prompt_tokens
    if (
        outcome.finished is not None
        and outcome.finished.finish_reason == generate_pb2.FINISH_REASON_LENGTH
        and request.stopping.HasField("max_tokens")
    ):
        assert len(outcome.token_ids) == request.stopping.max_tokens


async def idle(
    stub: generate_pb2_grpc.TandemAsyncStub, *, within_s: float = 10.0
) -> generate_pb2.GetStatusResponse:
    """Wait until no worker holds a page, runs, queues or transfers anything.

    Raises:
        AssertionError: something is still held after ``within_s``.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    while True:
        status = await stub.GetStatus(generate_pb2.GetStatusRequest(), timeout=5)
        busy = status.requests_running + status.requests_queued
        for worker in status.workers:
            busy += worker.pages_used + worker.running + worker.queued + worker.transfers_pending
        if not busy:
            return status
        assert loop.time() < give_up_at, f"still held: {status}"
        await asyncio.sleep(0.05)  # nothing announces idleness: this is how an operator sees it
