"""Placement on simulated workers."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from router.policy import Candidate, Load, Need, View, choose, mismatch, pairs, pools
from tandem.workers import ModelIdentity, Role, WorkerIdentity

MODEL = ModelIdentity(
    name="m",
    architecture="llama",
    weights_digest="w",
    dtype="float32",
    vocab_size=9,
    max_context_tokens=9,
)


def worker(role: Role, number: int, pages: int = 1000, **changes: Any) -> WorkerIdentity:
    identity = WorkerIdentity(
        role=role,
        worker_id=f"{role}-{number}",
        incarnation=f"{role}{number}",
        pid=number,
        address=f"10.0.0.1:{100 + number}",
        model=MODEL,
        pages_total=pages,
        page_tokens=16,
        layout_digest="l",
    )
    return replace(identity, **changes)


class Simulation:
    """Counts load as the registry does: from the choice until the request is over."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.prefill = [Candidate(identity=worker("prefill", i)) for i in range(num_prefill)]
        self.decode = [Candidate(identity=worker("decode", i)) for i in range(num_decode)]
        self.chosen: Counter[str] = Counter()

    def place(self, need: Need) -> tuple[int, int]:
        view = View(prefill=tuple(self.prefill), decode=tuple(self.decode))
        pair = choose(pairs(view), need)
        assert pair is not None
        numbers = (pair.prefill.pid, pair.decode.pid)
        self.chosen.update((pair.prefill.worker_id, pair.decode.worker_id))
        picked = sum(self.chosen.values())
        self.prefill[numbers[0]] = replace(self.prefill[numbers[0]], picked=picked)
        self.decode[numbers[1]] = replace(self.decode[numbers[1]], picked=picked)
        self.count(numbers, need, 1)
        return numbers

    def count(self, numbers: tuple[int, int], need: Need, sign: int) -> None:
        prefill, decode = self.prefill[numbers[0]], self.decode[numbers[1]]
        self.prefill[numbers[0]] = replace(
            prefill,
            load=Load(
                requests=prefill.load.requests + sign,
                tokens=prefill.load.tokens + sign * need.prompt_tokens,
            ),
        )
        self.decode[numbers[1]] = replace(
            decode,
            load=Load(
                requests=decode.load.requests + sign,
                pages=decode.load.pages + sign * -(-need.total_tokens // 16),
            ),
        )


def test_requests_with_one_shared_prefix_are_spread() -> None:
    simulation = Simulation(4, 4)
    running: deque[tuple[int, int]] = deque()
    need = Need(prompt_tokens=500, total_tokens=600)
    for _ in range(100):
        if len(running) == 16:
            simulation.count(running.popleft(), need, -1)
        running.append(simulation.place(need))
    for role in ("prefill", "decode"):
        shares = [count for name, count in simulation.chosen.items() if name.startswith(role)]
        assert len(shares) == 4
        assert max(shares) <= 40


def test_a_burst_of_long_prompts_with_one_output_token_is_spread_over_prefill() -> None:
    simulation = Simulation(3, 1)
    for _ in range(30):
        simulation.place(Need(prompt_tokens=1000, total_tokens=1001))
    assert all(simulation.chosen[f"prefill-{number}"] == 10 for number in range(3))


def test_idle_workers_take_turns() -> None:
    simulation = Simulation(3, 2)
    need = Need(prompt_tokens=10, total_tokens=20)
    for _ in range(12):
        simulation.count(simulation.place(need), need, -1)
    assert simulation.chosen == Counter(
        {**{f"prefill-{i}": 4 for i in range(3)}, **{f"decode-{i}": 6 for i in range(2)}}
    )


def test_mixed_prompts_keep_the_tokens_even() -> None:
    draw = random.Random(7)
    simulation = Simulation(4, 4)
    for _ in range(200):
        prompt_tokens = draw.choice([10, 100, 1000])
        simulation.place(Need(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + 50))
    loads = [candidate.load.tokens for candidate in simulation.prefill]
    assert max(loads) - min(loads) <= 1000


def test_a_worker_without_room_is_passed_over_however_idle() -> None:
    small = Candidate(identity=worker("decode", 0, pages=2))
    large = Candidate(identity=worker("decode", 1), load=Load(requests=50, pages=900))
    view = View(prefill=(Candidate(identity=worker("prefill", 0)),), decode=(small, large))
    usable = pairs(view)
    chosen = choose(usable, Need(prompt_tokens=10, total_tokens=33))
    assert chosen is not None
    assert chosen.decode.worker_id == "decode-1"
    chosen = choose(usable, Need(prompt_tokens=10, total_tokens=32))
    assert chosen is not None
    assert chosen.decode.worker_id == "decode-0"
    assert choose(usable, Need(prompt_tokens=10, total_tokens=16001)) is None
    largest = pools(usable)
    assert largest is not None
    assert (largest.prefill_tokens, largest.decode_tokens) == (16000, 16000)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout_digest": "x"}, "K/V layout"),
        ({"page_tokens": 24}, "page_tokens"),
        ({"model": replace(MODEL, weights_digest="x")}, "weights"),
        ({"model": replace(MODEL, dtype="bfloat16")}, "dtype"),
    ],
)
def test_only_workers_that_agree_are_paired(changes: dict[str, Any], field: str) -> None:
    prefill, decode = worker("prefill", 0), worker("decode", 0, **changes)
    problem = mismatch(prefill, decode)
    assert problem.startswith(field)
    assert "prefill-0" in problem
    assert "decode-0" in problem
    view = View(prefill=(Candidate(identity=prefill),), decode=(Candidate(identity=decode),))
    assert pairs(view) == []
    assert pools(pairs(view)) is None


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 128])
def test_pages_that_divide_each_other_are_paired(page_tokens: int) -> None:
    prefill, decode = worker("prefill", 0), worker("decode", 0, page_tokens=page_tokens)
    assert mismatch(prefill, decode) == ""


def test_prefill_is_chosen_among_those_that_fit_the_decode_worker() -> None:
    idle = Candidate(identity=worker("prefill", 0, layout_digest="old"))
    busy = Candidate(identity=worker("prefill", 1), load=Load(requests=9, tokens=900))
    view = View(prefill=(idle, busy), decode=(Candidate(identity=worker("decode", 0)),))
    chosen = choose(pairs(view), Need(prompt_tokens=1, total_tokens=2))
    assert chosen is not None
    assert chosen.prefill.worker_id == "prefill-1"


def test_colocated_pairs_are_one_process() -> None:
    view = View(
        prefill=tuple(Candidate(identity=worker("prefill", number)) for number in range(3)),
        decode=tuple(Candidate(identity=worker("decode", number)) for number in range(3)),
    )
    assert len(pairs(view)) == 9
    colocated = pairs(view, colocated=True)
    assert [(a.identity.pid, b.identity.pid) for a, b in colocated] == [(0, 0), (1, 1), (2, 2)]
