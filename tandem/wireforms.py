"""Requests and tokens as the messages between router and workers, and back."""

from __future__ import annotations

from tandem.errors import RequestError
from tandem.pb import generate_pb2, worker_pb2
from tandem.requests import (
    FinishReason,
    GenerateRequest,
    OutputChunk,
    RequestId,
    Room,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)

_REASON_TO_WIRE: dict[FinishReason, generate_pb2.FinishReason] = {
    "stop": generate_pb2.FINISH_REASON_STOP,
    "length": generate_pb2.FINISH_REASON_LENGTH,
}
_REASON_FROM_WIRE: dict[int, FinishReason] = {
    generate_pb2.FINISH_REASON_STOP: "stop",
    generate_pb2.FINISH_REASON_LENGTH: "length",
}


def request_to_wire(request: GenerateRequest) -> worker_pb2.WorkRequest:
    """``request`` as both workers receive it."""
    return worker_pb2.WorkRequest(
        request_id=request.request_id,
        room=request.room,
        token_ids=request.token_ids,
        sampling=sampling_to_wire(request.sampling),
        stopping=stopping_to_wire(request.stop),
    )


def request_from_wire(message: worker_pb2.WorkRequest) -> GenerateRequest:
    """The request in ``message``, which the router has validated; only its shape is checked.

    Raises:
        RequestError: a field without which nothing can start is absent.
    """
    for field, present in (
        ("request_id", bool(message.request_id)),
        ("room", message.room > 0),
        ("token_ids", bool(message.token_ids)),
        ("stopping.max_tokens", message.stopping.max_tokens > 0),
    ):
        if not present:
            raise RequestError(field, "is missing from the work request")
    return GenerateRequest(
        request_id=RequestId(message.request_id),
        room=Room(message.room),
        token_ids=tuple(message.token_ids),
        sampling=_sampling_from_wire(message.sampling),
        stop=_stopping_from_wire(message.stopping),
    )


def sampling_to_wire(sampling: SamplingParams) -> worker_pb2.Sampling:
    """``sampling`` as a message; fractions become 32-bit floats."""
    return worker_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
    )


def stopping_to_wire(stop: StopParams) -> worker_pb2.Stopping:
    """``stop`` as a message."""
    return worker_pb2.Stopping(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop=stop.stop,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def chunk_to_wire(chunk: OutputChunk) -> generate_pb2.Chunk:
    """``chunk`` without its finish reason, for workers and for the public stream."""
    return generate_pb2.Chunk(
        index=chunk.index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=[
            generate_pb2.Logprobs(
                logprob=entry.logprob,
                top=[
                    generate_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                    for token_id, logprob in entry.top
                ],
            )
            for entry in chunk.logprobs
        ],
    )


def chunk_event(chunk: OutputChunk) -> worker_pb2.DecodeEvent:
    """``chunk`` with its finish reason, as a decode worker sends it."""
    return worker_pb2.DecodeEvent(
        chunk=worker_pb2.DecodeChunk(
            chunk=chunk_to_wire(chunk), finish_reason=finish_reason_to_wire(chunk.finish_reason)
        )
    )


def chunk_from_wire(message: worker_pb2.DecodeChunk) -> OutputChunk:
    """The chunk in ``message``."""
    return OutputChunk(
        index=message.chunk.index,
        token_ids=tuple(message.chunk.token_ids),
        text=message.chunk.text,
        logprobs=tuple(
            TokenLogprobs(
                logprob=entry.logprob,
                top=tuple((top.token_id, top.logprob) for top in entry.top),
            )
            for entry in message.chunk.logprobs
        ),
        finish_reason=finish_reason_from_wire(message.finish_reason),
    )


def finish_reason_to_wire(reason: FinishReason | None) -> generate_pb2.FinishReason:
    """``reason`` as its enum value; None is unspecified."""
    if reason is None:
        return generate_pb2.FINISH_REASON_UNSPECIFIED
    return _REASON_TO_WIRE[reason]


def finish_reason_from_wire(value: int) -> FinishReason | None:
    """The reason behind an enum value; None for unspecified."""
    return _REASON_FROM_WIRE.get(value)


def _sampling_from_wire(message: worker_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
    )


def _stopping_from_wire(message: worker_pb2.Stopping) -> StopParams:
    return StopParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
