"""The named groups that a model's cache is made of: ``k`` and ``v``, or ``ckv`` and ``k_rope``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CacheDtype = Literal["float32", "bfloat16", "float16", "int8"]

ITEM_BYTES: dict[CacheDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """One contiguous buffer ``[num_layers, num_pages, page_tokens, *token_shape]`` of the cache."""

    name: str
    num_layers: int
    page_tokens: int
    token_shape: tuple[int, ...]
    """Shape of one token's entry in one layer, for example (kv heads, head size)."""
    dtype: CacheDtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_tokens * math.prod(self.token_shape) * ITEM_BYTES[self.dtype]

    def nbytes(self, num_pages: int) -> int:
        """Bytes of the whole buffer."""
        return self.num_layers * num_pages * self.page_bytes

    def page_offset_bytes(self, layer: int, page: int, num_pages: int) -> int:
        """Where page ``page`` of layer ``layer`` starts in the buffer."""
        return (layer * num_pages + page) * self.page_bytes
