"""Page sizes: every byte of the last page counts, however much of it a prompt fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.config.tree import TandemConfig
from tandem.requests import GenerateRequest, TokenLogprobs
from tandem.testing.pair import Completion, Pair
from tandem.testing.reference import GREEDY, new_request, random_prompt

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]
WithPair = Callable[..., None]


def logprobs_of(completion: Completion) -> list[TokenLogprobs]:
    return [entry for chunk in completion.chunks for entry in chunk.logprobs]


@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), (32, 16)])
def test_pages_that_differ_in_size_give_the_same_tokens(
    with_pair: WithPair, config: Configure, expected: Expected, prefill: int, decode: int
) -> None:
    async def body(pair: Pair) -> None:
        for length in (1, 15, 16, 17, 31, 32, 33, 64, 65, 200):
            prompt = random_prompt(length)
            for _ in range(2):  # the second time, both sides have a prefix of it
                work = new_request(prompt, 5, replace(GREEDY, logprobs=True, top_logprobs=2))
                done, reference = await pair.generate(work), expected(work)
                assert done.token_ids == reference.token_ids, length
                for ours, theirs in zip(logprobs_of(done), logprobs_of(reference), strict=True):
                    assert abs(ours.logprob - theirs.logprob) < 1e-4, length

    with_pair(config(prefill={"page_tokens": prefill}, decode={"page_tokens": decode}), body)


@pytest.mark.parametrize("page_tokens", [16, 128])
def test_every_token_of_every_page_reaches_decode(
    with_pair: WithPair, config: Configure, expected: Expected, page_tokens: int
) -> None:
    async def body(pair: Pair) -> None:
        for length in (1, 2, 127, 128, 129, 300):
            sampling = replace(GREEDY, logprobs=True, top_logprobs=2)
            work = new_request(random_prompt(length), 4, sampling)
            done, reference = await pair.generate(work), expected(work)
            assert done.token_ids == reference.token_ids, length
            # The first token is prefill's; decode's first step reads all pages that travelled.
            for ours, theirs in zip(logprobs_of(done), logprobs_of(reference), strict=True):
                assert abs(ours.logprob - theirs.logprob) < 1e-4, length
            prompt_pages = -(-length // page_tokens)
            assert done.transferred_bytes % prompt_pages == 0
            assert done.transferred_bytes > 0

    with_pair(
        config(
            cache={"page_tokens": page_tokens, "prefix_reuse": False}, prefill={"chunk_tokens": 128}
        ),
        body,
    )
