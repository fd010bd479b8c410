"""How a worker keeps K and V, and whether two workers keep them alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kv_transfer.messages import pack_object, unpack_object
from kv_transfer.wire import WireError
from tandem.cache.groups import ITEM_BYTES, CacheGroup
from tandem.errors import LayoutMismatch

PROTOCOL_VERSION = 1
"""Version of the meaning of frames; peers of different versions refuse each other."""
_MAX_GROUPS = 16
_MAX_DIMENSIONS = 8
_MAX_NUMBER = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What decides whether one worker's pages can be another's."""

    model: str
    weights_digest: str
    groups: tuple[CacheGroup, ...]
    """Buffers in the order of the pool."""
    rope: str
    """Canonical text of the rotary embedding: cached keys are already rotated."""
    protocol_version: int = PROTOCOL_VERSION

    @property
    def page_tokens(self) -> int:
        """Tokens in one page, the same in all groups."""
        return self.groups[0].page_tokens

    def digest(self) -> str:
        """Short name of all that must be equal; page sizes need only divide each other."""
        groups = tuple(replace(group, page_tokens=1) for group in self.groups)
        alike = replace(self, groups=groups).to_wire()
        return hashlib.blake2b(alike, digest_size=8).hexdigest()

    def to_wire(self) -> bytes:
        """Encode for the handshake."""
        return pack_object(
            {
                "protocol_version": self.protocol_version,
                "model": self.model,
                "weights_digest": self.weights_digest,
                "rope": self.rope,
                "groups": [
                    [g.name, g.num_layers, g.page_tokens, list(g.token_shape), g.dtype]
                    for g in self.groups
                ],
            }
        )

    @classmethod
    def from_wire(cls, raw: bytes) -> KVLayout:
        """Decode what `to_wire` made.

        Raises:
            WireError: it is not a layout.
        """
        fields = unpack_object(raw)
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise WireError("layout: wrong fields")
        groups = fields["groups"]
        if not isinstance(groups, list) or not 1 <= len(groups) <= _MAX_GROUPS:
            raise WireError("layout: groups")
        if any(type(group) is list and group[2:3] != groups[0][2:3] for group in groups):
            raise WireError("layout: groups of different page sizes")
        return cls(
            model=_text(fields, "model"),
            weights_digest=_text(fields, "weights_digest"),
            rope=_text(fields, "rope"),
            protocol_version=_number(fields["protocol_version"], "protocol_version"),
            groups=tuple(_group(group) for group in groups),
        )

    def check_compatible(self, theirs: KVLayout) -> None:
        """Compare with a peer's layout, field by field.

        Raises:
            LayoutMismatch: names the first field that differs; of two page sizes, if neither
                divides the other.
        """
        for (field, ours), (their_field, value) in zip(
            self._comparable(), theirs._comparable(), strict=False
        ):
            if field != their_field or not (ours == value or _sizes_divide(field, ours, value)):
                raise LayoutMismatch(field, str(ours), str(value))

    def _comparable(self) -> Iterator[tuple[str, object]]:
        yield "protocol_version", self.protocol_version
        yield "model", self.model
        yield "weights_digest", self.weights_digest
        yield "groups", ",".join(group.name for group in self.groups)
        for group in self.groups:
            yield f"{group.name}.dtype", group.dtype
            yield f"{group.name}.num_layers", group.num_layers
            yield f"{group.name}.page_tokens", group.page_tokens
            yield f"{group.name}.token_shape", group.token_shape
        yield "rope", self.rope


def _sizes_divide(field: str, ours: object, theirs: object) -> bool:
    if not field.endswith(".page_tokens") or not isinstance(ours, int):
        return False
    return isinstance(theirs, int) and not max(ours, theirs) % min(ours, theirs)


def _group(raw: Any) -> CacheGroup:
    if not isinstance(raw, list) or len(raw) != 5:
        raise WireError("layout: a group has five parts")
    name, num_layers, page_tokens, shape, dtype = raw
    if not isinstance(name, str) or not name or not isinstance(dtype, str):
        raise WireError("layout: group name or dtype")
    if dtype not in ITEM_BYTES:
        raise WireError("layout: group name or dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise WireError("layout: token_shape")
    return CacheGroup(
        name=name,
        num_layers=_number(num_layers, "num_layers"),
        page_tokens=_number(page_tokens, "page_tokens"),
        token_shape=tuple(_number(size, "token_shape") for size in shape),
        dtype=dtype,
    )


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value < _MAX_NUMBER:
        raise WireError(f"layout: {what}")
    return value


def _text(fields: Mapping[str, Any], what: str) -> str:
    value = fields[what]
    if not isinstance(value, str):
        raise WireError(f"layout: {what}")
    return value
