"""Choosing one token of each row of logits: filters, then a race.

Every token i gets an exponential draw E_i of its own, and the token with the smallest E_i / p_i
wins, which is token i with probability p_i / sum(p): the exponential race, the same thing as the
Gumbel-max trick (arXiv:1611.01144, section 2) after a logarithm. Filters only take runners out.
Against one uniform number looked up in a cumulative sum it has two merits here. A row's result
needs no sum over the vocabulary, so it cannot depend on how a batch splits one. And logits that
differ in the last digits, because another kernel or machine computed them, change the winner only
where two runners are that close, while they would move every border of a cumulative sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.sampling.noise import as_int64, exponentials

_FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 8
_CPU_ELEMENTS = 2**16
"""Logits of one pass over whole rows on a CPU: what its passes write stays in a core's cache."""
_DEVICE_ELEMENTS = 2**24
"""Elsewhere: bounds memory and little else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawRule:
    """How one row is drawn."""

    temperature: float
    """Above 0."""
    top_k: int
    """0 keeps all."""
    top_p: float
    min_p: float
    state: int
    """Of the row's random numbers: see `tandem.sampling.noise.position_state`."""

    def candidates(self, width: int) -> int:
        """How many of the most likely of ``width`` tokens to look at first; 0: all, in any order.

        A few sizes only, so that rows with different settings can share a pass.
        """
        if self.top_k == 0 and self.top_p >= 1.0:
            return 0
        count = _FIRST_CANDIDATES
        while count < min(self.top_k, width):
            count *= _MORE_CANDIDATES
        return min(count, width)


class _Columns:
    """The rules of several rows as columns ``[rows, 1]``."""

    def __init__(self, rules: Sequence[DrawRule], width: int, device: torch.device) -> None:
        def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device).unsqueeze(1)

        self.temperature = column((rule.temperature for rule in rules), torch.float64)
        self.top_k = column((rule.top_k or width for rule in rules), torch.int64)
        # Above 1, not 1: tokens that no longer change the rounded sum before them are kept too.
        self.top_p = column(
            (rule.top_p if rule.top_p < 1.0 else torch.inf for rule in rules), torch.float64
        )
        self.min_p = column((rule.min_p for rule in rules), torch.float64)
        self.has_min_p = any(rule.min_p > 0.0 for rule in rules)
        self.states = column((as_int64(rule.state) for rule in rules), torch.int64)


def draw(logits: Tensor, rules: Sequence[DrawRule]) -> list[int]:
    """Draw one token id for each row.

    Args:
        logits: float32 ``[rows, vocabulary]``; each row has a finite largest value.
        rules: one per row.
    """
    width = logits.shape[1]
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _DEVICE_ELEMENTS
    at_once = max(1, elements // width)
    token_ids = [0] * len(rules)
    waiting: dict[int, list[int]] = {}  # rows by the number of candidates that they need
    for row, rule in enumerate(rules):
        waiting.setdefault(rule.candidates(width), []).append(row)
    while waiting:
        count, rows = waiting.popitem()
        for start in range(0, len(rows), at_once):
            group = rows[start : start + at_once]
            drawn = _draw_group(select_rows(logits, group), [rules[row] for row in group], count)
            for row, token_id in zip(group, drawn, strict=True):
                if token_id is None:
                    more = min(count * _MORE_CANDIDATES, width)
                    waiting.setdefault(more, []).append(row)
                else:
                    token_ids[row] = token_id
    return token_ids


def select_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows in ascending order; ``logits`` itself where that is all of them."""
    return logits if len(rows) == len(logits) else logits[rows]


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest logits of each row, best first; of equal ones the lower id.

    Args:
        logits: float32 ``[rows, vocabulary]``, no NaN.
        count: at most the vocabulary.
    """
    # The bits of floats, with all but the sign flipped below 0, have the order of the floats.
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are equal
    bits ^= (bits >> 31) & 0x7FFFFFFF
    last = logits.shape[1] - 1
    keys = bits.to(torch.int64).mul_(2**32)
    keys += torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)


def _draw_group(logits: Tensor, rules: Sequence[DrawRule], count: int) -> list[int | None]:
    """Draw from each row's ``count`` most likely tokens; None where more of them are needed.

    The result does not depend on ``count``: sums run in order, the best token first, and random
    numbers belong to ids.
    """
    width = logits.shape[1]
    columns = _Columns(rules, width, logits.device)
    best = logits.amax(dim=1, keepdim=True)
    if not count:
        weights = _weights(logits, best, columns.temperature)
        ids = torch.arange(width, device=logits.device)
        return [*_race(weights, ids, columns).tolist()]
    ids = most_likely(logits, count)
    weights = _weights(logits.gather(1, ids), best, columns.temperature)
    weights.masked_fill_(torch.arange(count, device=logits.device) >= columns.top_k, 0.0)
    sums = weights.cumsum(dim=1)
    totals = sums[:, -1:].clone()
    open_ended = [row for row, rule in enumerate(rules) if rule.top_k == 0]
    if open_ended:
        whole = _weights(logits[open_ended], best[open_ended], columns.temperature[open_ended])
        totals[open_ended] = whole.cumsum(dim=1)[:, -1:]
    wanted = columns.top_p * totals
    weights[:, 1:].masked_fill_(sums[:, :-1] >= wanted, 0.0)
    enough = (columns.top_k <= count) | (sums[:, -1:] >= wanted)
    places = _race(weights, ids, columns).unsqueeze(1)
    drawn = ids.gather(1, places).squeeze(1).tolist()
    return [it if ok else None for it, ok in zip(drawn, enough.squeeze(1).tolist(), strict=True)]


def _weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities as multiples of the best token's, whose weight is exactly 1.

    The best logit is subtracted before the division, so that no temperature can overflow.
    """
    weights = logits.to(torch.float64)
    weights -= best
    weights /= temperature
    return weights.exp_()


def _race(weights: Tensor, ids: Tensor, columns: _Columns) -> Tensor:
    """Place of the winner in each row; a weight of 0 never wins."""
    costs = exponentials(columns.states, ids)
    costs /= weights
    if columns.has_min_p:
        costs.masked_fill_(weights < columns.min_p, torch.inf)
    return costs.argmin(dim=1)
