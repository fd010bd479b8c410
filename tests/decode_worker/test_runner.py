from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_worker.graph import CapturedStep, EagerStep, HostInput
from decode_worker.runner import DecodeRunner
from tandem.cache.pool import KVPool
from tandem.config.tree import GraphMode
from tandem.errors import ConfigError
from tandem.models.model import DecodeRow, Model, PrefillSequence, StepInputs
from tandem.models.registry import load_model
from tandem.ops.native import load_native
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import prepare

PAGE_TOKENS = 16
BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    if not load_native().loaded:
        pytest.skip("native kernels are not available")
    return load_model(prepare(str(folder)), "float32")


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 256 for i in range(length)]


class Sequences:
    """Prompts in a pool that has just enough pages for them and their continuations.

    All but page 0 belong to somebody, and page 0 holds NaN.
    """

    def __init__(self, model: Model, lengths: Sequence[int], room: int = 64) -> None:
        self.model = model
        counts = [-(-(length + room) // PAGE_TOKENS) for length in lengths]
        self.pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "float32"), sum(counts) + 1)
        ids = list(range(sum(counts), 0, -1))
        self.pages = [ids[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
        self.token_ids = [prompt(length, seed) for seed, length in enumerate(lengths)]
        for name in ("k", "v"):
            self.pool[name].fill_(torch.nan)
        prompts = [
            PrefillSequence(token_ids=ids, start=0, page_ids=pages, needs_logits=True)
            for ids, pages in zip(self.token_ids, self.pages, strict=True)
        ]
        with torch.inference_mode():
            logits = model.prefill(prompts, self.pool, lambda layer: None)
        for ids, token_id in zip(self.token_ids, logits.argmax(-1).tolist(), strict=True):
            ids.append(token_id)

    def runner(self, graph: GraphMode, buckets: Sequence[int] = BUCKETS) -> DecodeRunner:
        runner = DecodeRunner(self.model, self.pool, buckets, graph)
        runner.warm_up()
        return runner

    def row(self, index: int) -> DecodeRow:
        ids = self.token_ids[index]
        return DecodeRow(token_id=ids[-1], position=len(ids) - 1, page_ids=self.pages[index])

    def step(self, runner: DecodeRunner, *which: int) -> Tensor:
        """One step for some sequences, each of which gets its most likely token."""
        logits = runner.step([self.row(index) for index in which])
        for index, token_id in zip(which, logits.argmax(-1).tolist(), strict=True):
            self.token_ids[index].append(token_id)
        return logits


def poison(runner: DecodeRunner, pool: KVPool) -> None:
    """Fill everything that padding may touch with what would show in the results."""
    for name in ("k", "v"):
        pool[name][:, 0] = torch.nan
    for bucket in runner._buckets.values():
        inputs = bucket.step.inputs
        inputs.token_ids.fill_(7)
        inputs.positions.fill_(100)
        inputs.slots.fill_(PAGE_TOKENS)
        inputs.block_table.fill_(1)
        inputs.lengths.fill_(90)


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("batch", [1, 3, 5, 7])
def test_padding_and_neighbours_change_no_bit(model: Model, graph: GraphMode, batch: int) -> None:
    lengths = [1, 15, 16, 17, 100, 33, 64][:batch]
    together, alone = Sequences(model, lengths), Sequences(model, lengths)
    many, one = together.runner(graph), alone.runner(graph)
    for _ in range(40):
        poison(many, together.pool)
        logits = together.step(many, *range(batch))
        for index in range(batch):
            assert torch.equal(logits[index], alone.step(one, index)[0])
    assert together.token_ids == alone.token_ids
    for name in ("k", "v"):
        kept = together.pool[name][:, 1:].nan_to_num()
        assert torch.equal(kept, alone.pool[name][:, 1:].nan_to_num())


def test_graph_and_eager_agree(model: Model) -> None:
    lengths = [10, 300, 37]
    captured, eager = Sequences(model, lengths), Sequences(model, lengths)
    graph, plain = captured.runner("on"), eager.runner("off")
    for _ in range(64):
        logits, expected = captured.step(graph, 0, 1, 2), eager.step(plain, 0, 1, 2)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_lengths_alternate_in_one_bucket(model: Model) -> None:
    lengths = [10, 300, 470, 15]  # the longest outgrows anything seen at capture
    mixed, alone = Sequences(model, lengths, room=41), Sequences(model, lengths, room=41)
    runner, plain = mixed.runner("on", [1]), alone.runner("off", [1])
    for _ in range(40):
        for index in (0, 1, 2, 3):
            assert torch.equal(mixed.step(runner, index), alone.step(plain, index))


def test_rows_may_change_places(model: Model) -> None:
    mixed, alone = Sequences(model, [20, 50, 80]), Sequences(model, [20, 50, 80])
    runner = mixed.runner("on")
    for order in ([0, 1, 2], [2, 1, 0], [1], [2, 0], [0, 2, 1]):
        logits = mixed.step(runner, *order)
        for place, index in enumerate(order):
            assert torch.equal(logits[place], alone.step(runner_for(alone), index)[0])


def runner_for(sequences: Sequences) -> DecodeRunner:
    return sequences.runner("off", [1])


@pytest.mark.parametrize("batch", [8, 9, 13, 17])
def test_batches_above_the_largest_bucket_are_split(model: Model, batch: int) -> None:
    lengths = [3 * i + 1 for i in range(batch)]
    together, alone = Sequences(model, lengths, room=2), Sequences(model, lengths, room=2)
    logits = together.step(together.runner("on"), *range(batch))
    assert logits.shape == (batch, model.spec.vocab_size)
    one = alone.runner("on", [1])
    assert torch.equal(logits, torch.cat([alone.step(one, index) for index in range(batch)]))


def test_logits_are_the_callers_to_keep(model: Model) -> None:
    sequences = Sequences(model, [20])
    runner = sequences.runner("on")
    first = sequences.step(runner, 0)
    kept = first.clone()
    sequences.step(runner, 0)
    assert torch.equal(first, kept)
    first.zero_()


def test_the_block_table_reaches_the_end_of_the_context(model: Model) -> None:
    sequences = Sequences(model, [510], room=2)
    runner = sequences.runner("on", [2])
    sequences.step(runner, 0)
    assert len(sequences.token_ids[0]) == 512 == model.spec.max_context_tokens


def test_the_summary_names_the_captured_sizes(model: Model) -> None:
    sequences = Sequences(model, [1])
    steps: list[tuple[str, int, int]] = []
    runner = DecodeRunner(model, sequences.pool, (1, 6), "auto", lambda *step: steps.append(step))
    assert runner.graph_summary == "graph 1,6"
    assert runner.graph_nbytes == 0
    runner.warm_up()
    assert runner.graph_nbytes > 0
    assert steps[0] == ("capturing decode steps", 0, 2)
    assert steps[-1] == ("capturing decode steps", 2, 2)
    off = DecodeRunner(model, sequences.pool, (1, 6), "off")
    off.warm_up()
    assert (off.graph_summary, off.graph_nbytes) == ("eager", 0)


def test_capture_leaves_the_pages_of_requests_alone(model: Model) -> None:
    sequences = Sequences(model, [40, 3])
    before = {name: sequences.pool[name].clone() for name in ("k", "v")}
    sequences.runner("on")
    for name, pages in before.items():
        same = sequences.pool[name][:, 1:].nan_to_num()
        assert torch.equal(same, pages[:, 1:].nan_to_num())


@pytest.mark.parametrize("buckets", [(), (0, 1), (2, 1), (1, 1)])
def test_impossible_buckets(model: Model, buckets: tuple[int, ...]) -> None:
    pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "float32"), 4)
    with pytest.raises(ConfigError, match=r"decode\.buckets"):
        DecodeRunner(model, pool, buckets, "auto")


@pytest.mark.parametrize(("position", "pages"), [(16, [1]), (3, [0]), (20, [1, 0])])
def test_a_row_without_a_page_of_its_own_is_our_bug(
    model: Model, position: int, pages: list[int]
) -> None:
    pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "float32"), 4)
    runner = DecodeRunner(model, pool, (1,), "off")
    with pytest.raises(AssertionError):
        runner.step([DecodeRow(token_id=1, position=position, page_ids=pages)])
    with pytest.raises(AssertionError):
        runner.step([])


def test_declared_host_lists_come_with_every_replay(model: Model) -> None:
    sequences = Sequences(model, [20, 30, 50])
    runner = sequences.runner("off", [4])
    seen: list[list[int]] = []
    step = runner._buckets[4].step
    assert isinstance(step, EagerStep)
    step.host_inputs = (
        HostInput(name="lengths", length=4, update=lambda values: seen.append(list(values))),
    )
    sequences.step(runner, 0, 1, 2)
    sequences.step(runner, 1)
    assert seen == [[21, 31, 51, 0], [32, 0, 0, 0]]


def test_captured_steps_declare_no_host_lists_on_the_cpu(model: Model) -> None:
    pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "float32"), 4)
    step = CapturedStep.capture(model, pool, StepInputs.zeros(2, 4))
    assert step.host_inputs == ()


WITHOUT_COMPILER = """
import sys
from pathlib import Path
from decode_worker.runner import DecodeRunner
from tandem.cache.pool import KVPool
from tandem.errors import ConfigError
from tandem.models.model import DecodeRow
from tandem.models.registry import load_model
from tandem.weights.store import prepare
model = load_model(prepare(sys.argv[1]), "float32")
pool = KVPool(model.spec.cache_groups(16, "float32"), 8)
runner = DecodeRunner(model, pool, (1, 2), "auto")
runner.warm_up()
logits = runner.step([DecodeRow(token_id=9, position=0, page_ids=[3])])
try:
    DecodeRunner(model, pool, (1, 2), "on")
except ConfigError as error:
    sys.stdout.write(f"{runner.graph_summary}|{int(logits.argmax())}|{error}")
"""


def test_without_a_compiler_auto_is_eager_and_on_is_refused(model: Model, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, str(tmp_path / "tiny")],
        env={**os.environ, "TANDEM_HOME": str(tmp_path / "home"), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
    )
    summary, token_id, error = done.stdout.split("|")
    assert summary == "eager"
    assert error.startswith("decode.graph: is on, but no C++ compiler found; install g++")
    pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "float32"), 8)
    runner = DecodeRunner(model, pool, (1,), "on")
    logits = runner.step([DecodeRow(token_id=9, position=0, page_ids=[3])])
    assert int(logits.argmax()) == int(token_id)
