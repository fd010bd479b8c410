from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import DecodeScheduler, DecodeSequence, SequenceState
from tandem.cache.pages import PageAllocator
from tandem.config.tree import DecodeConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest, RequestId, Room, SamplingParams, StopParams

PAGE = 4
CONTEXT = 32
CONFIG = DecodeConfig(max_running_requests=3, max_queued_requests=4)


def request(prompt_tokens: int, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        room=Room(1),
        token_ids=tuple(range(prompt_tokens)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=max_tokens),
    )


def desk(usable_pages: int, config: DecodeConfig = CONFIG) -> tuple[DecodeScheduler, PageAllocator]:
    pages = PageAllocator(usable_pages + 1)
    return DecodeScheduler(pages, PAGE, CONTEXT, config), pages


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_pages"),
    [
        (1, 1, 1),
        (4, 1, 1),  # the only output token is never an input
        (4, 2, 2),
        (5, 4, 2),
        (5, 5, 3),
        (30, 99, 8),  # the context ends at 32
        (31, 1, 8),
    ],
)
def test_pages_cover_prompt_and_output(prompt_tokens: int, max_tokens: int, num_pages: int) -> None:
    scheduler, pages = desk(20)
    sequence = scheduler.add(request(prompt_tokens, max_tokens))
    assert scheduler.admit() == [sequence]
    assert len(sequence.page_ids) == num_pages == pages.num_held == scheduler.pages_used


def test_a_request_runs_from_its_handed_over_token_on() -> None:
    scheduler, pages = desk(8)
    sequence = scheduler.add(request(5, 4))
    assert scheduler.plan() == []
    assert scheduler.admit() == [sequence]
    assert scheduler.plan() == []
    scheduler.start(sequence, 70)
    assert (sequence.token_id, sequence.position) == (70, 5)
    rows = scheduler.plan()
    assert rows == [sequence]
    scheduler.end_step(rows, [71])
    assert (sequence.token_id, sequence.position) == (71, 6)
    scheduler.drop(sequence)
    scheduler.drop(sequence)
    assert sequence.state is SequenceState.GONE
    assert pages.num_held == 0


def test_admission_keeps_the_order_and_passes_nobody() -> None:
    scheduler, _ = desk(4)
    first = scheduler.add(request(8, 1))
    large = scheduler.add(request(12, 1))
    small = scheduler.add(request(1, 1))
    assert scheduler.admit() == [first]
    assert (scheduler.num_running, scheduler.num_queued) == (1, 2)
    scheduler.drop(first)
    assert scheduler.admit() == [large, small]


def test_reserved_requests_count_as_running() -> None:
    scheduler, _ = desk(20)
    sequences = [scheduler.add(request(1, 1)) for _ in range(4)]
    assert scheduler.admit() == sequences[:3]
    assert scheduler.num_running == 3
    scheduler.drop(sequences[1])
    assert scheduler.admit() == sequences[3:]


def test_what_can_never_fit_is_refused_with_all_sizes() -> None:
    scheduler, _ = desk(4)
    with pytest.raises(RequestTooLong, match=r"10 .* and 8 .* need 5 pages .* has 4 \(16 tokens\)"):
        scheduler.add(request(10, 8))
    with pytest.raises(RequestTooLong, match="32 tokens leaves no room in a context of 32"):
        scheduler.add(request(32, 1))
    assert scheduler.add(request(10, 7)).state is SequenceState.QUEUED


def test_the_queue_is_bounded() -> None:
    scheduler, _ = desk(4)
    for _ in range(4):
        scheduler.add(request(1, 1))
    with pytest.raises(Overloaded, match="4 requests wait") as caught:
        scheduler.add(request(1, 1))
    assert caught.value.retry_after_s > 0


def test_paused_requests_sit_steps_out_and_keep_their_pages() -> None:
    scheduler, pages = desk(8)
    slow, fast = (scheduler.add(request(1, 4)) for _ in range(2))
    scheduler.admit()
    scheduler.start(slow, 1)
    scheduler.start(fast, 2)
    scheduler.pause(slow)
    assert scheduler.plan() == [fast]
    scheduler.end_step([fast], [3])
    assert pages.num_held == 2
    scheduler.resume(slow)
    assert scheduler.plan() == [slow, fast]


def test_dropped_during_its_step_a_request_gives_its_pages_back_afterwards() -> None:
    scheduler, pages = desk(8)
    gone, stays = (scheduler.add(request(1, 4)) for _ in range(2))
    scheduler.admit()
    scheduler.start(gone, 1)
    scheduler.start(stays, 2)
    rows = scheduler.plan()
    scheduler.drop(gone)
    assert (pages.num_held, scheduler.num_running) == (2, 1)
    scheduler.end_step(rows, [5, 6])
    assert pages.num_held == 1
    assert (gone.position, stays.token_id) == (1, 6)


def test_a_failed_step_advances_nobody() -> None:
    scheduler, _ = desk(8)
    sequence = scheduler.add(request(1, 4))
    scheduler.admit()
    scheduler.start(sequence, 1)
    scheduler.end_step(scheduler.plan(), None)
    assert (sequence.token_id, sequence.position) == (1, 1)
    assert scheduler.plan() == [sequence]


@given(st.data())
def test_any_history_ends_and_returns_every_page(data: st.DataObject) -> None:  # noqa: C901
    scheduler, pages = desk(10, replace(CONFIG, max_queued_requests=50))
    live: dict[DecodeSequence, int] = {}

    def drop(sequence: DecodeSequence) -> None:
        del live[sequence]
        scheduler.drop(sequence)

    def step(victim: DecodeSequence | None = None) -> None:
        rows = scheduler.plan()
        used = [page for sequence in rows for page in sequence.page_ids]
        assert len(used) == len(set(used)), "two requests share a page"
        if victim is not None:
            drop(victim)
        scheduler.end_step(rows, [sequence.position for sequence in rows])
        for sequence in rows:
            if sequence in live:
                assert sequence.position < len(sequence.page_ids) * PAGE + 1
                live[sequence] -= 1
                if live[sequence] <= 1:
                    drop(sequence)

    def start_all() -> None:
        scheduler.admit()
        for sequence in list(live):
            if sequence.state is SequenceState.RESERVED:
                scheduler.start(sequence, 0)

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "start", "step", "cancel"])):
            case "add":
                prompt_tokens, max_tokens = (
                    data.draw(st.integers(1, 20)),
                    data.draw(st.integers(2, 9)),
                )
                live[scheduler.add(request(prompt_tokens, max_tokens))] = max_tokens
            case "start":
                start_all()
            case "step":
                leaves = data.draw(st.booleans())
                step(next(iter(live)) if live and leaves else None)
            case "cancel" if live:
                drop(list(live)[data.draw(st.integers(0, len(live) - 1))])
    for _ in range(500):
        if not live:
            break
        start_all()
        step()
    assert not live, "a request never finished"
    assert (scheduler.num_queued, scheduler.num_running, pages.num_held) == (0, 0, 0)
