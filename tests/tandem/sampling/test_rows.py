"""A row of a batch, and a position of an output, is drawn as if there were no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch

from tandem.requests import SamplingParams, StopParams
from tandem.sampling.sampler import SequenceSampler, sample

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


MIX = (
    SamplingParams(seed=1),
    GREEDY,
    SamplingParams(seed=2, top_k=40, logprobs=True),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=4, top_p=0.95, top_k=700, temperature=0.7, top_logprobs=5),
    SamplingParams(temperature=0.0, top_logprobs=3, frequency_penalty=0.8),
    SamplingParams(seed=5, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(seed=6, logit_bias=((5, 100.0), (6, -100.0)), logprobs=True),
    SamplingParams(seed=7, temperature=5.0, top_p=0.999),
    SamplingParams(temperature=0.0, repetition_penalty=0.5, presence_penalty=1.0),
)


def mixed_batch(width: int, spread: float) -> tuple[torch.Tensor, list[SequenceSampler]]:
    logits = random_logits(len(MIX), width, seed=9, spread=spread)
    sequences = [
        sampler(
            params,
            stop=StopParams(max_tokens=99, min_tokens=4 if row % 3 == 0 else 0),
            prompt=range(row, row + 20),
            output=[row, row, row + 30],
            vocab_size=width,
        )
        for row, params in enumerate(MIX)
    ]
    return logits, sequences


@pytest.mark.parametrize("spread", [0.01, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("width", [61, 1031, 30_011])
def test_every_row_alone_and_in_any_batch_is_identical(width: int, spread: float) -> None:
    logits, sequences = mixed_batch(width, spread)
    alone = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]
    assert sample(logits, sequences) == alone
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 7, len(MIX)):
        rows = torch.randperm(len(MIX), generator=generator)[:size].tolist()
        assert sample(logits[rows], [sequences[it] for it in rows]) == [alone[it] for it in rows]
    twice = sample(torch.cat([logits, logits]), [*sequences, *sequences])
    assert twice == [*alone, *alone]


def test_nothing_is_changed() -> None:
    logits, sequences = mixed_batch(61, 4.0)
    before = logits.clone()
    first = sample(logits, sequences)
    assert sample(logits, sequences) == first
    assert torch.equal(logits, before)
    assert [sequence.index for sequence in sequences] == [3] * len(MIX)


def test_an_empty_batch() -> None:
    assert sample(torch.zeros(0, 8), []) == []


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = random_logits(1, 500)
    params = SamplingParams(seed=11)
    one = sampler(params, prompt=[1, 2], output=[3, 4, 5], vocab_size=500)
    other = sampler(params, prompt=[9] * 40, output=[6, 7, 8], vocab_size=500)
    assert sample(logits, [one]) == sample(logits, [other])
    drawn = []
    for seed, index in itertools.product(range(6), range(6)):
        sequence = sampler(SamplingParams(seed=seed), output=[0] * index, vocab_size=500)
        drawn.append(sample(torch.zeros(1, 500), [sequence])[0].token_id)
    assert len(set(drawn)) > 30


def test_penalties_survive_a_restart_of_the_sampler() -> None:
    """After a preemption the sampler is made anew and told the same tokens."""
    params = SamplingParams(seed=3, frequency_penalty=0.8, repetition_penalty=1.1)
    logits = random_logits(1, 50)
    steady = sampler(params, prompt=[1, 2], vocab_size=50)
    output: list[int] = []
    for _ in range(30):
        (token,) = sample(logits, [steady])
        restarted = sampler(params, prompt=[1, 2], output=output, vocab_size=50)
        assert sample(logits, [restarted]) == [token]
        steady.observe(token.token_id)
        output.append(token.token_id)
