"""The public request, checked field by field before any work is done for it.

`check` needs nothing but the request and the rules; `complete` needs the prompt's tokens. Each
error names the field by its path in the proto and says what would be right.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from router.policy import Pools
from tandem.config.tree import LimitsConfig
from tandem.errors import RequestError, RequestTooLong
from tandem.pb import generate_pb2
from tandem.requests import (
    GenerateRequest,
    Message,
    Prompt,
    RequestId,
    Room,
    SamplingParams,
    StopParams,
)

MAX_PENALTY = 2.0
"""Bound of presence and frequency penalties on both sides of 0."""
REPETITION_PENALTY_RANGE = (0.009999999776482582, 100.0)
"""From 0.01, as a 32-bit float holds it."""
MAX_BIAS = 100.0
"""Bound of a logit bias on both sides of 0."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
_MAX_ROLE_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What requests for the served model may ask for."""

    model: str
    """The only name that `model` may have."""
    vocab_size: int
    """Token ids are below this."""
    max_context_tokens: int
    """Prompt and output together."""
    has_chat_template: bool
    limits: LimitsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A request in which everything is right that can be told without tokenizing."""

    request_id: RequestId
    prompt: Prompt
    prompt_field: str
    prompt_bytes: int
    """Of text to tokenize."""
    sampling: SamplingParams
    max_tokens: int | None
    """None takes what fits, up to the server's default."""
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


def new_room() -> Room:
    """A name for one attempt of one request."""
    return Room(secrets.randbelow(2**63 - 1) + 1)


def check(message: generate_pb2.GenerateRequest, rules: Rules) -> Checked:
    """Check everything but the prompt's length in tokens.

    Raises:
        RequestError: a field is wrong.
    """
    if message.HasField("model") and message.model not in ("", rules.model):
        raise RequestError("model", f"is {_short(message.model)!r}; served is {rules.model!r}")
    request_id = _request_id(message.request_id)
    prompt, prompt_bytes = _prompt(message, rules)
    stopping = message.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise RequestError("stopping.max_tokens", f"is {max_tokens}; ask for at least 1")
    return Checked(
        request_id=request_id,
        prompt=prompt,
        prompt_field=message.WhichOneof("prompt") or "prompt",
        prompt_bytes=prompt_bytes,
        sampling=_sampling(message.sampling, rules),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(stopping, max_tokens),
        stop=_stop_strings(stopping, rules.limits),
        stop_token_ids=_stop_token_ids(stopping, rules),
        ignore_eos=stopping.ignore_eos,
    )


def complete(
    checked: Checked, token_ids: Sequence[int], rules: Rules, pools: Pools | None
) -> GenerateRequest:
    """Check the lengths, settle how many tokens are generated, and draw a room.

    Args:
        checked: the rest of the request.
        token_ids: the prompt.
        rules: bounds of the model and the server.
        pools: what workers can hold; None while it is not known.

    Raises:
        RequestTooLong: it fits neither now nor later.
        RequestError: the prompt is empty or min_tokens is more than can be generated.
    """
    if not token_ids:
        raise RequestError(checked.prompt_field, "gives no tokens; send a prompt that does")
    count = len(token_ids)
    _check_prompt_length(checked.prompt_field, count, rules, pools)
    if pools is not None and count >= min(pools.prefill_tokens, pools.decode_tokens):
        raise RequestTooLong(
            checked.prompt_field,
            f"has {count} tokens; the K/V pools hold {pools.prefill_tokens} (prefill) and "
            f"{pools.decode_tokens} (decode), one of them for output (the context is "
            f"{rules.max_context_tokens}); send a shorter prompt",
        )
    max_tokens = _max_tokens(checked, count, rules, pools)
    if checked.min_tokens > max_tokens:
        raise RequestError(
            "stopping.min_tokens",
            f"is {checked.min_tokens}, above the {max_tokens} tokens that can be generated",
        )
    return GenerateRequest(
        request_id=checked.request_id,
        room=new_room(),
        token_ids=tuple(token_ids),
        sampling=checked.sampling,
        stop=StopParams(
            max_tokens=max_tokens,
            min_tokens=checked.min_tokens,
            stop=checked.stop,
            stop_token_ids=checked.stop_token_ids,
            ignore_eos=checked.ignore_eos,
        ),
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _request_id(given: str) -> RequestId:
    if not given:
        return RequestId(secrets.token_hex(16))
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            "request_id",
            f"is {_short(given)!r}; use 1 to 128 letters, digits and . _ : / @ + = - "
            "or leave it out",
        )
    return RequestId(given)


def _prompt(message: generate_pb2.GenerateRequest, rules: Rules) -> tuple[Prompt, int]:
    """The prompt and the bytes of it that have to be tokenized."""
    match message.WhichOneof("prompt"):
        case "text":
            return _text_prompt(message.text, rules.limits)
        case "chat":
            return _chat_prompt(message.chat, rules)
        case "token_ids":
            return _token_prompt(message.token_ids, rules), 0
        case _:
            raise RequestError("prompt", "is missing; set one of text, chat and token_ids")


def _text_prompt(text: str, limits: LimitsConfig) -> tuple[Prompt, int]:
    if not text:
        raise RequestError("text", "is empty; send at least one character")
    num_bytes = len(text.encode())
    _check_bytes("text", num_bytes, limits)
    return Prompt(text=text), num_bytes


def _chat_prompt(chat: generate_pb2.ChatMessages, rules: Rules) -> tuple[Prompt, int]:
    if not rules.has_chat_template:
        raise RequestError("chat", "the model has no chat template; send text or token_ids")
    if not chat.messages:
        raise RequestError("chat.messages", "is empty; send at least one message")
    num_bytes = chat.ByteSize()  # counts a little for each message, so that it bounds them too
    _check_bytes("chat.messages", num_bytes, rules.limits)
    for index, turn in enumerate(chat.messages):
        if not 0 < len(turn.role.encode()) <= _MAX_ROLE_BYTES:
            raise RequestError(
                f"chat.messages[{index}].role",
                f"is {_short(turn.role)!r}; name who speaks, as in user, in at most "
                f"{_MAX_ROLE_BYTES} bytes",
            )
    turns = tuple(Message(role=turn.role, content=turn.content) for turn in chat.messages)
    return Prompt(messages=turns), num_bytes


def _check_bytes(field: str, num_bytes: int, limits: LimitsConfig) -> None:
    if num_bytes > limits.max_text_bytes:
        raise RequestTooLong(
            field,
            f"has {num_bytes} bytes; at most {limits.max_text_bytes} are taken "
            "(limits.max_text_bytes)",
        )


def _token_prompt(token_ids: generate_pb2.TokenIds, rules: Rules) -> Prompt:
    if not token_ids.ids:
        raise RequestError("token_ids.ids", "is empty; send at least one token id")
    _check_prompt_length("token_ids.ids", len(token_ids.ids), rules, None)
    for index, token_id in enumerate(token_ids.ids):
        if token_id >= rules.vocab_size:
            raise _outside_vocabulary(f"token_ids.ids[{index}]", token_id, rules)
    return Prompt(token_ids=tuple(token_ids.ids))


def _check_prompt_length(field: str, count: int, rules: Rules, pools: Pools | None) -> None:
    if count < rules.max_context_tokens:
        return
    held = ""
    if pools is not None:
        held = (
            f", the K/V pools hold {pools.prefill_tokens} (prefill) and {pools.decode_tokens} "
            "(decode)"
        )
    raise RequestTooLong(
        field,
        f"has {count} tokens; the context is {rules.max_context_tokens}, one of them for output"
        f"{held}; send a shorter prompt",
    )


def _outside_vocabulary(field: str, token_id: int, rules: Rules) -> RequestError:
    return RequestError(
        field, f"is {token_id}; the vocabulary's ids go from 0 to {rules.vocab_size - 1}"
    )


def _max_tokens(checked: Checked, count: int, rules: Rules, pools: Pools | None) -> int:
    room = rules.max_context_tokens - count
    pool_room = room if pools is None else pools.decode_tokens - count
    if checked.max_tokens is None:
        wanted = max(rules.limits.default_max_tokens, checked.min_tokens)
        return min(wanted, room, pool_room)
    total = count + checked.max_tokens
    if checked.max_tokens > room:
        raise RequestTooLong(
            "stopping.max_tokens",
            f"is {checked.max_tokens}; with the prompt's {count} tokens that makes {total}, more "
            f"than the context of {rules.max_context_tokens}; ask for at most {room}",
        )
    if pools is not None and checked.max_tokens > pool_room:
        raise RequestTooLong(
            "stopping.max_tokens",
            f"is {checked.max_tokens}; with the prompt's {count} tokens that makes {total}, more "
            f"than the {pools.decode_tokens} that the K/V pool of a decode worker holds; ask for "
            f"at most {pool_room}",
        )
    return checked.max_tokens


def _min_tokens(stopping: generate_pb2.StopParams, max_tokens: int | None) -> int:
    min_tokens = stopping.min_tokens
    if min_tokens < 0:
        raise RequestError("stopping.min_tokens", f"is {min_tokens}; 0 is the least")
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            "stopping.min_tokens", f"is {min_tokens}, above stopping.max_tokens ({max_tokens})"
        )
    return min_tokens


def _stop_strings(stopping: generate_pb2.StopParams, limits: LimitsConfig) -> tuple[str, ...]:
    if len(stopping.stop) > limits.max_stop_strings:
        raise RequestError(
            "stopping.stop",
            f"has {len(stopping.stop)} strings; at most {limits.max_stop_strings} are taken",
        )
    for index, string in enumerate(stopping.stop):
        num_bytes = len(string.encode())
        if not 0 < num_bytes <= limits.max_stop_bytes:
            raise RequestError(
                f"stopping.stop[{index}]",
                f"has {num_bytes} bytes; 1 to {limits.max_stop_bytes} are taken",
            )
    return tuple(dict.fromkeys(stopping.stop))


def _stop_token_ids(stopping: generate_pb2.StopParams, rules: Rules) -> tuple[int, ...]:
    limit = rules.limits.max_stop_token_ids
    if len(stopping.stop_token_ids) > limit:
        raise RequestError(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids)} ids; at most {limit} are taken",
        )
    for index, token_id in enumerate(stopping.stop_token_ids):
        if not 0 <= token_id < rules.vocab_size:
            raise _outside_vocabulary(f"stopping.stop_token_ids[{index}]", token_id, rules)
    return tuple(dict.fromkeys(stopping.stop_token_ids))


def _sampling(message: generate_pb2.SamplingParams, rules: Rules) -> SamplingParams:
    number = _Numbers(message)
    top_k = message.top_k
    if top_k < -1:
        raise RequestError("sampling.top_k", f"is {top_k}; -1 and 0 keep all tokens")
    limit = rules.limits.max_top_logprobs
    if message.top_logprobs > limit:
        raise RequestError(
            "sampling.top_logprobs", f"is {message.top_logprobs}; at most {limit} are given"
        )
    return SamplingParams(
        temperature=number.at_least("temperature", 1.0, 0.0),
        top_k=min(max(top_k, 0), rules.vocab_size),
        top_p=number.above("top_p", 1.0, 0.0, 1.0),
        min_p=number.between("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number.between("repetition_penalty", 1.0, *REPETITION_PENALTY_RANGE),
        presence_penalty=number.between("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=number.between("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message, rules),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        logprobs=message.logprobs or message.top_logprobs > 0,
        top_logprobs=min(message.top_logprobs, rules.vocab_size),
    )


def _logit_bias(
    message: generate_pb2.SamplingParams, rules: Rules
) -> tuple[tuple[int, float], ...]:
    limit = rules.limits.max_logit_bias
    if len(message.logit_bias) > limit:
        raise RequestError(
            "sampling.logit_bias",
            f"has {len(message.logit_bias)} entries; at most {limit} are taken",
        )
    for token_id, amount in message.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < rules.vocab_size:
            raise _outside_vocabulary(field, token_id, rules)
        if not -MAX_BIAS <= amount <= MAX_BIAS:
            raise RequestError(
                field, f"is {amount:g}; amounts are from -{MAX_BIAS:g} to {MAX_BIAS:g}"
            )
    return tuple(sorted(message.logit_bias.items()))


class _Numbers:
    """Optional float fields of the sampling parameters; NaN is outside every range."""

    def __init__(self, message: generate_pb2.SamplingParams) -> None:
        self._message = message

    def at_least(self, name: str, default: float, low: float) -> float:
        value = self._value(name, default)
        if not low <= value < math.inf:
            raise RequestError(f"sampling.{name}", f"is {value:g}; it is finite, {low:g} or above")
        return value

    def above(self, name: str, default: float, low: float, high: float) -> float:
        value = self._value(name, default)
        if not low < value <= high:
            raise RequestError(
                f"sampling.{name}", f"is {value:g}; it is above {low:g} and at most {high:g}"
            )
        return value

    def between(self, name: str, default: float, low: float, high: float) -> float:
        value = self._value(name, default)
        if not low <= value <= high:
            raise RequestError(f"sampling.{name}", f"is {value:g}; it is from {low:g} to {high:g}")
        return value

    def _value(self, name: str, default: float) -> float:
        return float(getattr(self._message, name)) if self._message.HasField(name) else default
