from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import Chunk, PrefillScheduler, Prompt, PromptState
from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache
from tandem.config.tree import PrefillConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest, RequestId, Room, SamplingParams, StopParams

PAGE = 4
CONFIG = PrefillConfig(chunk_tokens=8, max_batch_requests=3, max_queued_requests=4)


def request(num_tokens: int, name: str = "r", first: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        room=Room(1),
        token_ids=tuple(range(first, first + num_tokens)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=1),
    )


class Desk:
    """A scheduler with the pages and the cache it accounts for."""

    def __init__(self, usable_pages: int, config: PrefillConfig = CONFIG) -> None:
        self.pages = PageAllocator(usable_pages + 1)
        self.prefix = PrefixCache(self.pages, PAGE, True)
        self.scheduler = PrefillScheduler(self.pages, self.prefix, PAGE, config)

    def add(self, num_tokens: int, first: int = 0) -> Prompt:
        prompt = self.scheduler.add(request(num_tokens, first=first))
        self.scheduler.open(prompt)
        return prompt

    def computed(self, num_tokens: int) -> Prompt:
        prompt = self.add(num_tokens)
        while prompt.state is not PromptState.SENDING:
            self.one_pass()
        return prompt

    def one_pass(self) -> tuple[list[tuple[Prompt, int, int]], list[Prompt]]:
        chunks = self.scheduler.plan()
        complete = self.scheduler.end_pass(chunks, computed=True)
        return [(chunk.prompt, chunk.start, chunk.end) for chunk in chunks], complete


def test_a_long_prompt_is_computed_in_chunks_that_end_on_pages() -> None:
    desk = Desk(10)
    prompt = desk.add(19)
    passes = [desk.one_pass() for _ in range(3)]
    assert [chunks for chunks, _ in passes] == [
        [(prompt, 0, 8)],
        [(prompt, 8, 16)],
        [(prompt, 16, 19)],
    ]
    assert [complete for _, complete in passes] == [[], [], [prompt]]
    assert prompt.state is PromptState.SENDING
    assert desk.scheduler.plan() == []
    assert desk.scheduler.pages_used == 5
    desk.scheduler.free(prompt)
    assert desk.scheduler.pages_used == 0
    assert desk.scheduler.pages_cached == 4  # the whole pages of the prompt


def test_chunks_name_the_pages_that_they_write_and_need() -> None:
    desk = Desk(10)
    prompt = desk.add(11)
    desk.one_pass()
    (chunk,) = desk.scheduler.plan()
    assert chunk.token_ids == (8, 9, 10)
    assert chunk.page_ids == prompt.page_ids
    assert chunk.first_page == 2
    assert chunk.written_page_ids == prompt.page_ids[2:]
    assert chunk.is_last
    assert not chunk.is_first


def test_short_prompts_share_a_pass_within_its_budget() -> None:
    desk = Desk(20)
    first, second, third, fourth = (desk.add(3, first=10 * n) for n in range(4))
    chunks, complete = desk.one_pass()
    assert chunks == [(first, 0, 3), (second, 0, 3)]  # of the third, 2 would end inside a page
    assert complete == [first, second]
    assert desk.one_pass()[0] == [(third, 0, 3), (fourth, 0, 3)]


def test_no_more_prompts_in_a_pass_than_configured() -> None:
    desk = Desk(20)
    prompts = [desk.add(1, first=10 * n) for n in range(4)]
    assert [prompt for prompt, _, _ in desk.one_pass()[0]] == prompts[:3]
    assert [prompt for prompt, _, _ in desk.one_pass()[0]] == prompts[3:]


def test_prompts_under_way_come_before_new_ones() -> None:
    desk = Desk(20)
    long, short = desk.add(12), desk.add(2, first=50)
    assert desk.one_pass()[0] == [(long, 0, 8)]
    assert desk.one_pass()[0] == [(long, 8, 12), (short, 0, 2)]


def test_a_prompt_whose_stream_is_not_open_holds_nobody_up() -> None:
    desk = Desk(20)
    closed = desk.scheduler.add(request(2))
    ready = desk.add(2, first=50)
    assert desk.one_pass()[0] == [(ready, 0, 2)]
    desk.scheduler.open(closed)
    assert desk.one_pass()[0] == [(closed, 0, 2)]


def test_a_prompt_without_pages_waits_and_is_not_passed() -> None:
    desk = Desk(4)
    large, larger, small = desk.add(12), desk.add(13, first=50), desk.add(1, first=90)
    assert desk.one_pass()[0] == [(large, 0, 8)]
    assert desk.one_pass()[0] == [(large, 8, 12)]
    assert desk.scheduler.plan() == []
    assert (desk.scheduler.num_queued, desk.scheduler.num_running) == (2, 1)
    desk.scheduler.free(large)
    assert desk.one_pass()[0] == [(larger, 0, 8)]
    assert small.state is PromptState.QUEUED


def test_a_prompt_that_can_never_fit_is_refused_with_both_sizes() -> None:
    desk = Desk(4)
    with pytest.raises(RequestTooLong, match=r"17 tokens needs 5 pages .* has 4 \(16 tokens\)"):
        desk.scheduler.add(request(17))
    assert desk.add(16).state is PromptState.QUEUED


def test_the_queue_is_bounded() -> None:
    desk = Desk(4)
    for _ in range(4):
        desk.add(1)
    with pytest.raises(Overloaded, match="4 prompts wait") as caught:
        desk.scheduler.add(request(1))
    assert caught.value.retry_after_s > 0


def test_pages_found_in_the_cache_are_not_computed() -> None:
    desk = Desk(10)
    desk.scheduler.free(desk.computed(9))
    again = desk.add(9)
    assert desk.one_pass()[0] == [(again, 8, 9)]
    assert again.cached_tokens == 8
    exact = desk.add(8)  # at least one token is left to compute
    assert desk.one_pass()[0] == [(exact, 4, 8)]
    assert exact.cached_tokens == 4


def test_cached_pages_give_way_but_not_while_they_are_sent() -> None:
    desk = Desk(4)
    first = desk.computed(8)
    sending = desk.computed(9)  # reuses two pages of the first, takes a third
    desk.scheduler.free(first)
    waiting = desk.add(16, first=50)
    assert desk.scheduler.plan() == []
    desk.scheduler.free(sending)
    assert desk.one_pass()[0] == [(waiting, 0, 8)]
    assert desk.scheduler.pages_cached == 0


def test_without_reuse_nothing_is_cached() -> None:
    desk = Desk(10)
    desk.prefix = PrefixCache(desk.pages, PAGE, False)
    desk.scheduler = PrefillScheduler(desk.pages, desk.prefix, PAGE, CONFIG)
    desk.scheduler.free(desk.computed(8))
    assert desk.pages.num_held == 0


def test_freed_during_its_pass_a_prompt_gives_its_pages_back_afterwards() -> None:
    desk = Desk(10)
    prompt = desk.add(8)
    chunks = desk.scheduler.plan()
    desk.scheduler.free(prompt)
    desk.scheduler.free(prompt)
    assert desk.scheduler.pages_used == 2
    assert desk.scheduler.num_running == 0
    assert desk.scheduler.end_pass(chunks, computed=True) == []
    assert desk.pages.num_held == 0


def test_stopped_during_its_pass_a_prompt_is_not_handed_over_but_may_be_reused() -> None:
    desk = Desk(10)
    prompt = desk.add(8)
    chunks = desk.scheduler.plan()
    desk.scheduler.stop(prompt)
    assert desk.scheduler.end_pass(chunks, computed=True) == []
    desk.scheduler.free(prompt)
    assert (desk.scheduler.pages_used, desk.scheduler.pages_cached) == (0, 2)


def test_a_failed_pass_leaves_nothing_in_the_cache() -> None:
    desk = Desk(10)
    prompt = desk.add(8)
    desk.scheduler.end_pass(desk.scheduler.plan(), computed=False)
    assert prompt.num_computed == 0
    desk.scheduler.free(prompt)
    assert desk.pages.num_held == 0


def test_prompts_leave_from_any_state() -> None:
    desk = Desk(4)
    computing, queued = desk.add(12), desk.add(8, first=50)
    desk.one_pass()
    for prompt in (queued, computing):
        desk.scheduler.free(prompt)
        assert prompt.state is PromptState.GONE
    assert (desk.scheduler.num_queued, desk.scheduler.num_running) == (0, 0)
    assert desk.pages.num_held == 0


@given(st.data())
def test_any_history_ends_and_returns_every_page(data: st.DataObject) -> None:  # noqa: C901
    desk = Desk(12, replace(CONFIG, max_queued_requests=50))
    live: list[Prompt] = []
    progress: dict[Prompt, int] = {}

    def account(chunks: Sequence[Chunk]) -> None:
        assert sum(chunk.end - chunk.start for chunk in chunks) <= CONFIG.chunk_tokens
        for chunk in chunks:
            assert chunk.start == progress.get(chunk.prompt, chunk.prompt.cached_tokens)
            assert chunk.end == chunk.prompt.num_tokens or chunk.end % PAGE == 0
            progress[chunk.prompt] = chunk.end

    def leave(place: int) -> None:
        desk.scheduler.free(live.pop(place))

    def one_pass(leaving: int | None = None) -> None:
        chunks = desk.scheduler.plan()
        account(chunks)
        if leaving is not None:
            leave(leaving)
        desk.scheduler.end_pass(chunks, computed=True)

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "pass", "leave", "leave in pass"])):
            case "add":
                live.append(desk.add(data.draw(st.integers(1, 48)), data.draw(st.integers(0, 1))))
            case "pass":
                one_pass()
            case "leave" if live:
                leave(data.draw(st.integers(0, len(live) - 1)))
            case "leave in pass" if live:
                one_pass(data.draw(st.integers(0, len(live) - 1)))
    for _ in range(200):
        one_pass()
        for place in reversed(range(len(live))):
            if live[place].state is PromptState.SENDING:
                assert progress[live[place]] == live[place].num_tokens
                leave(place)
    assert not live, "a prompt was never computed"
    assert desk.scheduler.pages_used == 0
    desk.prefix.evict(99)
    assert desk.pages.num_free == desk.pages.num_total == 12
