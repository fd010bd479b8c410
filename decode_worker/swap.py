"""Copies of pages in host memory, outside the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.pool import KVPool


@dataclass(frozen=True, slots=True)
class SavedPages:
    """The contents of some pages, of every group and layer, in order."""

    groups: tuple[Tensor, ...]
    """One for each group of the pool: [num_layers, len(pages), page_tokens, *token_shape]."""


class PageSwap:
    """Copies pages out of a pool and back, into whichever pages are free then."""

    def __init__(self, pool: KVPool) -> None:
        self._tensors = tuple(pool[group.name] for group in pool.groups)

    def save(self, page_ids: Sequence[int]) -> SavedPages:
        """Copy pages out; called in the device thread."""
        index = torch.tensor(page_ids, dtype=torch.int64)
        return SavedPages(tuple(tensor.index_select(1, index) for tensor in self._tensors))

    def load(self, saved: SavedPages, page_ids: Sequence[int]) -> None:
        """Copy what `save` returned into as many leading ``page_ids``; in the device thread."""
        for tensor, copy in zip(self._tensors, saved.groups, strict=True):
            index = torch.tensor(page_ids[: copy.shape[1]], dtype=torch.int64)
            tensor.index_copy_(1, index, copy)
