"""Frames: a fixed little-endian header, a small body, and the K/V bytes of DATA frames.

Nothing here trusts a length: every field is checked against a limit before a byte is read for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

MAGIC = b"TDKV"
FRAME_VERSION = 1
_FIELDS = struct.Struct("<4sBBHQIHHIIIIQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
MAX_HANDSHAKE_BODY_BYTES = 16_384
"""Limit for bodies until the peer is authenticated; a layout is the largest of them."""
MAX_BODY_BYTES = 65_536
"""Limit for every control body and for a shared-memory frame's list of spans."""
MAX_PAYLOAD_BYTES = 1 << 30
"""Limit that every payload keeps; a receiver also holds it to its layout and credit."""
_HAS_CHECKSUM = 1


class FrameType(IntEnum):
    """What a frame says. Numbers are the wire's and never reused."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    SOURCES = 6
    OPEN = 7
    DATA = 8
    COMMIT = 9
    ABORT = 10
    DONE = 11
    CREDIT = 12
    PING = 13
    PONG = 14


class WireError(Exception):
    """The peer sent something that is no frame of this protocol; its connection ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fixed part of a frame; fields that a type does not use are 0."""

    type: FrameType
    room: int = 0
    epoch: int = 0
    layer: int = 0
    group: int = 0
    """Position of the cache group in the layout."""
    first_page: int = 0
    """Index within the reservation of the first page in the payload."""
    num_pages: int = 0
    payload_bytes: int = 0
    checksum: int | None = None
    """xxh3_64 of the payload, or None when the sender does not hash."""


def encode_frame(header: Header, body: bytes = b"") -> bytes:
    """Return header and body as they go on the wire, the payload not included."""
    fields = _FIELDS.pack(
        MAGIC,
        FRAME_VERSION,
        header.type,
        0 if header.checksum is None else _HAS_CHECKSUM,
        header.room,
        header.epoch,
        header.layer,
        header.group,
        header.first_page,
        header.num_pages,
        len(body),
        header.payload_bytes,
        header.checksum or 0,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields + body)) + body


def decode_header(raw: bytes, max_body_bytes: int) -> tuple[Header, int]:
    """Check and read a header.

    Args:
        raw: ``HEADER_BYTES`` bytes.
        max_body_bytes: larger bodies are refused.

    Returns:
        The header and how many body bytes follow it.

    Raises:
        WireError: a field is impossible.
    """
    (
        magic,
        version,
        number,
        flags,
        room,
        epoch,
        layer,
        group,
        first,
        pages,
        body,
        payload,
        xxh3,
    ) = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise WireError("not a Tandem K/V frame")
    if version != FRAME_VERSION:
        raise WireError(f"frame version {version}, here {FRAME_VERSION}")
    if flags & ~_HAS_CHECKSUM:
        raise WireError(f"unknown flags {flags:#x}")
    if body > max_body_bytes:
        raise WireError(f"body of {body} bytes, at most {max_body_bytes}")
    if payload > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload of {payload} bytes, at most {MAX_PAYLOAD_BYTES}")
    try:
        kind = FrameType(number)
    except ValueError:
        raise WireError(f"unknown frame type {number}") from None
    if payload and kind is not FrameType.DATA:
        raise WireError(f"{kind.name} with a payload")
    header = Header(
        type=kind,
        room=room,
        epoch=epoch,
        layer=layer,
        group=group,
        first_page=first,
        num_pages=pages,
        payload_bytes=payload,
        checksum=xxh3 if flags & _HAS_CHECKSUM else None,
    )
    return header, body


def check_frame(raw_header: bytes, body: bytes) -> None:
    """Compare the header's own checksum.

    Raises:
        WireError: header or body changed on the way.
    """
    (expected,) = _CHECK.unpack_from(raw_header, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(raw_header[: _FIELDS.size] + body) != expected:
        raise WireError("header or body changed on the way")
