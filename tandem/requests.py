"""A request as the cluster carries it, after the router has validated and tokenized it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""The caller's name for a request; unique among the requests alive in one router."""

Room = NewType("Room", int)
"""One attempt of one request: a random non-zero 63-bit number, never used twice."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is drawn. All values are validated at the router."""

    temperature: float = 1.0
    """0 picks the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides logits of tokens seen in prompt or output, or multiplies negative ones.

    arXiv:1909.05858, section 4.1.
    """
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from logits of tokens seen in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, amount added to its logit), ids distinct."""
    seed: int = 0
    """Key of the counter-based generator; the router draws one when the caller gives none."""
    logprobs: bool = False
    """Return the log-probability of each chosen token."""
    top_logprobs: int = 0
    """Return this many most likely tokens with their log-probabilities at each position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopParams:
    """When generation ends."""

    max_tokens: int
    """Tokens to generate at most, the handed-over first token included; at least 1."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be chosen before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end generation; they are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation; the token is in token_ids, not in the text."""
    ignore_eos: bool = False
    """Treat the model's end-of-sequence tokens like any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """What both workers are told about a request."""

    request_id: RequestId
    room: Room
    token_ids: tuple[int, ...]
    """The prompt; never empty, every id below the vocabulary's size."""
    sampling: SamplingParams
    stop: StopParams

    @property
    def max_total_tokens(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.token_ids) + self.stop.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position; all values finite."""

    logprob: float
    """Of the chosen token: after penalties and bias, before temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What prefill tells decode with the last K/V frame of a request."""

    first_token: SampledToken
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose K and V came from prefill's prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputChunk:
    """Consecutive output tokens of one request, as delivered to the caller."""

    index: int
    """Position of the first of ``token_ids`` in the output."""
    token_ids: tuple[int, ...]
    text: str
    """Text that became final with these tokens; all chunks' texts joined are the whole text."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for, else empty."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt in exactly one of its three forms."""

    text: str | None = None
    messages: tuple[Message, ...] = field(default=())
    token_ids: tuple[int, ...] = ()
