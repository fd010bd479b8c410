"""Any history of a decode scheduler on a tiny pool, against what must always hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from decode_worker.scheduler import DecodeScheduler, Plan
from decode_worker.sequence import DecodeSequence, SequenceState
from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache
from tandem.config.tree import DecodeConfig
from tandem.requests import GenerateRequest, RequestId, Room, SamplingParams, StopParams

PAGE = 2
CONTEXT = 24
USABLE_PAGES = 9
MAX_PLANS = 4000

Contents = tuple[tuple[int, ...], ...]


class Histories(RuleBasedStateMachine):
    """Requests come, land, step, pause and go in any order; pages hold the tokens written to them.

    A page's content is what a model would have put there: the token at each of its places. So a
    page that two requests write, or a copy that comes back wrong, shows as a wrong content.
    """

    @initialize(
        swap_pages=st.sampled_from([0, USABLE_PAGES, USABLE_PAGES + 4, 3 * USABLE_PAGES]),
        growth_pages=st.integers(0, 2),
        prefix_reuse=st.booleans(),
    )
    def begin(self, swap_pages: int, growth_pages: int, prefix_reuse: bool) -> None:
        self.pages = PageAllocator(USABLE_PAGES + 1)
        self.prefix = PrefixCache(self.pages, PAGE, prefix_reuse)
        config = DecodeConfig(
            max_running_requests=5, max_queued_requests=1000, growth_pages=growth_pages
        )
        self.swap_pages = swap_pages
        self.scheduler = DecodeScheduler(self.pages, self.prefix, CONTEXT, config, swap_pages)
        self.live: list[DecodeSequence] = []
        self.memory: dict[int, list[int]] = {page: [-1] * PAGE for page in range(USABLE_PAGES + 1)}
        self.saved: dict[DecodeSequence, Contents] = {}

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6), max_tokens=st.integers(1, 12))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._add(prompt, max_tokens)

    @rule(count=st.integers(2, 5), prompt_tokens=st.integers(1, 4))
    def add_some_that_grow(self, count: int, prompt_tokens: int) -> None:
        for _ in range(count):
            self._add([0] * prompt_tokens, 14)
        for sequence in list(self.live):
            if sequence.state is SequenceState.RESERVED:
                self._land(sequence)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 100))
    def land(self, place: int) -> None:
        reserved = [s for s in self.live if s.state is SequenceState.RESERVED]
        if reserved:
            self._land(reserved[place % len(reserved)])

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 100))
    def pause_or_resume(self, place: int) -> None:
        sequence = self.live[place % len(self.live)]
        if sequence.paused:
            self.scheduler.resume(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.scheduler.pause(sequence)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 100))
    def cancel(self, place: int) -> None:
        self._drop(self.live[place % len(self.live)])

    @rule(victim=st.none() | st.integers(0, 100))
    def run_plan(self, victim: int | None) -> None:
        """Whatever comes next, perhaps with somebody cancelled meanwhile."""
        self._run(self.scheduler.plan(), victim)

    @rule()
    def run_step(self) -> None:
        for _ in range(20):
            plan = self.scheduler.plan()
            self._run(plan, None)
            if plan.leaving is None and plan.returning is None:
                return

    @invariant()
    def every_page_has_its_owners(self) -> None:
        owners: Counter[int] = Counter()
        for sequence in self.live:
            owners.update(sequence.page_ids)
        for page in range(1, USABLE_PAGES + 1):
            references = self.pages.references(page)
            assert references - owners[page] in (0, 1), "lost, or one too many"
        assert self.scheduler.pages_used == len(owners)
        for sequence in self.live:
            for page in sequence.page_ids[sequence.cached_pages :]:
                assert owners[page] == 1, "two requests may write one page"
        held = sum(sequence.swapped_pages for sequence in self.live)
        assert held == self.scheduler.pages_swapped <= self.swap_pages

    @invariant()
    def pages_hold_what_was_computed(self) -> None:
        for sequence in self.live:
            if sequence.state is SequenceState.RUNNING:
                self._check_contents(sequence)

    def teardown(self) -> None:
        """All that is left finishes, however it stands."""
        if not hasattr(self, "live"):
            return
        for sequence in self.live:
            self.scheduler.resume(sequence)
        for _ in range(MAX_PLANS):
            if not self.live:
                break
            self.scheduler.admit()
            for sequence in list(self.live):
                if sequence.state is SequenceState.RESERVED:
                    self._land(sequence)
            self._run(self.scheduler.plan(), None)
        assert not self.live, "a request never finished"
        assert (self.scheduler.num_queued, self.scheduler.num_running) == (0, 0)
        assert (self.scheduler.pages_used, self.scheduler.pages_swapped) == (0, 0)
        assert not self.saved

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        request = GenerateRequest(
            request_id=RequestId("r"),
            room=Room(1),
            token_ids=tuple(prompt),
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=max_tokens),
        )
        self.live.append(self.scheduler.add(request))
        self.scheduler.admit()

    def _land(self, sequence: DecodeSequence) -> None:
        for place in range(sequence.cached_pages * PAGE, len(sequence.token_ids)):
            self._write(sequence, place)
        self.scheduler.start(sequence, 1)
        self._finish_if_whole(sequence)

    def _run(self, plan: Plan, victim: int | None) -> None:
        running = [
            sequence
            for sequence in self.live
            if sequence.state in (SequenceState.RUNNING, SequenceState.SWAPPED)
            and not sequence.paused
        ]
        oldest = min(running, key=lambda sequence: sequence.order, default=None)
        copies: Contents = ()
        if plan.leaving is not None:
            assert plan.leaving is not oldest
            copies = tuple(tuple(self.memory[page]) for page in plan.leaving.page_ids)
        for sequence in plan.rows:
            assert sequence.position < len(sequence.page_ids) * PAGE
            assert not sequence.paused
            self._write(sequence, sequence.position)
        if plan.returning is not None:
            copies = self.saved.pop(plan.returning)
            for page, content in zip(plan.returning.page_ids, copies, strict=True):
                self.memory[page] = list(content)
        if victim is not None and self.live:
            self._drop(self.live[victim % len(self.live)])
        self._end(plan, copies)

    def _end(self, plan: Plan, copies: Contents) -> None:
        if plan.leaving is not None and self.scheduler.end_save(plan.leaving, saved=True):
            self.saved[plan.leaving] = copies
        if plan.returning is not None:
            self.scheduler.end_load(plan.returning, loaded=True)
            self.scheduler.admit()
        if plan.rows:
            self.scheduler.end_step(plan.rows, [s.position % 2 for s in plan.rows])
        for sequence in plan.rows:
            if sequence in self.live:
                self._finish_if_whole(sequence)

    def _finish_if_whole(self, sequence: DecodeSequence) -> None:
        if len(sequence.token_ids) >= min(sequence.request.max_total_tokens, CONTEXT):
            self._check_contents(sequence)
            self._drop(sequence)

    def _drop(self, sequence: DecodeSequence) -> None:
        self.live.remove(sequence)
        self.saved.pop(sequence, None)
        self.scheduler.drop(sequence)
        self.scheduler.admit()

    def _write(self, sequence: DecodeSequence, place: int) -> None:
        page = sequence.page_ids[place // PAGE]
        self.memory[page][place % PAGE] = sequence.token_ids[place]

    def _check_contents(self, sequence: DecodeSequence) -> None:
        held = [token for page in sequence.page_ids for token in self.memory[page]]
        assert held[: sequence.position] == sequence.token_ids[: sequence.position]


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
