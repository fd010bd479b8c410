"""Prefixes that decode keeps, and requests that outgrow its pages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.config.tree import TandemConfig
from tandem.device import DeviceThread
from tandem.requests import GenerateRequest, SamplingParams
from tandem.testing.pair import Completion, Pair
from tandem.testing.reference import GREEDY, new_request, random_prompt

PAGE = 16

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]
WithPair = Callable[..., None]


def again(work: GenerateRequest) -> GenerateRequest:
    """The same request once more, in a room of its own."""
    return replace(new_request(work.token_ids), sampling=work.sampling, stop=work.stop)


def test_six_that_grow_past_the_pool_all_end_as_if_alone(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(64, n), max_tokens=256) for n in range(6)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert len(completion.token_ids) == 256
            assert completion.token_ids == expected(work).token_ids
        await pair.idle()
        _, state = await pair.states()
        assert state.preemptions > 0
        assert (state.pages_used, state.pages_swapped) == (0, 0)

    with_pair(config(decode={"num_pages": 40}), body)


def test_preemption_shows_in_no_token_logprob_or_index(
    with_pair: WithPair, config: Configure
) -> None:
    samplings = [
        GREEDY,
        replace(GREEDY, frequency_penalty=0.8, presence_penalty=0.3),
        SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.1),
        replace(GREEDY, logprobs=True, top_logprobs=3),
    ]
    works = [new_request(random_prompt(40, n), 200, samplings[n % 4]) for n in range(8)]
    alone: list[Completion] = []

    async def one_by_one(pair: Pair) -> None:
        alone.extend([await pair.generate(again(work)) for work in works])

    async def together(pair: Pair) -> None:
        done = await asyncio.gather(*(pair.generate(again(work)) for work in works))
        for completion, solo in zip(done, alone, strict=True):
            assert completion.token_ids == solo.token_ids
            assert completion.text == solo.text
            assert completion.cached_tokens == 0
            ours = [entry for chunk in completion.chunks for entry in chunk.logprobs]
            theirs = [entry for chunk in solo.chunks for entry in chunk.logprobs]
            assert ours == theirs
        _, state = await pair.states()
        assert state.preemptions > 0

    with_pair(config(), one_by_one)
    with_pair(config(decode={"num_pages": 24, "growth_pages": 1}), together)


def test_preempted_beside_prefill_in_one_device_thread(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    thread = DeviceThread("device")

    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(20 + n, n), max_tokens=100) for n in range(9)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids
        _, state = await pair.states()
        assert state.preemptions > 0

    small = config(prefill={"num_pages": 5}, decode={"num_pages": 12, "growth_pages": 1})
    with_pair(small, body, device_thread=thread)
    thread.close()


@pytest.mark.parametrize("swap_bytes", [1, 1_000_000])
def test_with_little_host_memory_requests_wait_and_none_fails(
    with_pair: WithPair, config: Configure, expected: Expected, swap_bytes: int
) -> None:
    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(64, n), max_tokens=120) for n in range(6)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids

    with_pair(config(decode={"num_pages": 24, "swap_bytes": swap_bytes}), body)


def test_cancelled_in_host_memory_frees_it(with_pair: WithPair, config: Configure) -> None:
    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(64, n), max_tokens=400) for n in range(3)]
        calls = [asyncio.create_task(pair.generate(work)) for work in works]
        await pair.until(lambda prefill, decode: decode.pages_swapped > 0)
        for call in reversed(calls):  # those admitted last are out
            call.cancel()
        await asyncio.wait(calls)
        await pair.idle()
        assert len((await pair.generate(new_request(random_prompt(64), 300))).token_ids) == 300

    with_pair(config(decode={"num_pages": 32}), body)


def test_only_missing_pages_travel_and_ten_repeats_are_equal(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(200), max_tokens=12)
        whole = expected(work).token_ids
        first = await pair.generate(work)
        assert (first.token_ids, first.cached_pages, first.cached_tokens) == (whole, 0, 0)
        page_bytes = first.transferred_bytes // 13
        assert first.transferred_bytes == 13 * page_bytes
        for _ in range(9):
            await pair.idle()
            repeat = await pair.generate(again(work))
            assert (repeat.token_ids, repeat.cached_pages) == (whole, 12)
            assert repeat.transferred_bytes == page_bytes
            assert repeat.cached_tokens == 192  # what prefill saved, not what decode had
        await pair.idle()
        _, state = await pair.states()
        assert (state.pages_used, state.pages_cached) == (0, 13)  # 211 tokens have K and V

    with_pair(config(), body)


def test_the_next_turn_finds_the_answer_too(with_pair: WithPair, config: Configure) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(70), max_tokens=60)
        first = await pair.generate(work)
        await pair.idle()
        follow = (*work.token_ids, *first.token_ids, *random_prompt(9))
        second = await pair.generate(new_request(follow, max_tokens=8))
        assert len(second.token_ids) == 8
        assert second.cached_pages == 129 // PAGE  # the last output token was never an input
        assert second.cached_tokens == 64  # prefill saw the first prompt only

    with_pair(config(), body)


def test_prefill_and_decode_caches_need_not_agree(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(100), max_tokens=5)
        for round_ in range(3):
            done = await pair.generate(again(work))
            assert done.token_ids == expected(work).token_ids
            assert done.cached_pages == (6 if round_ else 0)
            await pair.idle()
            filler = new_request(random_prompt(120, round_ + 1), max_tokens=2)  # evicts prefill's
            assert (await pair.generate(filler)).token_ids == expected(filler).token_ids
            await pair.idle()

    with_pair(config(prefill={"num_pages": 8}), body)


def test_cached_pages_give_way_to_requests(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        for n in range(6):
            work = new_request(random_prompt(100, n), max_tokens=40)
            assert (await pair.generate(work)).token_ids == expected(work).token_ids
            await pair.idle()
        _, state = await pair.states()
        assert 0 < state.pages_cached <= 12
        assert state.preemptions == 0

    with_pair(config(decode={"num_pages": 12}), body)


def test_streams_with_a_common_start_keep_their_secrets(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    draw = random.Random(3)
    start = random_prompt(40)
    works = [new_request((*start, *random_prompt(12, n)), max_tokens=24) for n in range(8)]
    solo = [expected(work).token_ids for work in works]

    async def body(pair: Pair) -> None:
        for _ in range(5):
            order = draw.sample(range(8), 8)
            done = await asyncio.gather(*(pair.generate(again(works[n])) for n in order))
            assert [completion.token_ids for completion in done] == [solo[n] for n in order]
        _, state = await pair.states()
        assert state.preemptions > 0

    with_pair(config(decode={"num_pages": 20, "growth_pages": 0}), body)
