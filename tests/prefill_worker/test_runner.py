from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefill_worker.runner import PrefillRunner
from tandem.cache.pool import KVPool
from tandem.models.model import PrefillSequence
from tandem.models.registry import load_model
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import prepare


@pytest.fixture
def runner(tmp_path: Path) -> PrefillRunner:
    write_tiny_llama(tmp_path)
    model = load_model(prepare(str(tmp_path)), "float32")
    return PrefillRunner(model, KVPool(model.spec.cache_groups(16, "float32"), 8))


def sequence(length: int, pages: list[int], start: int = 0) -> PrefillSequence:
    ids = list(range(length))
    return PrefillSequence(token_ids=ids, start=start, page_ids=pages, needs_logits=True)


def test_a_batch_runs_layer_by_layer(runner: PrefillRunner) -> None:
    layers: list[int] = []
    logits = runner.run([sequence(20, [1, 2]), sequence(5, [3])], layers.append)
    assert layers == [0, 1]
    assert logits.shape == (2, 260)
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [sequence(0, [1])],
        [sequence(17, [1])],
        [sequence(5, [0])],
        [sequence(1, [1], start=16)],
    ],
)
def test_pages_must_cover_the_chunk(runner: PrefillRunner, wrong: list[PrefillSequence]) -> None:
    with pytest.raises(AssertionError):
        runner.run(wrong, lambda layer: None)
