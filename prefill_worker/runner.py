"""Runs prefill chunks; the prefill worker's one device thread calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.models.model import Model, PrefillSequence


class PrefillRunner:
    """A model and the pages it writes to."""

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._page_tokens = pool.groups[0].page_tokens

    def run(self, sequences: Sequence[PrefillSequence], on_layer: Callable[[int], None]) -> Tensor:
        """Compute one batch of chunks.

        Args:
            sequences: at least one; different prompts.
            on_layer: called with i once layer i's K and V of all chunks are in the pool.

        Returns:
            Logits [sequences that need them, vocab_size], float32, in the order of ``sequences``.
        """
        assert sequences, "a prefill needs a sequence"
        for sequence in sequences:
            end = sequence.start + len(sequence.token_ids)
            assert sequence.token_ids, "a chunk has at least one token"
            assert end <= len(sequence.page_ids) * self._page_tokens, f"{end} tokens lack pages"
            first = sequence.start // self._page_tokens
            assert all(page > 0 for page in sequence.page_ids[first:]), "page 0 is for padding"
        with torch.inference_mode():
            return self._model.prefill(sequences, self._pool, on_layer)
