"""Runs decode steps of any batch size on buckets of fixed sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from decode_worker.graph import CapturedStep, EagerStep, Step
from tandem.cache.pool import KVPool
from tandem.config.tree import GraphMode
from tandem.errors import ConfigError
from tandem.models.model import DecodeRow, Model, StepInputs
from tandem.ops.native import load_native
from tandem.weights.store import Progress, silent

logger = logging.getLogger(__name__)


class DecodeRunner:
    """Pads batches to the next bucket and splits those above the largest one.

    A row's logits have the same bits in every batch: kernels compute each row on its own, and
    padded rows write to page 0 and attend to nothing.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        buckets: Sequence[int],
        graph: GraphMode,
        progress: Progress = silent,
    ) -> None:
        """Decide between graph and eager; the work is left to `warm_up`.

        Raises:
            ConfigError: the buckets are empty or not ascending, or ``graph`` is on and there are no
                native kernels.
        """
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ConfigError("decode.buckets", f"must ascend from 1 or more, not {list(buckets)}")
        self._model = model
        self._pool = pool
        self._progress = progress
        self._page_tokens = pool.groups[0].page_tokens
        self._table_width = -(-model.spec.max_context_tokens // self._page_tokens)
        self._captures = _can_capture(graph, progress)
        self._buckets = {size: self._eager(size) for size in buckets}

    @property
    def graph_summary(self) -> str:
        """``graph`` and the captured batch sizes, or ``eager``."""
        if not self._captures:
            return "eager"
        return "graph " + ",".join(str(size) for size in self._buckets)

    @property
    def graph_nbytes(self) -> int:
        """Memory that captured steps hold."""
        return sum(
            b.step.nbytes for b in self._buckets.values() if isinstance(b.step, CapturedStep)
        )

    def warm_up(self) -> None:
        """Capture every bucket, so that the first request pays for nothing.

        Raises:
            CaptureError: the model's step cannot be captured.
        """
        if not self._captures:
            return
        for done, size in enumerate(self._buckets):
            self._progress("capturing decode steps", done, len(self._buckets))
            inputs = StepInputs.zeros(size, self._table_width)
            self._buckets[size] = _Bucket(CapturedStep.capture(self._model, self._pool, inputs))
        self._progress("capturing decode steps", len(self._buckets), len(self._buckets))
        logger.info("captured decode steps %s bytes=%d", self.graph_summary, self.graph_nbytes)

    def step(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Compute one token for each row.

        Args:
            rows: at least one, any number; different sequences.

        Returns:
            Logits [len(rows), vocab_size], float32, the caller's to keep and change.
        """
        assert rows, "a step needs a row"
        largest = max(self._buckets)
        parts = [
            self._step_bucket(rows[first : first + largest])
            for first in range(0, len(rows), largest)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _step_bucket(self, rows: Sequence[DecodeRow]) -> Tensor:
        size = next(size for size in self._buckets if size >= len(rows))
        bucket = self._buckets[size]
        bucket.fill(rows, self._page_tokens)
        return bucket.replay()[: len(rows)].clone()

    def _eager(self, size: int) -> _Bucket:
        inputs = StepInputs.zeros(size, self._table_width)
        return _Bucket(EagerStep(self._model, self._pool, inputs))


class _Bucket:
    """One batch size: its step, and its inputs seen as arrays, which are cheaper to fill."""

    def __init__(self, step: Step) -> None:
        self.step = step
        inputs = step.inputs
        self._token_ids = inputs.token_ids.numpy()
        self._positions = inputs.positions.numpy()
        self._slots = inputs.slots.numpy()
        self._block_table = inputs.block_table.numpy()
        self._lengths = inputs.lengths.numpy()

    def fill(self, rows: Sequence[DecodeRow], page_tokens: int) -> None:
        """Rewrite all inputs; rows past the given ones become padding."""
        for index, row in enumerate(rows):
            page, offset = divmod(row.position, page_tokens)
            assert page < len(row.page_ids), f"position {row.position} has no page"
            assert row.page_ids[page] > 0, "page 0 belongs to padded rows"
            self._token_ids[index] = row.token_id
            self._positions[index] = row.position
            self._slots[index] = row.page_ids[page] * page_tokens + offset
            self._block_table[index, : page + 1] = row.page_ids[: page + 1]
            self._lengths[index] = row.position + 1
        for padded in (self._token_ids, self._positions, self._slots, self._lengths):
            padded[len(rows) :] = 0

    def replay(self) -> Tensor:
        """Compute the step on the inputs as filled, host lists included."""
        return self.step.replay(
            {h.name: getattr(self.step.inputs, h.name).tolist() for h in self.step.host_inputs}
        )


def _can_capture(graph: GraphMode, progress: Progress) -> bool:
    if graph == "off":
        return False
    status = load_native(progress)
    if not status.loaded and graph == "on":
        raise ConfigError("decode.graph", f"is on, but {status.detail}")
    return status.loaded
