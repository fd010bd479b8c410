from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.config.tree import TandemConfig
from tandem.device import DeviceThread
from tandem.pb import worker_pb2
from tandem.requests import GenerateRequest, SamplingParams, TokenLogprobs
from tandem.testing.pair import Completion, Pair
from tandem.testing.reference import GREEDY, new_request, random_prompt
from tandem.testing.tiny import TINY_EOS_TOKEN_ID

PAGE = 16

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]
WithPair = Callable[..., None]


def test_greedy_around_every_page_boundary(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    around = [1, PAGE, 2 * PAGE, 4 * PAGE, 9 * PAGE]
    lengths = sorted({max(1, length + off) for length in around for off in (-1, 0, 1)})

    async def body(pair: Pair) -> None:
        for length in lengths:
            work = new_request(random_prompt(length), max_tokens=6)
            done = await pair.generate(work)
            assert done.token_ids == expected(work).token_ids, length
            assert done.chunks[-1].finish_reason == "length"
            assert done.cached_tokens == 0
            await pair.idle()

    with_pair(config(cache={"prefix_reuse": False}), body)


def test_graph_mode_gives_the_same_tokens(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        _, state = await pair.states()
        if not state.graph.startswith("graph"):
            pytest.skip(f"no native kernels here: {state.graph}")
        works = [new_request(random_prompt(20 + n, n), max_tokens=12) for n in range(3)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids

    with_pair(config(decode={"graph": "auto", "buckets": (1, 2)}), body)


def test_many_at_once_each_as_if_alone(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    draw = random.Random(5)
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.9, seed=11),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=12, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.2, seed=2**63),
    ]

    async def body(pair: Pair) -> None:
        works = [
            new_request(
                random_prompt(draw.randrange(1, 90), n), draw.randrange(1, 14), samplings[n % 4]
            )
            for n in range(40)
        ]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids, work
            assert completion.text == expected(work).text

    with_pair(config(), body)


def test_repeated_prompts_reuse_whole_pages_and_change_nothing(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(70), max_tokens=6)
        whole = expected(work).token_ids
        for cached_tokens in (0, 64, 64):
            again = new_request(work.token_ids, max_tokens=6)
            done = await pair.generate(again)
            assert (done.token_ids, done.cached_tokens) == (whole, cached_tokens)
        aligned = await pair.generate(new_request(work.token_ids[:64], max_tokens=1))
        assert aligned.cached_tokens == 48  # one token at least is computed
        prefill, _ = await pair.states()
        assert prefill.pages_cached == 4

    with_pair(config(), body)


def test_the_first_token_may_end_the_request(with_pair: WithPair, config: Configure) -> None:
    async def body(pair: Pair) -> None:
        eos = SamplingParams(temperature=0.0, logit_bias=((TINY_EOS_TOKEN_ID, 100.0),))
        done = await pair.generate(new_request(random_prompt(20), 8, eos, ignore_eos=False))
        assert done.token_ids == [TINY_EOS_TOKEN_ID]
        assert (done.text, done.chunks[-1].finish_reason) == ("", "stop")
        one = await pair.generate(new_request(random_prompt(21), max_tokens=1))
        assert (len(one.token_ids), one.chunks[-1].finish_reason) == (1, "length")
        two = await pair.generate(new_request(random_prompt(21), max_tokens=2))
        assert two.token_ids[0] == one.token_ids[0]

    with_pair(config(), body)


def test_the_context_ends_the_request(with_pair: WithPair, config: Configure) -> None:
    async def body(pair: Pair) -> None:
        done = await pair.generate(new_request(random_prompt(90), max_tokens=50))
        assert (len(done.token_ids), done.chunks[-1].finish_reason) == (10, "length")

    with_pair(config(model={"max_context_tokens": 100}), body)


def test_every_token_has_its_logprobs_the_first_too(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    def close(ours: TokenLogprobs, theirs: TokenLogprobs) -> bool:
        pairs = zip(
            [ours.logprob, *dict(ours.top).values()],
            [theirs.logprob, *dict(theirs.top).values()],
            strict=True,
        )
        return all(abs(one - other) < 1e-4 for one, other in pairs)

    async def body(pair: Pair) -> None:
        sampling = replace(GREEDY, logprobs=True, top_logprobs=3)
        work = new_request(random_prompt(33), 5, sampling)
        done = await pair.generate(work)
        ours = [entry for chunk in done.chunks for entry in chunk.logprobs]
        theirs = [entry for chunk in expected(work).chunks for entry in chunk.logprobs]
        assert len(ours) == len(theirs) == 5
        assert all(len(entry.top) == 3 for entry in ours)
        assert all(close(one, other) for one, other in zip(ours, theirs, strict=True))

    with_pair(config(), body)


def test_requests_that_fill_the_pool_take_turns(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(20, n), max_tokens=40) for n in range(6)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert len(completion.token_ids) == 40
            assert completion.token_ids == expected(work).token_ids

    with_pair(config(decode={"num_pages": 9}), body)  # each takes 4


def test_one_chunk_may_be_unread_and_nothing_is_lost(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(20), max_tokens=60)
        done = await pair.generate(work)
        assert done.token_ids == expected(work).token_ids

    with_pair(config(decode={"max_unread_chunks": 1}), body)


def test_one_process_can_do_both_in_one_device_thread(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    thread = DeviceThread("device")

    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(30 + n, n), max_tokens=10) for n in range(6)]
        done = await asyncio.gather(*(pair.generate(work) for work in works))
        for work, completion in zip(works, done, strict=True):
            assert completion.token_ids == expected(work).token_ids

    with_pair(config(), body, device_thread=thread)
    thread.close()


def test_calls_without_the_token_are_refused_and_health_is_open(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        for call in (pair.prefill.GetStatus, pair.decode.GetStatus):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(worker_pb2.WorkerStatusRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        _, state = await pair.states()
        async with grpc.aio.insecure_channel(state.address) as channel:
            health: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING

    with_pair(config(), body)
