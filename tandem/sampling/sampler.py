"""Drawing the next token: a pure function of logits, parameters, seed and position.

In this order: bias, penalties, [log-probabilities are taken here], minimum length, temperature,
top_k, top_p, min_p, draw. Rows of a batch never influence one another.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from tandem.errors import WorkerError
from tandem.requests import SampledToken, SamplingParams, StopParams, TokenLogprobs
from tandem.sampling.draw import DrawRule, draw, most_likely, select_rows
from tandem.sampling.noise import position_state

LOGPROB_FLOOR = -1e4
"""Log-probabilities of impossible tokens are reported as this: a finite number serialises."""


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
        self.bias = tuple(it for it in sampling.logit_bias if 0 <= it[0] < vocab_size)
        """(token id, amount) of what can be drawn."""
        self.seen_ids = array("q")
        """Distinct tokens that penalties apply to; empty when there are no penalties."""
        self.seen_counts = array("q")
        """How often each of ``seen_ids`` was emitted; 0 for tokens of the prompt alone."""
        self._places: dict[int, int] = {}
        self._min_tokens = stop.min_tokens
        ending = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(eos_token_ids))
        self._ending = sorted(token_id for token_id in ending if 0 <= token_id < vocab_size)
        repeats = sampling.repetition_penalty != 1.0
        self._counts = repeats or bool(sampling.presence_penalty or sampling.frequency_penalty)
        if repeats:
            for token_id in prompt_token_ids:
                if 0 <= token_id < vocab_size:
                    self._see(token_id, 0)

    def observe(self, token_id: int) -> None:
        """A token was emitted at `index`."""
        self.index += 1
        if self._counts:
            self._see(token_id, 1)

    @property
    def banned(self) -> Sequence[int]:
        """Tokens that would end the output before ``min_tokens``."""
        return self._ending if self.index < self._min_tokens else ()

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the one with the largest logit, and nothing is reported."""
        adjusted = self.bias or self.seen_ids or self.banned
        return self.sampling.temperature == 0.0 and not (self.reports or adjusted)

    def rule(self) -> DrawRule:
        """How the next token is drawn; for temperatures above 0."""
        params = self.sampling
        return DrawRule(
            temperature=params.temperature,
            top_k=params.top_k if 0 < params.top_k < self.vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            state=position_state(params.seed, self.index),
        )

    def _see(self, token_id: int, emitted: int) -> None:
        if token_id >= self.vocab_size:  # a prompt may hold ids that are never drawn
            return
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self.seen_ids):
            self.seen_ids.append(token_id)
            self.seen_counts.append(0)
        self.seen_counts[place] += emitted


def sample(logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Draw the next token of each row. Changes neither its inputs nor the sequences.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        sequences: one per row, all of one vocabulary.

    Returns:
        One token per row, with log-probabilities where they were asked for.

    Raises:
        WorkerError: a row's largest logit is NaN or infinite, so the model's arithmetic failed.
    """
    if not sequences:
        return []
    logits = logits[:, : sequences[0].vocab_size]
    assert len(logits) == len(sequences)
    assert all(sequence.vocab_size == sequences[0].vocab_size for sequence in sequences)
    _check_finite(logits.amax(dim=1))
    special = [row for row, sequence in enumerate(sequences) if not sequence.is_plain]
    if not special:
        return [SampledToken(token_id=token_id) for token_id in logits.argmax(dim=1).tolist()]
    tokens = iter(_choose(logits[special], [sequences[row] for row in special]))
    if len(special) == len(sequences):
        return list(tokens)
    best_ids: list[int] = logits.argmax(dim=1).tolist()
    return [
        SampledToken(token_id=best_id) if sequence.is_plain else next(tokens)
        for best_id, sequence in zip(best_ids, sequences, strict=True)
    ]


def _check_finite(best: Tensor) -> None:
    bad = (~best.isfinite()).nonzero().flatten().tolist()
    if bad:
        values = ", ".join(f"row {row}: {float(best[row])}" for row in bad[:4])
        raise WorkerError(
            "sampler", f"the largest logits of {len(bad)} rows are not numbers ({values})"
        )


def _choose(logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[SampledToken]:
    """As `sample`, for rows that take more than an argmax; overwrites ``logits``."""
    _add_bias(logits, sequences)
    _penalise(logits, sequences)
    reporting = [row for row, it in enumerate(sequences) if it.reports]
    reported = logits[reporting] if reporting else None
    _ban(logits, sequences)
    token_ids = _token_ids(logits, sequences)
    tokens = [SampledToken(token_id=token_id) for token_id in token_ids]
    if reported is not None:
        counts = [sequences[row].sampling.top_logprobs for row in reporting]
        entries = _logprobs(reported, [token_ids[row] for row in reporting], counts)
        for row, entry in zip(reporting, entries, strict=True):
            tokens[row] = SampledToken(token_id=token_ids[row], logprobs=entry)
    return tokens


def _token_ids(logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[int]:
    hot = [row for row, it in enumerate(sequences) if it.sampling.temperature > 0.0]
    if len(hot) < len(sequences):
        token_ids: list[int] = logits.argmax(dim=1).tolist()
    else:
        token_ids = [0] * len(sequences)
    if hot:
        drawn = draw(select_rows(logits, hot), [sequences[row].rule() for row in hot])
        for row, token_id in zip(hot, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


class _Entries:
    """Places in logits ``[rows, vocabulary]``: some token ids of each row, in one flat list."""

    def __init__(self, logits: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        flat = array("q")
        for ids in token_ids:
            flat.extend(ids)
        lengths = torch.tensor([len(ids) for ids in token_ids])
        rows = torch.repeat_interleave(torch.arange(len(token_ids)), lengths)
        places = torch.tensor(flat, dtype=torch.int64) + rows * logits.shape[1]
        self.rows = rows.to(logits.device)
        self._places = places.to(logits.device)
        self._flat = logits.view(-1)

    def get(self) -> Tensor:
        """The logits there."""
        return self._flat[self._places]

    def put(self, values: Tensor) -> None:
        """Overwrite the logits there."""
        self._flat[self._places] = values

    def per_row(self, values: Iterable[float]) -> Tensor:
        """One value of each row, at each of its places."""
        return torch.tensor(list(values), dtype=self._flat.dtype, device=self.rows.device)[
            self.rows
        ]


def _add_bias(logits: Tensor, sequences: Sequence[SequenceSampler]) -> None:
    if not any(sequence.bias for sequence in sequences):
        return
    entries = _Entries(logits, [[token_id for token_id, _ in it.bias] for it in sequences])
    amounts = [amount for sequence in sequences for _, amount in sequence.bias]
    entries.put(entries.get() + torch.tensor(amounts, dtype=logits.dtype, device=logits.device))


def _penalise(logits: Tensor, sequences: Sequence[SequenceSampler]) -> None:
    """Repetition as in arXiv:1909.05858 section 4.1, with its sign fixed for negative logits."""
    if not any(sequence.seen_ids for sequence in sequences):
        return
    entries = _Entries(logits, [sequence.seen_ids for sequence in sequences])
    flat = array("q")
    for sequence in sequences:
        flat.extend(sequence.seen_counts)
    counts = torch.tensor(flat, dtype=logits.dtype, device=logits.device)
    params = [sequence.sampling for sequence in sequences]
    repetition = entries.per_row(it.repetition_penalty for it in params)
    presence = entries.per_row(it.presence_penalty for it in params)
    frequency = entries.per_row(it.frequency_penalty for it in params)
    values = entries.get()
    values = torch.where(values > 0, values / repetition, values * repetition)
    entries.put(values - (presence * (counts > 0) + frequency * counts))


def _ban(logits: Tensor, sequences: Sequence[SequenceSampler]) -> None:
    """Make tokens that would end a row's output too early impossible.

    Where that leaves nothing, the row stays as it is: its stop tokens are the whole vocabulary, and
    `OutputStream` lets them pass while it is too early to end.
    """
    if not any(sequence.banned for sequence in sequences):
        return
    entries = _Entries(logits, [sequence.banned for sequence in sequences])
    values = entries.get()
    impossible = torch.full_like(values, -torch.inf)
    entries.put(impossible)
    nothing_left = logits.amax(dim=1).isinf()[entries.rows]
    entries.put(torch.where(nothing_left, values, impossible))


def _logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen token and of the ``counts`` best tokens of each row."""
    logprobs = logits.to(torch.float64).log_softmax(dim=1).clamp_(min=LOGPROB_FLOOR)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    top_ids = most_likely(logits, min(max(counts), logits.shape[1]))
    tops = zip(top_ids.tolist(), logprobs.gather(1, top_ids).tolist(), strict=True)
    return [
        TokenLogprobs(logprob=logprob, top=tuple(zip(ids, values, strict=True))[:count])
        for logprob, (ids, values), count in zip(
            chosen.flatten().tolist(), tops, counts, strict=True
        )
    ]
