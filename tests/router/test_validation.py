"""Every field of the public request, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from router.policy import Pools
from router.validation import Rules, check, complete
from tandem.config.tree import LimitsConfig
from tandem.errors import RequestError, RequestTooLong
from tandem.pb import generate_pb2
from tandem.requests import GenerateRequest, SamplingParams

RULES = Rules(
    model="tiny",
    vocab_size=260,
    max_context_tokens=100,
    has_chat_template=True,
    limits=LimitsConfig(
        default_max_tokens=20,
        max_text_bytes=50,
        max_stop_strings=2,
        max_stop_bytes=8,
        max_stop_token_ids=2,
        max_logit_bias=2,
        max_top_logprobs=5,
    ),
)
POOLS = Pools(prefill_tokens=64, decode_tokens=48)


def message(**fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**{"text": "hello", **fields})  # type: ignore[arg-type]


def sampling(**fields: object) -> generate_pb2.GenerateRequest:
    return message(sampling=generate_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def stopping(**fields: object) -> generate_pb2.GenerateRequest:
    return message(stopping=generate_pb2.StopParams(**fields))  # type: ignore[arg-type]


def tokens(*ids: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=ids))


def chat(*turns: tuple[str, str]) -> generate_pb2.GenerateRequest:
    messages = [generate_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return generate_pb2.GenerateRequest(chat=generate_pb2.ChatMessages(messages=messages))


def serve(
    request: generate_pb2.GenerateRequest, prompt_tokens: int = 5, pools: Pools | None = POOLS
) -> GenerateRequest:
    return complete(check(request, RULES), range(prompt_tokens), RULES, pools)


NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generate_pb2.GenerateRequest(), "prompt"),
        (message(text=""), "text"),
        (message(text="x" * 51), "text"),
        (message(text="é" * 26), "text"),
        (chat(), "chat.messages"),
        (chat(("user", "x" * 50)), "chat.messages"),
        (chat(("user", "hi"), ("", "there")), "chat.messages[1].role"),
        (tokens(), "token_ids.ids"),
        (tokens(1, 260), "token_ids.ids[1]"),
        (tokens(2**32 - 1), "token_ids.ids[0]"),
        (tokens(*[1] * 100), "token_ids.ids"),
        (message(model="gpt"), "model"),
        (message(request_id="x" * 129), "request_id"),
        (message(request_id="a b"), "request_id"),
        (message(request_id="a\nb"), "request_id"),
        (message(request_id="\u00e9"), "request_id"),
        (sampling(temperature=-0.1), "sampling.temperature"),
        (sampling(temperature=NAN), "sampling.temperature"),
        (sampling(temperature=INF), "sampling.temperature"),
        (sampling(top_k=-2), "sampling.top_k"),
        (sampling(top_p=0.0), "sampling.top_p"),
        (sampling(top_p=2.0), "sampling.top_p"),
        (sampling(top_p=-1.0), "sampling.top_p"),
        (sampling(top_p=NAN), "sampling.top_p"),
        (sampling(min_p=2.0), "sampling.min_p"),
        (sampling(min_p=-0.5), "sampling.min_p"),
        (sampling(min_p=NAN), "sampling.min_p"),
        (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=INF), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
        (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
        (sampling(presence_penalty=-2.5), "sampling.presence_penalty"),
        (sampling(presence_penalty=NAN), "sampling.presence_penalty"),
        (sampling(frequency_penalty=2.5), "sampling.frequency_penalty"),
        (sampling(frequency_penalty=NAN), "sampling.frequency_penalty"),
        (sampling(logit_bias={260: 1.0}), "sampling.logit_bias[260]"),
        (sampling(logit_bias={-1: 1.0}), "sampling.logit_bias[-1]"),
        (sampling(logit_bias={2**40: 1.0}), f"sampling.logit_bias[{2**40}]"),
        (sampling(logit_bias={1: NAN}), "sampling.logit_bias[1]"),
        (sampling(logit_bias={1: INF}), "sampling.logit_bias[1]"),
        (sampling(logit_bias={1: 100.5}), "sampling.logit_bias[1]"),
        (sampling(logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), "sampling.logit_bias"),
        (sampling(top_logprobs=6), "sampling.top_logprobs"),
        (sampling(top_logprobs=1_000_000), "sampling.top_logprobs"),
        (stopping(max_tokens=0), "stopping.max_tokens"),
        (stopping(max_tokens=-1), "stopping.max_tokens"),
        (stopping(max_tokens=2**31 - 1), "stopping.max_tokens"),
        (stopping(max_tokens=2**63 - 1), "stopping.max_tokens"),
        (stopping(min_tokens=-1), "stopping.min_tokens"),
        (stopping(min_tokens=4, max_tokens=3), "stopping.min_tokens"),
        (stopping(min_tokens=1_000_000), "stopping.min_tokens"),
        (stopping(stop=["a", "b", "c"]), "stopping.stop"),
        (stopping(stop=["a", ""]), "stopping.stop[1]"),
        (stopping(stop=["x" * 9]), "stopping.stop[0]"),
        (stopping(stop_token_ids=[1, 2, 3]), "stopping.stop_token_ids"),
        (stopping(stop_token_ids=[1, 260]), "stopping.stop_token_ids[1]"),
        (stopping(stop_token_ids=[-1]), "stopping.stop_token_ids[0]"),
    ],
)
def test_each_wrong_field_is_named(request_: generate_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        serve(request_)
    assert caught.value.field == field
    assert len(caught.value.problem) < 300


def test_chat_needs_a_template() -> None:
    rules = Rules(
        model="tiny",
        vocab_size=260,
        max_context_tokens=100,
        has_chat_template=False,
        limits=LimitsConfig(),
    )
    with pytest.raises(RequestError, match="no chat template"):
        check(chat(("user", "hi")), rules)


def test_a_prompt_without_tokens_is_refused_by_its_form() -> None:
    with pytest.raises(RequestError) as caught:
        serve(message(), prompt_tokens=0)
    assert caught.value.field == "text"


def test_defaults() -> None:
    request = serve(message())
    assert (request.stop.max_tokens, request.stop.min_tokens) == (20, 0)
    assert not request.stop.stop
    assert not request.stop.stop_token_ids
    assert not request.stop.ignore_eos
    assert request.sampling == SamplingParams(seed=request.sampling.seed)
    assert 0 <= request.sampling.seed < 2**63
    assert serve(message()).sampling.seed != request.sampling.seed
    assert 0 < request.room < 2**63
    assert serve(message()).room != request.room
    assert len(request.request_id) == 32


def test_an_empty_id_or_model_is_as_good_as_none() -> None:
    first, second = (serve(message(request_id="", model="")) for _ in range(2))
    assert first.request_id
    assert first.request_id != second.request_id
    assert serve(message(request_id="mine", model="tiny")).request_id == "mine"


def test_everything_that_is_said_is_taken() -> None:
    request = serve(
        message(
            sampling=generate_pb2.SamplingParams(
                temperature=0.0,
                top_k=1000,
                top_p=1.0,
                min_p=1.0,
                repetition_penalty=0.01,
                presence_penalty=-2.0,
                frequency_penalty=2.0,
                logit_bias={259: -100.0, 3: 100.0},
                seed=0,
                top_logprobs=5,
            ),
            stopping=generate_pb2.StopParams(
                max_tokens=7,
                min_tokens=7,
                stop=["a", "b", "a"][:2],
                stop_token_ids=[4, 4],
                ignore_eos=True,
            ),
        )
    )
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 260)
    assert request.sampling.logit_bias == ((3, 100.0), (259, -100.0))
    assert (request.sampling.seed, request.sampling.logprobs) == (0, True)
    assert (request.stop.max_tokens, request.stop.min_tokens) == (7, 7)
    assert (request.stop.stop, request.stop.stop_token_ids) == (("a", "b"), (4,))
    assert request.stop.ignore_eos


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_spellings_keep_all_tokens(top_k: int) -> None:
    assert serve(sampling(top_k=top_k)).sampling.top_k == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4, 1.0, 100.0])
@pytest.mark.parametrize("top_p", [1e-4, 1.0])
def test_extreme_values_are_valid(temperature: float, top_p: float) -> None:
    serve(sampling(temperature=temperature, top_p=top_p, top_k=261, min_p=1.0))


@pytest.mark.parametrize(
    ("prompt_tokens", "pools", "max_tokens"),
    [
        (5, None, 20),
        (90, None, 10),
        (99, None, 1),
        (40, POOLS, 8),
        (47, POOLS, 1),
    ],
)
def test_without_max_tokens_the_answer_takes_what_fits(
    prompt_tokens: int, pools: Pools | None, max_tokens: int
) -> None:
    assert serve(message(), prompt_tokens, pools).stop.max_tokens == max_tokens


def test_min_tokens_lifts_the_default() -> None:
    assert serve(stopping(min_tokens=30)).stop.max_tokens == 30


def refused(call: Callable[[], object]) -> RequestTooLong:
    with pytest.raises(RequestTooLong) as caught:
        call()
    return caught.value


def test_prompt_and_max_tokens_may_fill_the_context_and_no_more() -> None:
    assert serve(stopping(max_tokens=60), 40, None).max_total_tokens == 100
    error = refused(lambda: serve(stopping(max_tokens=61), 40, None))
    for number in ("61", "40", "101", "100", "at most 60"):
        assert number in error.problem


def test_a_prompt_over_the_context_names_both_lengths() -> None:
    error = refused(lambda: serve(message(), 100, POOLS))
    for number in ("100 tokens", "context is 100", "64", "48"):
        assert number in error.problem


@pytest.mark.parametrize(
    "pools",
    [Pools(prefill_tokens=32, decode_tokens=96), Pools(prefill_tokens=96, decode_tokens=32)],
)
def test_a_prompt_over_a_pool_names_both_pools(pools: Pools) -> None:
    assert serve(message(), 31, pools).stop.max_tokens == min(20, pools.decode_tokens - 31)
    error = refused(lambda: serve(message(), 32, pools))
    for number in ("32 tokens", "96", "context is 100"):
        assert number in error.problem


def test_output_over_decode_s_pool_names_the_pool() -> None:
    assert serve(stopping(max_tokens=8), 40, POOLS).max_total_tokens == 48
    error = refused(lambda: serve(stopping(max_tokens=9), 40, POOLS))
    assert error.field == "stopping.max_tokens"
    for number in ("9", "40", "49", "48", "at most 8"):
        assert number in error.problem
