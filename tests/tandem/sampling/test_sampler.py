"""Drawing tokens: how often each one comes, extremes, penalties, bans, broken logits."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from tandem.errors import WorkerError
from tandem.requests import SampledToken, SamplingParams, StopParams
from tandem.sampling.sampler import LOGPROB_FLOOR, SequenceSampler, sample

STOP = StopParams(max_tokens=100)
GREEDY = SamplingParams(temperature=0.0)
EOS = (2,)


def sampler(
    sampling: SamplingParams,
    *,
    stop: StopParams = STOP,
    prompt: Sequence[int] = (),
    output: Iterable[int] = (),
    vocab_size: int,
) -> SequenceSampler:
    sequence = SequenceSampler(sampling, stop, prompt, EOS, vocab_size)
    for token_id in output:
        sequence.observe(token_id)
    return sequence


def random_logits(rows: int, width: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * spread


def draw_one(logits: Sequence[float], sampling: SamplingParams, **more: object) -> SampledToken:
    sequence = sampler(sampling, vocab_size=len(logits), **more)  # type: ignore[arg-type]
    (token,) = sample(torch.tensor([list(logits)]), [sequence])
    return token


# --- how often each token comes


def chi_square(counts: Counter[int], shares: Sequence[float]) -> float:
    total = counts.total()
    assert sum(shares) == pytest.approx(1.0)
    assert all(share > 0 or not counts[it] for it, share in enumerate(shares))
    return sum(
        (counts[it] - total * share) ** 2 / (total * share)
        for it, share in enumerate(shares)
        if share > 0
    )


SHARES = [0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        (SamplingParams(), SHARES),
        (SamplingParams(temperature=2.0), [it**0.5 / sum(s**0.5 for s in SHARES) for it in SHARES]),
        (SamplingParams(top_k=3), [0.5, 0.3125, 0.1875, 0, 0, 0, 0, 0]),
        (SamplingParams(top_p=0.5), [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0, 0, 0, 0]),
        (SamplingParams(min_p=0.3), [0.5, 0.3125, 0.1875, 0, 0, 0, 0, 0]),
        (SamplingParams(top_k=3, top_p=0.75), [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "index"])
def test_distribution(params: SamplingParams, shares: list[float], vary: str) -> None:
    """4,000 draws; 7 degrees of freedom exceed 35 once in 90,000 times."""
    draws = 4000
    sequences = []
    for number in range(draws):
        sequence = sampler(replace(params, seed=number if vary == "seed" else 5), vocab_size=8)
        sequence.index = number if vary == "index" else 0
        sequences.append(sequence)
    logits = torch.tensor(SHARES).log().expand(draws, 8)
    counts = Counter(token.token_id for token in sample(logits, sequences))
    assert chi_square(counts, shares) < 35


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws, of one seed and of one position, fill the table of pairs evenly."""
    drawn = {}
    for seed in range(60):
        sequences = [sampler(SamplingParams(seed=seed), vocab_size=4) for _ in range(60)]
        for index, sequence in enumerate(sequences):
            sequence.index = index
        tokens = sample(torch.zeros(60, 4), sequences)
        drawn.update({(seed, index): it.token_id for index, it in enumerate(tokens)})
    for step in ((0, 1), (1, 0), (1, -1), (1, 1)):
        pairs = Counter(
            drawn[place] * 4 + drawn[other]
            for place in drawn
            if (other := (place[0] + step[0], place[1] + step[1])) in drawn
        )
        assert chi_square(pairs, [1 / 16] * 16) < 50


# --- extremes

GRID = list(
    itertools.product(
        (0.0, 5e-324, 1e-9, 1e-4, 1.0, 5.0, 100.0),
        (1e-4, 0.5, 1.0 - 2**-53, 1.0),
        (0, 1, 300, 301),
        (0.0, 1.0),
    )
)


@pytest.mark.parametrize("spread", [0.0, 3.0, 1e30], ids=["flat", "usual", "huge"])
def test_extreme_parameters_are_valid(spread: float) -> None:
    width = 300
    logits = random_logits(1, width, spread=spread)
    best = int(logits.argmax())
    sequences = [
        sampler(
            SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=1, top_logprobs=2),
            vocab_size=width,
        )
        for t, p, k, m in GRID
    ]
    tokens = sample(logits.expand(len(GRID), width), sequences)
    for (temperature, top_p, top_k, min_p), token in zip(GRID, tokens, strict=True):
        assert 0 <= token.token_id < width
        assert token.logprobs is not None
        json.dumps([token.logprobs.logprob, token.logprobs.top], allow_nan=False)
        cold = temperature == 0.0 or (temperature <= 1e-4 and spread > 0.0)
        if cold or top_k == 1 or (top_p == 1e-4 and spread > 0 and temperature <= 1.0):
            assert token.token_id == best
        if min_p == 1.0 and spread > 0.0:
            assert token.token_id == best


@pytest.mark.parametrize("width", [64, 65, 512, 5000])
def test_flat_logits_need_every_candidate(width: int) -> None:
    """top_p that leaves out one token of many: all of the others can be drawn."""
    params = SamplingParams(top_p=1.0 - 0.5 / width)
    sequences = [sampler(replace(params, seed=seed), vocab_size=width) for seed in range(20)]
    plain = [sampler(SamplingParams(seed=seed), vocab_size=width) for seed in range(20)]
    logits = torch.zeros(20, width)
    assert sample(logits, sequences) == sample(logits, plain)


def test_top_k_of_everything_is_no_top_k() -> None:
    logits = random_logits(4, 200)
    for top_k in (200, 201, 2**31 - 1):
        some = [sampler(SamplingParams(seed=s, top_k=top_k), vocab_size=200) for s in range(4)]
        none = [sampler(SamplingParams(seed=s), vocab_size=200) for s in range(4)]
        assert sample(logits, some) == sample(logits, none)


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2})):
        sequences = [
            sampler(SamplingParams(top_p=top_p, seed=seed), vocab_size=4) for seed in range(200)
        ]
        tokens = sample(shares.log2().mul(math.log(2)).expand(200, 4), sequences)
        assert {token.token_id for token in tokens} == kept


def test_top_p_is_reached_by_exactly_that_much() -> None:
    """Of four equal tokens the lower ids are kept, and no more than needed."""
    for top_p, kept in ((0.25, {0}), (0.5, {0, 1}), (0.5000001, {0, 1, 2}), (0.75, {0, 1, 2})):
        sequences = [
            sampler(SamplingParams(top_p=top_p, seed=seed), vocab_size=4) for seed in range(200)
        ]
        assert {token.token_id for token in sample(torch.zeros(200, 4), sequences)} == kept


def test_min_p_is_a_share_of_the_best_token() -> None:
    sequences = [sampler(SamplingParams(min_p=0.5, seed=seed), vocab_size=4) for seed in range(200)]
    logits = torch.tensor([0.5, 0.26, 0.2, 0.04]).log()
    tokens = sample(logits.expand(200, 4), sequences)
    assert {token.token_id for token in tokens} == {0, 1}


# --- greedy


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, logprobs=True)])
def test_of_equal_logits_the_lowest_id_wins(params: SamplingParams) -> None:
    for width in (3, 64, 1000, 49_152):
        logits = [0.0] * width
        assert draw_one(logits, params).token_id == 0
        logits[1] = logits[-1] = 7.0
        assert draw_one(logits, params).token_id == 1
    assert draw_one([-1.0, -0.0, 0.0], params).token_id == 1


def test_of_equal_logits_the_lower_id_is_reported_first() -> None:
    token = draw_one([1.0, 2.0, 2.0, -0.0, 0.0, 2.0], replace(GREEDY, top_logprobs=6))
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 2, 5, 0, 3, 4]


def test_temperature_0_ignores_seed_and_filters() -> None:
    params = SamplingParams(temperature=0.0, seed=9, top_k=3, top_p=0.1, min_p=0.5)
    assert draw_one([0.0, 3.0, 2.0], params) == draw_one([0.0, 3.0, 2.0], GREEDY)


# --- penalties, bias, bans


def adjusted_differences(
    logits: Sequence[float], params: SamplingParams, **more: object
) -> list[float]:
    """Adjusted logits relative to that of the last token, read from the log-probabilities."""
    width = len(logits)
    token = draw_one(logits, replace(params, temperature=0.0, top_logprobs=width), **more)
    assert token.logprobs is not None
    values = dict(token.logprobs.top)
    return [values[token_id] - values[width - 1] for token_id in range(width)]


def test_repetition_counts_prompt_and_output_once_each() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    got = adjusted_differences(
        [2.0, -1.0, 3.0, 0.5, 0.0], params, prompt=[0, 0, 1], output=[2, 2, 2]
    )
    assert got == pytest.approx([1.0, -2.0, 1.5, 0.5, 0.0])


def test_presence_and_frequency_count_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5)
    got = adjusted_differences([2.0, -1.0, 3.0, 0.5, 0.0], params, prompt=[0, 1], output=[2, 3, 2])
    assert got == pytest.approx([2.0, -1.0, 1.75, -0.25, 0.0])


def test_all_penalties_and_a_bias_together() -> None:
    """The bias comes first, then repetition, then what is subtracted."""
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=((0, -3.0), (2, 1.0)),
    )
    got = adjusted_differences([2.0, -1.0, 3.0, 0.5, 0.0], params, prompt=[0, 1], output=[2, 2, 1])
    assert got == pytest.approx([-2.0, -2.75, 0.75, 0.5, 0.0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_decides(temperature: float) -> None:
    logits = random_logits(1, 40)[0].tolist()
    best = max(range(40), key=lambda it: logits[it])
    for output in ([], [1, 2, 3]):
        params = SamplingParams(temperature=temperature, logit_bias=((17, 100.0),))
        assert draw_one(logits, params, output=output).token_id == 17
        params = SamplingParams(temperature=temperature, logit_bias=((best, -100.0),))
        assert draw_one(logits, params, output=output).token_id != best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_what_would_end_the_output(temperature: float) -> None:
    logits = [0.0, 0.0, 50.0, 0.0, 40.0]  # 2 ends, and 4 ends for this request
    params = SamplingParams(temperature=temperature, top_logprobs=2)
    stop = StopParams(max_tokens=9, min_tokens=2, stop_token_ids=(4,))
    for output in ([], [0]):
        token = draw_one(logits, params, stop=stop, output=output)
        assert token.token_id in {0, 1, 3}
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(-50.0, abs=1e-3)  # taken before the ban
        assert [it for it, _ in token.logprobs.top] == [2, 4]
    assert draw_one(logits, params, stop=stop, output=[0, 0]).token_id == 2
    ignoring = replace(stop, ignore_eos=True)
    assert draw_one(logits, params, stop=ignoring).token_id == 2


def test_min_tokens_cannot_ban_everything() -> None:
    stop = StopParams(max_tokens=9, min_tokens=2, stop_token_ids=(0, 1, 3))
    sequences = [
        sampler(GREEDY, stop=stop, vocab_size=4),
        sampler(SamplingParams(), stop=stop, vocab_size=4),
        sampler(GREEDY, stop=replace(stop, stop_token_ids=(0,)), vocab_size=4),
    ]
    tokens = sample(torch.tensor([[0.0, 60.0, 1.0, 2.0]] * 3), sequences)
    assert [token.token_id for token in tokens] == [1, 1, 1]


# --- logits that are too wide, and ids that are not there


@pytest.mark.parametrize(
    "params",
    [GREEDY, replace(GREEDY, top_logprobs=9), SamplingParams(), SamplingParams(top_p=0.999)],
)
def test_ids_beyond_the_vocabulary_do_not_exist(params: SamplingParams) -> None:
    narrow = random_logits(3, 9)
    wide = torch.cat([narrow, torch.tensor([[50.0, math.nan, math.inf]] * 3)], dim=1)
    sequences = [sampler(replace(params, seed=seed), vocab_size=9) for seed in range(3)]
    assert sample(wide, sequences) == sample(narrow, sequences)


def test_tokens_outside_the_vocabulary_touch_no_row() -> None:
    """Such a prompt is refused long before; here it must at least harm nobody else."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.9, top_logprobs=8)
    strange = sampler(
        replace(params, logit_bias=((8, 50.0), (-1, 50.0))),
        stop=StopParams(max_tokens=9, min_tokens=3, stop_token_ids=(9, -3), ignore_eos=True),
        prompt=[8, 11, -2],
        vocab_size=8,
    )
    usual = sampler(params, vocab_size=8)
    logits = random_logits(3, 8)
    plain = sample(logits, [usual] * 3)
    assert sample(logits, [usual, strange, usual]) == plain


# --- what a broken model gives


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), replace(GREEDY, logprobs=True)])
def test_logits_that_are_not_numbers_raise(params: SamplingParams) -> None:
    for bad in ([0.0, math.nan, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]):
        with pytest.raises(WorkerError, match="row 1"):
            sample(
                torch.tensor([[0.0, 1.0, 2.0], bad]),
                [sampler(params, vocab_size=3), sampler(params, vocab_size=3)],
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_impossible_tokens_have_finite_log_probabilities(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1, top_logprobs=4)
    token = draw_one([-math.inf, 0.0, -math.inf, -3e38], params)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == 0.0
    assert token.logprobs.top == tuple(zip([1, 3, 0, 2], [0.0, *[LOGPROB_FLOOR] * 3], strict=True))


def test_an_unlikely_choice_is_reported_as_finite() -> None:
    stop = StopParams(max_tokens=9, min_tokens=1)
    token = draw_one([-math.inf, -2e4, 0.0], replace(GREEDY, logprobs=True), stop=stop)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == LOGPROB_FLOOR
    assert token.logprobs.top == ()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((300, 70), -math.inf)
    logits[:, 69] = 0.0
    logits[:, 3] = -5.0
    for params in (SamplingParams(), SamplingParams(top_k=60), SamplingParams(top_p=0.9999999)):
        sequences = [
            sampler(replace(params, temperature=9.0, seed=seed), vocab_size=70)
            for seed in range(300)
        ]
        assert {token.token_id for token in sample(logits, sequences)} == {3, 69}
