from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import RequestError
from tandem.pb import worker_pb2
from tandem.requests import (
    GenerateRequest,
    OutputChunk,
    RequestId,
    Room,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from tandem.wireforms import (
    chunk_event,
    chunk_from_wire,
    chunk_to_wire,
    finish_reason_from_wire,
    finish_reason_to_wire,
    request_from_wire,
    request_to_wire,
)

_ids = st.integers(0, 2**32 - 1)
_floats = st.floats(-100, 100, width=32)
_samplings = st.builds(
    SamplingParams,
    temperature=_floats,
    top_k=_ids,
    top_p=_floats,
    min_p=_floats,
    repetition_penalty=_floats,
    presence_penalty=_floats,
    frequency_penalty=_floats,
    logit_bias=st.dictionaries(_ids, _floats, max_size=4).map(lambda d: tuple(sorted(d.items()))),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 20),
)
_stops = st.builds(
    StopParams,
    max_tokens=st.integers(1, 2**32 - 1),
    min_tokens=_ids,
    stop=st.lists(st.text(max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.lists(_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
_requests = st.builds(
    GenerateRequest,
    request_id=st.text(min_size=1).map(RequestId),
    room=st.integers(1, 2**63 - 1).map(Room),
    token_ids=st.lists(_ids, min_size=1, max_size=5).map(tuple),
    sampling=_samplings,
    stop=_stops,
)
_logprobs = st.builds(
    TokenLogprobs,
    logprob=_floats,
    top=st.lists(st.tuples(_ids, _floats), max_size=3).map(tuple),
)
_chunks = st.builds(
    OutputChunk,
    index=_ids,
    token_ids=st.lists(_ids, max_size=4).map(tuple),
    text=st.text(max_size=8),
    logprobs=st.lists(_logprobs, max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length"]),
)


@given(_requests)
def test_requests_survive_the_wire(request: GenerateRequest) -> None:
    message = worker_pb2.WorkRequest.FromString(request_to_wire(request).SerializeToString())
    assert request_from_wire(message) == request


@given(_chunks)
def test_chunks_survive_the_wire(chunk: OutputChunk) -> None:
    event = worker_pb2.DecodeEvent.FromString(chunk_event(chunk).SerializeToString())
    assert event.WhichOneof("event") == "chunk"
    assert chunk_from_wire(event.chunk) == chunk
    assert event.chunk.chunk == chunk_to_wire(chunk)


def test_fractions_are_rounded_to_32_bits_once() -> None:
    request = GenerateRequest(
        request_id=RequestId("r"),
        room=Room(1),
        token_ids=(1,),
        sampling=SamplingParams(temperature=0.7),
        stop=StopParams(max_tokens=1),
    )
    once = request_from_wire(request_to_wire(request))
    assert once.sampling.temperature == struct.unpack("f", struct.pack("f", 0.7))[0]
    assert request_from_wire(request_to_wire(once)) == once


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"room": 0}, "room"),
        ({"token_ids": []}, "token_ids"),
        ({"stopping": worker_pb2.Stopping()}, "stopping.max_tokens"),
    ],
)
def test_a_request_that_cannot_start_is_refused(change: dict[str, Any], field: str) -> None:
    fields: dict[str, Any] = {
        "request_id": "r",
        "room": 1,
        "token_ids": [1],
        "stopping": worker_pb2.Stopping(max_tokens=1),
    }
    with pytest.raises(RequestError, match="missing") as caught:
        request_from_wire(worker_pb2.WorkRequest(**(fields | change)))
    assert caught.value.field == field


def test_finish_reasons() -> None:
    for reason in (None, "stop", "length"):
        assert finish_reason_from_wire(finish_reason_to_wire(reason)) == reason
    assert finish_reason_from_wire(99) is None
