"""The parser against anything that may come over a wire."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    Abort,
    Challenge,
    Commit,
    Credit,
    Hello,
    KVTarget,
    Open,
    Proof,
    Refuse,
    Welcome,
    decode,
    decode_handover,
    encode,
    encode_handover,
)
from kv_transfer.wire import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameType,
    Header,
    WireError,
    check_frame,
    decode_header,
    encode_frame,
)
from tandem.requests import Handover, SampledToken, TokenLogprobs

MESSAGES = (
    Hello(nonce=b"n", incarnation="i"),
    Challenge(nonce=b"n", incarnation="i", proof=b"p"),
    Proof(proof=b"p", layout=b"l", byte_order="little"),
    Welcome(layout=b"l", credit_bytes=1),
    Refuse(field="f", decode="a", prefill="b"),
    Open(request_id="r"),
    Commit(pages_by_layer=(1, 2), handover=b"h"),
    Abort(reason="why"),
    Credit(frames=1, nbytes=2),
    KVTarget(
        endpoints=("tcp://h:1",),
        incarnation="i",
        room=1,
        epoch=2,
        num_tokens=3,
        num_pages=4,
        first_page=5,
    ),
)
fuzz = settings(deadline=None, derandomize=True)
WRONG_VALUES: tuple[Any, ...] = (None, True, -1, 2**63, 1.5, [None], {}, [[]])
plain: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


def parse(raw: bytes) -> tuple[Header, bytes]:
    header, body_bytes = decode_header(raw[:HEADER_BYTES], MAX_BODY_BYTES)
    body = raw[HEADER_BYTES : HEADER_BYTES + body_bytes]
    check_frame(raw[:HEADER_BYTES], body)
    return header, body


@fuzz
@given(
    st.builds(
        Header,
        type=st.just(FrameType.DATA),
        room=st.integers(0, 2**64 - 1),
        epoch=st.integers(0, 2**32 - 1),
        layer=st.integers(0, 2**16 - 1),
        group=st.integers(0, 2**16 - 1),
        first_page=st.integers(0, 2**32 - 1),
        num_pages=st.integers(0, 2**32 - 1),
        payload_bytes=st.integers(0, 2**30),
        checksum=st.none() | st.integers(0, 2**64 - 1),
    ),
    st.binary(max_size=100),
)
def test_frames_survive(header: Header, body: bytes) -> None:
    assert parse(encode_frame(header, body)) == (header, body)


@fuzz
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_an_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        parse(raw)


@fuzz
@given(st.integers(0, HEADER_BYTES + 9), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, change: int) -> None:
    raw = bytearray(encode_frame(Header(type=FrameType.OPEN, room=1, epoch=2), b"0123456789"))
    raw[position] ^= change
    with pytest.raises(WireError):
        parse(bytes(raw))


def test_limits_hold_before_anything_is_read() -> None:
    raw = encode_frame(Header(type=FrameType.ABORT), b"x" * 100)
    with pytest.raises(WireError, match="body of 100 bytes, at most 99"):
        decode_header(raw[:HEADER_BYTES], 99)
    with pytest.raises(WireError, match="payload"):
        parse(encode_frame(Header(type=FrameType.DATA, payload_bytes=2**30 + 1)))
    with pytest.raises(WireError, match="OPEN with a payload"):
        parse(encode_frame(Header(type=FrameType.OPEN, payload_bytes=1)))
    with pytest.raises(WireError, match="at most"):
        decode(Abort, b"x" * (MAX_BODY_BYTES + 1))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive(message: Any) -> None:
    assert decode(type(message), encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_with_wrong_fields_are_refused(message: Any) -> None:
    fields = msgpack.unpackb(encode(message))
    for name in fields:
        missing = {key: value for key, value in fields.items() if key != name}
        wrong = [
            missing,
            {**fields, "more": 1},
            *({**fields, name: value} for value in WRONG_VALUES),
        ]
        for case in wrong:
            with pytest.raises(WireError):
                decode(type(message), msgpack.packb(case))


@fuzz
@given(value=plain)
def test_any_value_is_a_message_or_an_error(value: Any) -> None:
    try:
        raw = msgpack.packb(value)
    except (ValueError, OverflowError):
        return
    for kind in (type(message) for message in MESSAGES):
        with pytest.raises(WireError):
            decode(kind, raw)
    with pytest.raises(WireError):
        decode_handover(raw)
    with pytest.raises(WireError):
        KVLayout.from_wire(raw)


@fuzz
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(raw: bytes) -> None:
    for message in MESSAGES:
        with pytest.raises(WireError):
            decode(type(message), raw)
    with pytest.raises(WireError):
        decode_handover(raw)
    with pytest.raises(WireError):
        KVLayout.from_wire(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd" + struct.pack(">I", 2**32 - 1),  # an array of four billion
        b"\xdf" + struct.pack(">I", 2**32 - 1),  # a map as large
        b"\xc6" + struct.pack(">I", 2**32 - 1),  # bytes as long
        b"\x91" * 60_000,  # nested beyond any stack
        msgpack.packb({"reason": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"reason": "x"}) + b"\x01",
        b"\x81\xa6reason\xa1\xff",  # not UTF-8
        b"\x81\x01\x01",
    ],
)
def test_hostile_messages_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode(Abort, raw)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    raw = pickle.dumps(Canary(canary))
    for message in MESSAGES:
        with pytest.raises(WireError):
            decode(type(message), raw)
    with pytest.raises(WireError):
        decode_handover(raw)
    with pytest.raises(WireError):
        KVLayout.from_wire(raw)
    with pytest.raises(WireError):
        parse(raw.ljust(HEADER_BYTES, b"."))
    assert not canary.exists()


def test_handover_survives() -> None:
    handover = Handover(
        first_token=SampledToken(
            token_id=3, logprobs=TokenLogprobs(logprob=-1.0, top=((3, -1.0), (4, -2.5)))
        ),
        prompt_tokens=10,
        cached_tokens=4,
    )
    assert decode_handover(encode_handover(handover)) == handover
    bare = replace(handover, first_token=SampledToken(token_id=0))
    assert decode_handover(encode_handover(bare)) == bare


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), -float("inf"), 1, None])
def test_handover_with_a_bad_logprob_is_refused(logprob: Any) -> None:
    raw = msgpack.packb(
        {"token_id": 1, "logprobs": [logprob, []], "prompt_tokens": 1, "cached_tokens": 0}
    )
    with pytest.raises(WireError):
        decode_handover(raw)
