"""Drawing the next token: a pure function of logits, parameters, seed and position.

In this order: bias, penalties, [log-probabilities are taken here], minimum length, temperature,
top_k, top_p, min_p, draw. Rows of a batch never influence one another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.errors import WorkerError
from tandem.requests import SampledToken, SamplingParams, StopParams, TokenLogprobs

LOGPROB_FLOOR = -1e4
"""Log-probabilities of impossible tokens are reported as this: a finite number serialises."""

_TOP_P_CANDIDATES = 1024
_DRAW_BITS = 53


class SequenceSampler:
    """What drawing needs to know of one request: its parameters, and which tokens it holds."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop: StopParams,
        prompt_token_ids: Iterable[int],
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        """Start before the first output token.

        Args:
            sampling: validated parameters.
            stop: for the tokens that may not come before ``min_tokens``.
            prompt_token_ids: the repetition penalty counts them as seen.
            eos_token_ids: the model's end-of-sequence tokens.
            vocab_size: ids from here on are never drawn, however wide the logits are.
        """
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.index = 0
        """Output position of the next token."""
        self._min_tokens = stop.min_tokens
        ending = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(eos_token_ids))
        self._ending = sorted(token_id for token_id in ending if token_id < vocab_size)
        self._counts: dict[int, int] = {}
        self._seen = set(prompt_token_ids) if sampling.repetition_penalty != 1.0 else set()

    def observe(self, token_id: int) -> None:
        """A token was emitted at `index`."""
        self.index += 1
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self.sampling.repetition_penalty != 1.0:
            self._seen.add(token_id)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.sampling.temperature == 0.0

    def adjust(self, logits: Tensor) -> None:
        """Apply bias and penalties to this request's logits ``[vocab_size]``, in place."""
        params = self.sampling
        if params.logit_bias:
            token_ids, amounts = zip(*params.logit_bias, strict=True)
            logits[list(token_ids)] += torch.tensor(amounts, dtype=logits.dtype)
        if self._seen:
            seen = torch.tensor(sorted(self._seen))
            values, penalty = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
            emitted = torch.tensor(list(self._counts))
            logits[emitted] -= params.presence_penalty + params.frequency_penalty * counts

    @property
    def banned(self) -> list[int]:
        """Tokens that would end the output too early."""
        return self._ending if self.index < self._min_tokens else []

    def uniform(self) -> float:
        """This position's number in [0, 1): Philox 4x64 with the seed as key, `index` as counter.

        "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
        """
        generator = np.random.Philox(key=self.sampling.seed, counter=self.index)
        return (int(generator.random_raw()) >> (64 - _DRAW_BITS)) / 2.0**_DRAW_BITS


def sample(logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Draw the next token of each row. Changes neither its inputs nor the sequences.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        sequences: one per row.

    Returns:
        One token per row, with log-probabilities where they were asked for.

    Raises:
        WorkerError: the model gave a NaN, or nothing but impossible tokens.
    """
    plain = all(_is_plain(sequence) for sequence in sequences)
    width = min(sequence.vocab_size for sequence in sequences)
    if plain and all(s.vocab_size == width for s in sequences):
        best, token_ids = logits[:, :width].max(dim=-1)
        _check_finite(best)
        return [SampledToken(token_id=token_id) for token_id in token_ids.tolist()]
    return [_sample_row(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]


def _is_plain(sequence: SequenceSampler) -> bool:
    """Greedy with nothing to adjust or report: one argmax serves all such rows."""
    params = sequence.sampling
    return (
        sequence.is_greedy
        and not (params.logit_bias or params.logprobs or params.top_logprobs)
        and not (params.presence_penalty or params.frequency_penalty)
        and params.repetition_penalty == 1.0
        and not sequence.banned
    )


def _check_finite(best: Tensor) -> None:
    if not bool(torch.isfinite(best).all()):
        raise WorkerError("sampler", "the model's logits hold NaN or nothing but infinities")


def _sample_row(row: Tensor, sequence: SequenceSampler) -> SampledToken:
    logits = row[: sequence.vocab_size].clone()
    sequence.adjust(logits)
    _check_finite(logits.max())
    reported = logits
    if sequence.banned:
        reported = logits.clone()
        logits[sequence.banned] = -math.inf
        _check_finite(logits.max())
    token_id = int(logits.argmax()) if sequence.is_greedy else _draw(logits, sequence)
    params = sequence.sampling
    if not (params.logprobs or params.top_logprobs):
        return SampledToken(token_id=token_id)
    return SampledToken(
        token_id=token_id, logprobs=_logprobs(reported, token_id, params.top_logprobs)
    )


def _logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.double(), dim=-1).clamp_(min=LOGPROB_FLOOR)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=top)


def _draw(logits: Tensor, sequence: SequenceSampler) -> int:
    params = sequence.sampling
    # The maximum becomes 0 before the division: no temperature can make it overflow.
    scaled = (logits.double() - logits.max()) / params.temperature
    weights, token_ids = scaled.exp(), None
    if 0 < params.top_k < len(weights):
        token_ids = _most_likely(weights, params.top_k)
        weights = weights[token_ids]
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        weights, token_ids = weights[kept], kept if token_ids is None else token_ids[kept]
    if params.min_p > 0.0:
        weights = torch.where(weights >= params.min_p * weights.max(), weights, 0.0)
    cumulative = weights.cumsum(0)
    target = sequence.uniform() * cumulative[-1]
    # right=True: a token without weight spans nothing and is never hit
    place = int(torch.searchsorted(cumulative, target, right=True))
    place = min(place, int(weights.nonzero()[-1]))
    return place if token_ids is None else int(token_ids[place])


def _most_likely(weights: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest weights, largest first; of equal ones the lower id."""
    bound = weights.topk(count).values[-1]
    candidates = (weights >= bound).nonzero().flatten()  # ascending ids
    order = weights[candidates].argsort(descending=True, stable=True)
    return candidates[order][:count]


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Ids of the fewest largest weights that sum to ``top_p`` of all; at least one.

    "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
    """
    wanted = top_p * float(weights.sum())
    count = min(_TOP_P_CANDIDATES, len(weights))
    while True:
        token_ids = _most_likely(weights, count)
        cumulative = weights[token_ids].cumsum(0)
        if count == len(weights) or float(cumulative[-1]) >= wanted:
            break
        count = min(8 * count, len(weights))
    reached = int(torch.searchsorted(cumulative, wanted))
    return token_ids[: reached + 1]
