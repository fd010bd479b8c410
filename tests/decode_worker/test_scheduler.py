from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.scheduler import DecodeScheduler, Plan
from decode_worker.sequence import DecodeSequence, SequenceState
from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache
from tandem.config.tree import DecodeConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest, RequestId, Room, SamplingParams, StopParams

PAGE = 4
CONTEXT = 32
CONFIG = DecodeConfig(max_running_requests=3, max_queued_requests=4, growth_pages=2)


def request(prompt_tokens: int, max_tokens: int, first_token_id: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        room=Room(1),
        token_ids=tuple(range(first_token_id, first_token_id + prompt_tokens)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=max_tokens),
    )


def desk(
    usable_pages: int,
    config: DecodeConfig = CONFIG,
    *,
    swap_pages: int | None = None,
    prefix_reuse: bool = False,
) -> tuple[DecodeScheduler, PageAllocator]:
    pages = PageAllocator(usable_pages + 1)
    swap = 2 * usable_pages if swap_pages is None else swap_pages
    prefix = PrefixCache(pages, PAGE, prefix_reuse)
    return DecodeScheduler(pages, prefix, CONTEXT, config, swap), pages


def running(
    scheduler: DecodeScheduler, prompt_tokens: int, max_tokens: int, first_token_id: int = 0
) -> DecodeSequence:
    """Admitted, and its prompt has landed."""
    sequence = scheduler.add(request(prompt_tokens, max_tokens, first_token_id))
    assert scheduler.admit() == [sequence]
    scheduler.start(sequence, 9)
    return sequence


def two_running(
    scheduler: DecodeScheduler, prompts: tuple[int, int] = (4, 4)
) -> tuple[DecodeSequence, DecodeSequence]:
    """Admitted together, before either grows."""
    first, second = (scheduler.add(request(prompt_tokens, 20)) for prompt_tokens in prompts)
    assert scheduler.admit() == [first, second]
    for sequence in (first, second):
        scheduler.start(sequence, 9)
    return first, second


def step(scheduler: DecodeScheduler) -> tuple[DecodeSequence, ...]:
    """One step, with no moves before it."""
    plan = scheduler.plan()
    assert (plan.leaving, plan.returning) == (None, None)
    scheduler.end_step(plan.rows, [9] * len(plan.rows))
    return plan.rows


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_pages"),
    [
        (1, 1, 1),
        (4, 1, 1),  # the only output token is never an input
        (4, 2, 2),
        (5, 4, 2),
        (5, 5, 3),
        (1, 31, 3),  # one for the prompt, and two to grow into
        (22, 99, 8),  # the context ends at 32
        (31, 1, 8),
    ],
)
def test_admitted_with_pages_for_the_prompt_and_a_little_more(
    prompt_tokens: int, max_tokens: int, num_pages: int
) -> None:
    scheduler, pages = desk(20)
    sequence = scheduler.add(request(prompt_tokens, max_tokens))
    assert scheduler.admit() == [sequence]
    assert len(sequence.page_ids) == num_pages == pages.num_held == scheduler.pages_used


def test_a_request_runs_from_its_handed_over_token_on() -> None:
    scheduler, pages = desk(8)
    sequence = scheduler.add(request(5, 4))
    assert scheduler.plan() == Plan()
    assert scheduler.admit() == [sequence]
    assert scheduler.plan() == Plan()
    scheduler.start(sequence, 70)
    assert (sequence.token_id, sequence.position) == (70, 5)
    rows = scheduler.plan().rows
    assert rows == (sequence,)
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
    assert scheduler.plan().rows == (fast,)
    scheduler.end_step([fast], [3])
    assert pages.num_held == 2
    scheduler.resume(slow)
    assert scheduler.plan().rows == (slow, fast)


def test_dropped_during_its_step_a_request_gives_its_pages_back_afterwards() -> None:
    scheduler, pages = desk(8)
    gone, stays = (scheduler.add(request(1, 4)) for _ in range(2))
    scheduler.admit()
    scheduler.start(gone, 1)
    scheduler.start(stays, 2)
    rows = scheduler.plan().rows
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
    scheduler.end_step(scheduler.plan().rows, None)
    assert (sequence.token_id, sequence.position) == (1, 1)
    assert scheduler.plan().rows == (sequence,)


def test_the_last_admitted_leaves_when_an_earlier_one_needs_its_pages() -> None:
    scheduler, pages = desk(6)
    old, new = two_running(scheduler)
    assert (len(old.page_ids), len(new.page_ids)) == (3, 3)
    for _ in range(8):
        assert step(scheduler) == (old, new)
    assert scheduler.plan() == Plan(leaving=new)
    assert pages.num_held == 6  # they are being read
    assert scheduler.end_save(new, saved=True)
    assert (pages.num_held, scheduler.pages_swapped, scheduler.num_preemptions) == (3, 3, 1)
    assert step(scheduler) == (old,)
    assert (len(old.page_ids), new.state) == (4, SequenceState.SWAPPED)
    waiting = scheduler.add(request(1, 1))
    assert scheduler.admit() == []  # nobody is admitted while somebody is out
    scheduler.drop(old)
    assert scheduler.plan() == Plan(returning=new)
    scheduler.end_load(new, loaded=True)
    assert (scheduler.pages_swapped, new.position) == (0, 12)
    assert scheduler.admit() == [waiting]
    assert step(scheduler) == (new,)


def test_the_last_admitted_waits_rather_than_send_others_away() -> None:
    scheduler, _ = desk(6)
    old, new = two_running(scheduler, prompts=(3, 4))
    for _ in range(8):
        assert step(scheduler) == (old, new)
    assert step(scheduler) == (old,)  # the new one's page is full
    assert scheduler.num_preemptions == 0


def test_paused_requests_leave_first() -> None:
    scheduler, _ = desk(6)
    slow, fast = two_running(scheduler)
    scheduler.pause(slow)
    for _ in range(8):
        assert step(scheduler) == (fast,)
    assert scheduler.plan() == Plan(leaving=slow)
    scheduler.end_save(slow, saved=True)
    waiting = scheduler.add(request(1, 1))
    assert scheduler.admit() == [waiting]  # a slow reader does not hold up others
    assert step(scheduler) == (fast,)
    scheduler.drop(waiting)
    scheduler.resume(slow)  # the oldest again: others make room
    assert scheduler.plan() == Plan(leaving=fast)


def test_paused_requests_leave_for_the_queue_when_nothing_else_moves() -> None:
    scheduler, _ = desk(6)
    slow, fast = two_running(scheduler)
    waiting = scheduler.add(request(4, 4))
    scheduler.pause(slow)
    assert step(scheduler) == (fast,)
    scheduler.pause(fast)
    assert scheduler.plan() == Plan(leaving=fast)
    scheduler.end_save(fast, saved=True)
    assert scheduler.admit() == [waiting]
    assert scheduler.plan() == Plan()


def test_transfers_are_waited_for_not_preempted() -> None:
    scheduler, _ = desk(6)
    old, arriving = (scheduler.add(request(4, 20)) for _ in range(2))
    assert scheduler.admit() == [old, arriving]
    scheduler.start(old, 9)
    for _ in range(8):
        assert step(scheduler) == (old,)
    assert scheduler.plan() == Plan()
    scheduler.start(arriving, 9)
    assert scheduler.plan() == Plan(leaving=arriving)


def test_with_little_host_memory_the_later_ones_wait() -> None:
    scheduler, _ = desk(6, swap_pages=0)
    old = running(scheduler, 4, 16)
    new = scheduler.add(request(4, 16))
    assert scheduler.admit() == []  # 5 pages at most for the old one, and 3 for the new one
    for _ in range(15):
        assert step(scheduler) == (old,)
    scheduler.drop(old)
    assert scheduler.admit() == [new]


@pytest.mark.parametrize("saved", [True, False])
def test_dropped_while_it_leaves_a_request_needs_no_copy(saved: bool) -> None:
    scheduler, pages = desk(6)
    _, new = two_running(scheduler)
    for _ in range(8):
        step(scheduler)
    assert scheduler.plan() == Plan(leaving=new)
    scheduler.drop(new)
    assert pages.num_held == 6
    assert not scheduler.end_save(new, saved=saved)
    assert (pages.num_held, scheduler.pages_swapped) == (3, 0)


def test_dropped_while_it_returns_a_request_gives_its_pages_back() -> None:
    scheduler, pages = desk(6)
    old, new = two_running(scheduler)
    for _ in range(8):
        step(scheduler)
    scheduler.end_save(scheduler.plan().leaving or old, saved=True)
    scheduler.drop(old)
    assert scheduler.plan() == Plan(returning=new)
    scheduler.drop(new)
    assert pages.num_held == 3
    scheduler.end_load(new, loaded=True)
    assert (pages.num_held, scheduler.num_running) == (0, 0)


def test_finished_requests_leave_prompt_and_output_to_those_that_go_on() -> None:
    scheduler, pages = desk(8, prefix_reuse=True)
    first = running(scheduler, 6, 20)
    for _ in range(3):
        step(scheduler)
    scheduler.drop(first)
    assert (scheduler.pages_used, scheduler.pages_cached) == (0, 2)  # 9 tokens have K and V
    again = scheduler.add(first.request)
    scheduler.admit()
    assert (again.cached_pages, scheduler.pages_cached) == (1, 1)
    scheduler.drop(again)
    turn = [*first.request.token_ids, 9, 9, 9]
    follow = scheduler.add(replace(first.request, token_ids=tuple(turn)))
    scheduler.admit()
    assert follow.cached_pages == 2
    scheduler.drop(follow)  # before anything landed
    assert scheduler.pages_cached == 2
    assert pages.num_held == 2


def test_a_page_whose_last_token_was_never_an_input_is_not_kept() -> None:
    scheduler, _ = desk(8, prefix_reuse=True)
    sequence = running(scheduler, 6, 20)
    step(scheduler)
    assert len(sequence.token_ids) == 2 * PAGE
    scheduler.drop(sequence)
    assert scheduler.pages_cached == 1


def test_what_a_failed_step_left_is_not_kept() -> None:
    scheduler, pages = desk(8, prefix_reuse=True)
    sequence = running(scheduler, 6, 20)
    scheduler.end_step(scheduler.plan().rows, None)
    scheduler.drop(sequence, keep=False)
    assert pages.num_held == 0


def test_cached_pages_go_before_anybody_is_preempted() -> None:
    scheduler, _ = desk(6, prefix_reuse=True)
    scheduler.drop(running(scheduler, 12, 2))
    assert scheduler.pages_cached == 3
    other = running(scheduler, 4, 20, first_token_id=50)
    assert scheduler.pages_cached == 3
    for _ in range(19):
        assert step(scheduler) == (other,)
    assert (scheduler.num_preemptions, scheduler.pages_cached) == (0, 0)
