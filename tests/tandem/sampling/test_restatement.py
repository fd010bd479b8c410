"""Sampling next to a restatement: one row, one rule after the other, no vector tricks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.requests import SampledToken, SamplingParams, StopParams
from tandem.sampling.sampler import SequenceSampler, sample

STOP = StopParams(max_tokens=100)
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


class SplitMix:
    """The generator as its paper writes it, one number after the other."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        bits = self.state
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return bits ^ (bits >> 31)


def plain_exponentials(seed: int, index: int, count: int) -> list[float]:
    positions = SplitMix(SplitMix(seed % 2**64).next())
    for _ in range(index):
        positions.next()
    tokens = SplitMix(positions.next())
    return [-math.log(((tokens.next() >> 12) + 0.5) / 2**52) for _ in range(count)]


def plain_adjust(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    logits = row.astype(np.float32).copy()
    for token_id, amount in params.logit_bias:
        logits[token_id] += np.float32(amount)
    for token_id in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        if logits[token_id] > 0:
            logits[token_id] /= penalty
        else:
            logits[token_id] *= penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= np.float32(params.presence_penalty) + np.float32(
            params.frequency_penalty
        ) * np.float32(count)
    return [float(value) for value in logits]


def plain_sample(
    logits: Sequence[float], params: SamplingParams, banned: Iterable[int], index: int
) -> int:
    allowed = [it for it in range(len(logits)) if it not in set(banned)]
    ranking = sorted(allowed, key=lambda token_id: (-logits[token_id], token_id))
    if params.temperature == 0.0:
        return ranking[0]
    best = logits[ranking[0]]
    weight = {it: math.exp((logits[it] - best) / params.temperature) for it in ranking}
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    total, before = sum(weight[it] for it in ranking), 0.0
    nucleus = []
    for token_id in ranking:
        if params.top_p == 1.0 or before < params.top_p * total:
            nucleus.append(token_id)
        before += weight[token_id]
    kept = [it for it in nucleus if weight[it] >= params.min_p and weight[it] > 0.0]
    noise = plain_exponentials(params.seed, index, len(logits))
    return min(kept, key=lambda token_id: noise[token_id] / weight[token_id])


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, vocab_size - 1)
    bias = draw(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.8, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 20, vocab_size, vocab_size + 1])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.6, 0.123, 1e-4])),
        min_p=draw(st.sampled_from([0.0, 0.013, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=tuple(bias.items()),
        seed=draw(st.integers(-(2**63), 2**64)),
        logprobs=draw(st.booleans()),
        top_logprobs=draw(st.sampled_from([0, 1, 5])),
    )


@settings(max_examples=150)
@given(st.data())
def test_any_request_in_any_batch_equals_the_restatement(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([7, 33, 90]))
    rows = data.draw(st.integers(1, 5))
    spread = data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    logits = random_logits(rows, width, data.draw(st.integers(0, 99)), spread)
    ids = st.lists(st.integers(0, width - 1), max_size=6)
    sequences, expected = [], []
    for row in logits.numpy():
        params = data.draw(sampling_params(width))
        prompt, output = data.draw(ids), data.draw(ids)
        stop = StopParams(max_tokens=100, min_tokens=data.draw(st.integers(0, 8)))
        sequences.append(sampler(params, stop=stop, prompt=prompt, output=output, vocab_size=width))
        adjusted = plain_adjust(row, params, prompt, output)
        banned = EOS if len(output) < stop.min_tokens else ()
        expected.append((plain_sample(adjusted, params, banned, len(output)), adjusted))
    tokens = sample(logits, sequences)
    for token, sequence, (token_id, adjusted) in zip(tokens, sequences, expected, strict=True):
        assert token.token_id == token_id
        check_logprobs(token, sequence.sampling, adjusted)


def check_logprobs(token: SampledToken, params: SamplingParams, adjusted: list[float]) -> None:
    if not (params.logprobs or params.top_logprobs):
        assert token.logprobs is None
        return
    assert token.logprobs is not None
    best = max(adjusted)
    norm = best + math.log(sum(math.exp(value - best) for value in adjusted))
    assert token.logprobs.logprob == pytest.approx(adjusted[token.token_id] - norm, abs=1e-9)
    ranking = sorted(range(len(adjusted)), key=lambda it: (-adjusted[it], it))
    assert [it for it, _ in token.logprobs.top] == ranking[: params.top_logprobs]
    for token_id, value in token.logprobs.top:
        assert value == pytest.approx(adjusted[token_id] - norm, abs=1e-9)
