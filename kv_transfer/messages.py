"""Bodies of control frames, as msgpack maps whose keys, types and sizes are checked on arrival."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import msgpack

from kv_transfer.wire import MAX_BODY_BYTES, WireError
from tandem.requests import Handover, SampledToken, TokenLogprobs

_MAX_ITEMS = 65_536
_MAX_INT = 1 << 63
_MAX_U32 = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Prefill's first word."""

    nonce: bytes
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """Decode's answer: it knows the secret; now prove that you do."""

    nonce: bytes
    incarnation: str
    proof: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Prefill knows the secret too; this is how it keeps its caches."""

    proof: bytes
    layout: bytes
    byte_order: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The connection is ready; at most ``credit_bytes`` of K/V may be under way on it."""

    layout: bytes
    credit_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """The layouts differ in ``field``; ``decode`` and ``prefill`` are the two values."""

    field: str
    decode: str
    prefill: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Frames for this (room, epoch) will come from this connection."""

    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """All pages were sent: the manifest."""

    pages_by_layer: tuple[int, ...]
    """Pages sent for each layer, a page sent twice counted twice; the same for every group."""
    handover: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """One end gave this (room, epoch) up."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The oldest ``frames`` DATA frames, of ``nbytes`` together, were placed or dropped."""

    frames: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTarget:
    """Where a prompt's pages go: what decode tells prefill through the router."""

    endpoints: tuple[str, ...]
    """Ways to reach the receiver, best first."""
    incarnation: str
    room: int
    epoch: int
    num_tokens: int
    num_pages: int
    first_page: int
    """Pages before this one are already there."""


Message = Hello | Challenge | Proof | Welcome | Refuse | Open | Commit | Abort | Credit | KVTarget
M = TypeVar("M", bound=Message)


def pack_object(value: object) -> bytes:
    """Encode plain values as msgpack."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack_object(raw: bytes) -> Any:
    """Decode msgpack of bounded size; no extension types, no non-string keys.

    Raises:
        WireError: it is too long, not msgpack, or more than one value.
    """
    if len(raw) > MAX_BODY_BYTES:
        raise WireError(f"message of {len(raw)} bytes, at most {MAX_BODY_BYTES}")
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_ITEMS,
            max_map_len=64,
            max_str_len=MAX_BODY_BYTES,
            max_bin_len=MAX_BODY_BYTES,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(f"not a msgpack message: {error}") from None


def encode(message: Message) -> bytes:
    """Encode a control message."""
    return pack_object({field.name: getattr(message, field.name) for field in fields(message)})


def decode(kind: type[M], raw: bytes) -> M:
    """Decode a control message of a known kind.

    Raises:
        WireError: fields are missing, unknown, or of the wrong type or range.
    """
    values = unpack_object(raw)
    types = _types(cast(Hashable, kind))
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise WireError(f"{kind.__name__}: wrong fields")
    return kind(**{n: _check(f"{kind.__name__}.{n}", values[n], types[n]) for n in types})


@cache
def _types(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(name: str, value: Any, expected: Any) -> Any:
    if expected is int:
        right = type(value) is int and 0 <= value < _MAX_INT
    elif expected is str or expected is bytes:
        right = type(value) is expected
    else:  # tuple[int, ...] or tuple[str, ...]
        item = expected.__args__[0]
        right = type(value) is list
        if right:
            return tuple(_check(name, entry, item) for entry in value)
    if not right:
        raise WireError(f"{name}: wrong type or range")
    return value


def decode_target(raw: bytes) -> KVTarget:
    """Decode a target.

    Raises:
        WireError: it is not one.
    """
    target = decode(KVTarget, raw)
    if target.epoch > _MAX_U32 or not target.first_page <= target.num_pages <= _MAX_U32:
        raise WireError("KVTarget: impossible numbers")
    return target


def encode_handover(handover: Handover) -> bytes:
    """Encode what prefill tells decode at the end."""
    token = handover.first_token
    logprobs = token.logprobs
    return pack_object(
        {
            "token_id": token.token_id,
            "logprobs": None
            if logprobs is None
            else [logprobs.logprob, [list(entry) for entry in logprobs.top]],
            "prompt_tokens": handover.prompt_tokens,
            "cached_tokens": handover.cached_tokens,
        }
    )


def decode_handover(raw: bytes) -> Handover:
    """Decode what `encode_handover` made.

    Raises:
        WireError: it is not a handover.
    """
    values = unpack_object(raw)
    names = {"token_id", "logprobs", "prompt_tokens", "cached_tokens"}
    if not isinstance(values, dict) or values.keys() != names:
        raise WireError("handover: wrong fields")
    return Handover(
        first_token=SampledToken(
            token_id=_count(values["token_id"]), logprobs=_logprobs(values["logprobs"])
        ),
        prompt_tokens=_count(values["prompt_tokens"]),
        cached_tokens=_count(values["cached_tokens"]),
    )


def _logprobs(raw: Any) -> TokenLogprobs | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[1], list):
        raise WireError("handover: logprobs")
    top: list[tuple[int, float]] = []
    for entry in raw[1]:
        if not isinstance(entry, list) or len(entry) != 2:
            raise WireError("handover: logprobs")
        top.append((_count(entry[0]), _finite(entry[1])))
    return TokenLogprobs(logprob=_finite(raw[0]), top=tuple(top))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise WireError("handover: not a count")
    return value


def _finite(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise WireError("handover: not a finite number")
    return value
