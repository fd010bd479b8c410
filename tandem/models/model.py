"""The seam between runners and model architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSequence:
    """A chunk of one prompt."""

    token_ids: Sequence[int]
    """The chunk; at least one token."""
    start: int
    """Tokens of the prompt whose K and V are in the cache already."""
    page_ids: Sequence[int]
    """The sequence's pages in order; they cover ``start + len(token_ids)`` tokens."""
    needs_logits: bool
    """Whether the logits after the chunk's last token are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """One sequence's next step."""

    token_id: int
    """The newest token, whose K and V this step computes."""
    position: int
    """Its index in the sequence."""
    page_ids: Sequence[int]
    """The sequence's pages in order; they cover ``position + 1`` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Tensors that a decode step of B rows reads; a captured step reads these very tensors.

    A padded row has token, position, slot and length 0: it writes to page 0 and attends to nothing.
    """

    token_ids: Tensor
    """[B] int64."""
    positions: Tensor
    """[B] int64."""
    slots: Tensor
    """[B] int64: page * page_tokens + offset of the token's K and V."""
    block_table: Tensor
    """[B, pages of the longest context] int32; read as far as the row's length only."""
    lengths: Tensor
    """[B] int32: keys that the row attends to, its own included."""

    @classmethod
    def zeros(cls, size: int, table_width: int) -> StepInputs:
        """Inputs of ``size`` padded rows."""
        return cls(
            token_ids=torch.zeros(size, dtype=torch.int64),
            positions=torch.zeros(size, dtype=torch.int64),
            slots=torch.zeros(size, dtype=torch.int64),
            block_table=torch.zeros(size, table_width, dtype=torch.int32),
            lengths=torch.zeros(size, dtype=torch.int32),
        )


class Model(Protocol):
    """A loaded model."""

    spec: ModelSpec

    def prefill(
        self,
        sequences: Sequence[PrefillSequence],
        pool: KVPool,
        on_layer: Callable[[int], None],
    ) -> Tensor:
        """Compute several chunks at once and write their K and V into ``pool``.

        Args:
            sequences: at least one; different prompts.
            pool: the pages.
            on_layer: called with i as soon as layer i's K and V of all chunks are in the pool, from
                layer 0 on; what it raises ends the prefill.

        Returns:
            Logits [sequences that need them, vocab_size], float32, in the order of ``sequences``.
        """

    def decode(self, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Compute one token for every row, write its K and V, and return what follows it.

        Reads nothing but ``inputs``, ``pool`` and the weights, and no tensor on the host: it can be
        captured.

        Returns:
            Logits [B, vocab_size], float32; those of padded rows mean nothing.
        """
