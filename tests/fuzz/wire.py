"""Coverage-guided fuzzing of everything that parses bytes of a peer.

Optional, and no part of the test run:

    .venv/bin/python -m pip install atheris
    PYTHONPATH=. .venv/bin/python tests/fuzz/wire.py -max_total_time=300

Any error but `WireError` ends it, with the input kept in a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["kv_transfer"]):
    from kv_transfer import messages
    from kv_transfer.layout import KVLayout
    from kv_transfer.testing import GROUPS, handover, layout_of
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

KINDS = (
    messages.Hello,
    messages.Challenge,
    messages.Proof,
    messages.Welcome,
    messages.Refuse,
    messages.Open,
    messages.Commit,
    messages.Abort,
    messages.Credit,
)


def parse_frame(raw: bytes) -> None:
    """A header and its body; what is accepted must read the same when it is written again."""
    padded = raw.ljust(HEADER_BYTES, b"\0")
    head, body = padded[:HEADER_BYTES], padded[HEADER_BYTES:]
    header, body_bytes = decode_header(head, MAX_BODY_BYTES)
    again = encode_frame(header, body[:body_bytes])
    assert decode_header(again[:HEADER_BYTES], MAX_BODY_BYTES)[0] == header
    check_frame(again[:HEADER_BYTES], again[HEADER_BYTES:])
    check_frame(head, body[:body_bytes])


def parse_message(raw: bytes) -> None:
    """A control message; what is accepted must be what it encodes to."""
    kind = KINDS[raw[0] % len(KINDS)] if raw else KINDS[0]
    message = messages.decode(kind, raw[1:])
    assert messages.decode(kind, messages.encode(message)) == message


def parse_handover(raw: bytes) -> None:
    """What prefill tells decode at the end."""
    handover = messages.decode_handover(raw)
    assert messages.decode_handover(messages.encode_handover(handover)) == handover


def parse_layout(raw: bytes) -> None:
    """How the peer keeps its caches."""
    layout = KVLayout.from_wire(raw)
    assert KVLayout.from_wire(layout.to_wire()) == layout


def parse_target(raw: bytes) -> None:
    """Where a prompt's pages go."""
    messages.decode_target(raw)


PARSERS: tuple[Callable[[bytes], None], ...] = (
    parse_frame,
    parse_message,
    parse_handover,
    parse_layout,
    parse_target,
)


def one_input(data: bytes) -> None:
    """The first byte chooses the parser."""
    if data:
        with suppress(WireError):
            PARSERS[data[0] % len(PARSERS)](data[1:])


def seeds() -> Iterator[bytes]:
    """One good input for each parser and message, to start from."""
    layout = layout_of(GROUPS["mla"])
    header = Header(type=FrameType.DATA, room=5, epoch=1, num_pages=2, checksum=9)
    yield b"\0" + encode_frame(header, b"body")
    examples: tuple[messages.Message, ...] = (
        messages.Hello(nonce=b"n" * 32, incarnation="p"),
        messages.Challenge(nonce=b"n" * 32, incarnation="d", proof=b"p"),
        messages.Proof(proof=b"p", layout=layout.to_wire(), byte_order="little"),
        messages.Welcome(layout=layout.to_wire(), credit_bytes=1 << 24),
        messages.Refuse(field="k.dtype", decode="float32", prefill="bfloat16"),
        messages.Open(request_id="r"),
        messages.Commit(pages_by_layer=(2, 2), handover=b"h"),
        messages.Abort(reason="why"),
        messages.Credit(frames=1, nbytes=4096),
    )
    for number, message in enumerate(examples):
        yield bytes([1, number]) + messages.encode(message)
    yield b"\2" + messages.encode_handover(handover(9))
    yield b"\3" + layout.to_wire()
    target = messages.KVTarget(
        endpoints=("tcp://127.0.0.1:1",),
        incarnation="d",
        room=5,
        epoch=1,
        num_tokens=9,
        num_pages=3,
        first_page=1,
    )
    yield b"\4" + messages.encode(target)


if __name__ == "__main__":
    with TemporaryDirectory() as corpus:
        for place, seed in enumerate(seeds()):
            one_input(seed)
            (Path(corpus) / str(place)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()
