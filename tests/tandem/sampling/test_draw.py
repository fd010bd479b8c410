from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.requests import SamplingParams, StopParams
from tandem.sampling.draw import DrawRule, draw, most_likely
from tandem.sampling.noise import as_int64, exponentials, position_state
from tandem.sampling.sampler import SequenceSampler, sample

ORDERING = {"topk", "sort", "argsort"}


class Operations(TorchDispatchMode):
    """The names of all operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations_of(work: Callable[[], object]) -> list[str]:
    operations = Operations()
    with operations:
        work()
    return operations.names


def rule(index: int, **changes: Any) -> DrawRule:
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return DrawRule(state=position_state(11, index), **(off | changes))


def samplers(count: int, **params: Any) -> list[SequenceSampler]:
    stop = StopParams(max_tokens=9)
    return [SequenceSampler(SamplingParams(**params), stop, (1, 2), (2,), 300)] * count


def test_a_plain_greedy_batch_is_one_argmax() -> None:
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
    names = operations_of(lambda: sample(logits, samplers(16, temperature=0.0)))
    assert names.count("argmax") == 1
    assert not {"index", "clone", "exp", "exp_", "log", "log_"} & set(names)
    assert not ORDERING & set(names)


@pytest.mark.parametrize("params", [{}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_nothing_is_put_in_order_for_filters_that_are_off(params: dict[str, Any]) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    assert not ORDERING & set(operations_of(lambda: sample(logits, samplers(4, **params))))


def test_the_work_does_not_grow_with_the_rows() -> None:
    """Up to what fits a core's cache, all rows share their operations."""
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    for params in ({}, {"top_k": 20, "top_p": 0.9, "presence_penalty": 1.0}):
        counts = {
            rows: len(operations_of(lambda: sample(logits[:rows], samplers(rows, **params))))  # noqa: B023 - called at once
            for rows in (1, 32)
        }
        assert counts[1] == counts[32]


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 700])
def test_the_most_likely_come_in_order_and_equal_ones_by_id(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randint(-3, 4, (6, width), generator=generator) * torch.tensor(0.5)
    rows[0].mul_(-0.0)
    rows[1][::3] = -torch.inf
    rows[2] *= 1e-40  # below the smallest normal number
    rows[3] *= 1e38
    for count in {1, width // 2 or 1, width}:
        found = most_likely(rows, count)
        for row, ids in zip(rows.tolist(), found.tolist(), strict=True):
            assert ids == sorted(range(width), key=lambda it: (-row[it], it))[:count]


def test_rows_that_need_more_candidates_get_them_and_the_others_do_not_care() -> None:
    width = 9000
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(1, width, generator=generator) * 0.01
    steep = torch.randn(1, width, generator=generator) * 9.0
    logits = torch.cat([flat, steep] * 6)
    rules = [rule(index, top_p=0.5 + 0.04 * index) for index in range(6)]
    rules += [rule(index, top_k=900 * index + 1) for index in range(6)]
    assert draw(logits, rules) == [
        draw(logits[row : row + 1], [it])[0] for row, it in enumerate(rules)
    ]
    weights = logits.double().softmax(dim=1)
    for row, it in enumerate(rules):
        assert draw(logits[row : row + 1], [it]) == [slow_draw(weights[row].tolist(), it)]


def slow_draw(weights: list[float], it: DrawRule) -> int:
    """Filters and race on sorted lists, for temperature 1 and distinct weights."""
    ranked = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    ranked = ranked[: it.top_k or None]
    wanted, reached = it.top_p * sum(weights[token] for token in ranked), 0.0
    kept = []
    for token in ranked:
        if reached >= wanted:
            break
        kept.append(token)
        reached += weights[token]
    noise = exponentials(torch.tensor([[as_int64(it.state)]]), torch.arange(len(weights)))[0]
    return min(kept, key=lambda token: float(noise[token]) / weights[token])


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.02}])
def test_errors_in_the_last_digits_do_not_change_the_draw(filters: dict[str, float]) -> None:
    """Other kernels and machines give logits that differ this much; see ADR 3."""
    width, rows = 20_000, 200
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(1, width, generator=generator) * 2.0
    base[0, :5] += torch.tensor([11.0, 10.0, 9.0, 8.0, 7.0])
    errors = torch.randn(rows, width, generator=generator) * 1e-5
    rules = [rule(index, **filters) for index in range(rows)]
    before = draw(base.expand(rows, width).contiguous(), rules)
    after = draw(base + errors, rules)
    assert len(set(before)) > 20 or filters
    assert sum(one != two for one, two in zip(before, after, strict=True)) <= 1


def test_a_full_vocabulary_of_rows_is_the_same_alone() -> None:
    """Wide rows, several to a pass and more than fit one: every row keeps its own result."""
    width, rows = 33_000, 5
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(2)) * 4.0
    for filters in ({}, {"min_p": 0.01}, {"top_p": 0.8}, {"top_k": 100, "top_p": 0.9}):
        rules = [rule(index, **filters) for index in range(rows)]
        together = draw(logits, rules)
        assert together == [draw(logits[row : row + 1], [rules[row]])[0] for row in range(rows)]
        assert draw(logits.flip(0), rules[::-1]) == together[::-1]
