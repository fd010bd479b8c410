"""Which requests take part in the next decode step, and who holds which pages. Synchronous.

The states a request walks:

    QUEUED    accepted; waits for pages and for its turn
    RESERVED  holds pages for its prompt and a little more; its K and V are on their way
    RUNNING   one row of every step that it has a page for, unless its reader is slow
    SWAPPED   preempted: its K and V are in host memory, its pages went to others
    GONE      the pages are back, or come back when the device thread is done with them

A request grows page by page. When no page is free and no cached one can be evicted, the request
that was admitted last is preempted; before it, those that are paused because of a slow reader.
Preempted requests return in order of admission and before anybody new is admitted.

Why this never stands still. Call *oldest* the first in order of admission that is not paused.

1. It is preempted by nobody. If it is in host memory itself, others leave for it.
2. All others can leave at once. Host memory takes ``swap_pages``, and a request is admitted or
   grows only if afterwards, for each one that was admitted before it, that one's largest extent
   and all pages of those admitted later are at most ``max(pool, swap_pages)`` together. With
   ``swap_pages`` the larger, all K and V there are fit into host memory; with the pool the larger,
   the oldest one grows to its end without anybody leaving, and the younger ones wait.
3. Alone it fits, or `DecodeScheduler.add` would have refused it.
4. A RESERVED request is not preempted, for a transfer may write into its pages. It holds no one up
   for ever: prefill computes a prompt with pages of its own, asks decode for none, and its transfer
   lands in pages that are reserved already; so it ends, by the transfer's lease at the latest.

So the oldest one ends, and then the next is the oldest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.sequence import DecodeSequence, SequenceState
from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache, allocate_with_eviction
from tandem.config.tree import DecodeConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the device thread does next: one of the three; none when all is empty."""

    leaving: DecodeSequence | None = None
    """Its pages are copied to host memory; then comes `DecodeScheduler.end_save`."""
    returning: DecodeSequence | None = None
    """Its K and V are copied back into its pages; then comes `DecodeScheduler.end_load`."""
    rows: tuple[DecodeSequence, ...] = ()
    """They are stepped; then comes `DecodeScheduler.end_step`."""


class DecodeScheduler:
    """Admits requests, forms one step after the other, and accounts for pages."""

    def __init__(
        self,
        pages: PageAllocator,
        prefix: PrefixCache,
        max_context_tokens: int,
        config: DecodeConfig,
        swap_pages: int,
    ) -> None:
        """Take over the accounting of ``pages``.

        Args:
            pages: nobody else takes pages from it, ``prefix`` excepted.
            prefix: keeps pages of finished requests in ``pages``.
            max_context_tokens: prompt and output together; generation ends there.
            config: bounds.
            swap_pages: pages whose contents fit into host memory.
        """
        self._pages = pages
        self._prefix = prefix
        self._page_tokens = prefix.page_tokens
        self._max_context_tokens = max_context_tokens
        self._config = config
        self._bound_pages = max(pages.num_total, swap_pages)
        self._swap_pages = swap_pages
        self._queued: dict[DecodeSequence, None] = {}  # ordered, with cheap removal
        self._admitted: dict[DecodeSequence, None] = {}  # in order of admission
        self._orders = itertools.count(1)
        self.num_preemptions = 0
        """Requests that were moved to host memory, each time counted."""

    @property
    def num_queued(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Requests that were admitted, with K and V in pages, on their way or in host memory."""
        return len(self._admitted)

    @property
    def pages_used(self) -> int:
        """Pages that requests hold; those that only the prefix cache holds do not count."""
        return self._pages.num_held - self._prefix.num_cached

    @property
    def pages_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._prefix.num_cached

    @property
    def pages_swapped(self) -> int:
        """Pages whose contents are in host memory."""
        return sum(sequence.swapped_pages for sequence in self._admitted)

    def add(self, request: GenerateRequest) -> DecodeSequence:
        """Queue a request.

        Raises:
            RequestTooLong: it can never fit.
            Overloaded: the queue is full.
        """
        prompt_tokens = len(request.token_ids)
        if prompt_tokens >= self._max_context_tokens:
            raise RequestTooLong(
                "token_ids",
                f"a prompt of {prompt_tokens} tokens leaves no room in a context of "
                f"{self._max_context_tokens}",
            )
        total = min(request.max_total_tokens, self._max_context_tokens)
        needed = self.num_pages(max(prompt_tokens, total - 1))  # the last token is never an input
        if needed > self._pages.num_total:
            raise RequestTooLong(
                "token_ids",
                f"{prompt_tokens} prompt tokens and {total - prompt_tokens} output tokens need "
                f"{needed} pages of K and V, but a decode worker has {self._pages.num_total} "
                f"({self._pages.num_total * self._page_tokens} tokens)",
            )
        if len(self._queued) >= self._config.max_queued_requests:
            raise Overloaded(f"{len(self._queued)} requests wait for decode", _RETRY_AFTER_S)
        sequence = DecodeSequence(request, needed)
        self._queued[sequence] = None
        return sequence

    def admit(self) -> list[DecodeSequence]:
        """Give pages to as many queued requests as possible; those become RESERVED.

        In order of arrival, and nobody is passed.
        """
        admitted: list[DecodeSequence] = []
        for sequence in list(self._queued):
            if len(self._admitted) >= self._config.max_running_requests:
                break
            if self._next_to_return() is not None or not self._reserve(sequence):
                break
            del self._queued[sequence]
            self._admitted[sequence] = None
            admitted.append(sequence)
        return admitted

    def start(self, sequence: DecodeSequence, first_token_id: int) -> None:
        """The prompt's K and V are in the pages: decode from the handed-over token on."""
        assert sequence.state is SequenceState.RESERVED
        sequence.token_ids.append(first_token_id)
        sequence.state = SequenceState.RUNNING

    def plan(self) -> Plan:
        """What comes next; it must be ended before the next plan."""
        assert not any(sequence.busy for sequence in self._admitted), "the last plan has not ended"
        if plan := self._plan_return():
            return plan
        rows: list[DecodeSequence] = []
        for sequence in self._admitted:
            if sequence.state is not SequenceState.RUNNING or sequence.paused:
                continue
            if not self._covers_position(sequence):
                if not self._may_take(1, sequence):
                    continue
                page_ids = self._take(1)
                if page_ids is None:
                    if leaving := self._choose_leaving(sequence):
                        return Plan(leaving=leaving)
                    continue
                sequence.page_ids += page_ids
            rows.append(sequence)
        if not rows and (leaving := self._paused_before_queue()):
            return Plan(leaving=leaving)
        for sequence in rows:
            written = sequence.page_ids[sequence.position // self._page_tokens]
            assert self._pages.references(written) == 1, f"page {written} is shared"
            sequence.busy = True
        return Plan(rows=tuple(rows))

    def end_step(self, rows: Sequence[DecodeSequence], token_ids: Sequence[int] | None) -> None:
        """Account for a step that ended.

        Args:
            rows: as planned.
            token_ids: one new token for each, or None when the step failed.
        """
        for place, sequence in enumerate(rows):
            sequence.busy = False
            if sequence.state is SequenceState.GONE:
                self._give_back(sequence, keep=token_ids is not None)
            elif token_ids is not None:
                sequence.token_ids.append(token_ids[place])

    def end_save(self, sequence: DecodeSequence, *, saved: bool) -> bool:
        """A request's pages have been copied to host memory, unless that failed.

        Returns:
            Whether the copy is needed; False when the request has ended meanwhile.
        """
        sequence.busy = False
        if sequence.state is SequenceState.GONE:
            self._give_back(sequence, keep=True)
            return False
        if not saved:
            return False
        self.num_preemptions += 1
        sequence.swapped_pages = len(sequence.page_ids)
        sequence.state = SequenceState.SWAPPED
        self._give_back(sequence, keep=False)
        return True

    def end_load(self, sequence: DecodeSequence, *, loaded: bool) -> None:
        """A request's K and V are back in its pages, unless that failed."""
        sequence.busy = False
        if sequence.state is SequenceState.GONE:
            self._give_back(sequence, keep=False)
        elif loaded:
            sequence.state = SequenceState.RUNNING
            sequence.swapped_pages = 0

    def pause(self, sequence: DecodeSequence) -> None:
        """Leave the request out of steps until `resume`."""
        sequence.paused = True

    def resume(self, sequence: DecodeSequence) -> None:
        """Undo `pause`."""
        sequence.paused = False

    def drop(self, sequence: DecodeSequence, *, keep: bool = True) -> None:
        """End the request in any state; its pages come back now or when the device thread is done.

        A RESERVED request may be dropped only once no transfer can write into its pages any more.
        A second call does nothing.

        Args:
            sequence: any.
            keep: its K and V are sound; the prefix cache may have them.
        """
        before, sequence.state = sequence.state, SequenceState.GONE
        if before is SequenceState.GONE:
            return
        if before is SequenceState.QUEUED:
            del self._queued[sequence]
            return
        del self._admitted[sequence]
        sequence.swapped_pages = 0
        if not sequence.busy:
            self._give_back(sequence, keep=keep and before is SequenceState.RUNNING)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` take."""
        return -(-num_tokens // self._page_tokens)

    def _reserve(self, sequence: DecodeSequence) -> bool:
        """Take pages for the prompt and a little more; False when there are too few for now."""
        prompt = sequence.request.token_ids
        wanted = self._first_pages(sequence)
        if not self._may_take(wanted):
            return False
        matched = self._prefix.match(prompt)
        fresh = self._take(wanted - len(matched), leave=self._num_growing())
        if fresh is None:
            self._pages.release(matched)
            return False
        sequence.page_ids = [*matched, *fresh]
        sequence.cached_pages = len(matched)
        sequence.order = next(self._orders)
        sequence.state = SequenceState.RESERVED
        return True

    def _first_pages(self, sequence: DecodeSequence) -> int:
        prompt_pages = self.num_pages(len(sequence.request.token_ids))
        return min(prompt_pages + self._config.growth_pages, sequence.max_pages)

    def _next_to_return(self) -> DecodeSequence | None:
        for sequence in self._admitted:
            if sequence.state is SequenceState.SWAPPED and not sequence.paused:
                return sequence
        return None

    def _plan_return(self) -> Plan | None:
        """Bring the first preempted request back; if it is the oldest of all, others make room."""
        returning = self._next_to_return()
        if returning is None:
            return None
        oldest = not any(
            sequence.state is SequenceState.RUNNING
            and not sequence.paused
            and sequence.order < returning.order
            for sequence in self._admitted
        )
        leave = 0 if oldest else self._num_growing() + 1
        page_ids = self._take(returning.swapped_pages, leave)
        if page_ids is not None:
            returning.page_ids = page_ids
            returning.busy = True
            return Plan(returning=returning)
        leaving = self._choose_leaving(returning) if oldest else None
        return None if leaving is None else Plan(leaving=leaving)

    def _covers_position(self, sequence: DecodeSequence) -> bool:
        return sequence.position < len(sequence.page_ids) * self._page_tokens

    def _choose_leaving(self, needy: DecodeSequence | None) -> DecodeSequence | None:
        """Who gives up its pages for ``needy``: somebody paused, else the one admitted last.

        None stands for those in the queue; only paused ones leave for them.
        """
        candidates = [
            sequence
            for sequence in self._admitted
            if sequence.state is SequenceState.RUNNING
            and sequence is not needy
            and (sequence.paused or (needy is not None and sequence.order > needy.order))
        ]
        if not candidates:
            return None
        leaving = max(candidates, key=lambda sequence: (sequence.paused, sequence.order))
        if self.pages_swapped + len(leaving.page_ids) > self._swap_pages:
            return None
        leaving.busy = True
        return leaving

    def _may_take(self, count: int, sequence: DecodeSequence | None = None) -> bool:
        """Whether all admitted earlier still run to their end if ``sequence`` gets more pages.

        Args:
            count: pages more.
            sequence: None for one that is not admitted yet.
        """
        later = count
        for other in reversed(self._admitted):
            older = sequence is None or other.order < sequence.order
            if older and other.max_pages + later > self._bound_pages:
                return False
            later += other.held_pages
        return True

    def _paused_before_queue(self) -> DecodeSequence | None:
        """A paused request that leaves for the first in the queue, when nothing else would move."""
        waiting = next(iter(self._queued), None)
        if waiting is None or len(self._admitted) >= self._config.max_running_requests:
            return None
        if any(not sequence.paused for sequence in self._admitted):
            return None  # it ends, or grows, or its transfer lands
        return self._choose_leaving(None) if self._may_take(self._first_pages(waiting)) else None

    def _num_growing(self) -> int:
        """Requests that may soon take another page."""
        return sum(
            sequence.state is SequenceState.RUNNING and len(sequence.page_ids) < sequence.max_pages
            for sequence in self._admitted
        )

    def _take(self, count: int, leave: int = 0) -> list[int] | None:
        """Take pages, evicting cached ones if need be; None unless ``leave`` more could be had."""
        if leave and self._pages.num_free + self._prefix.num_cached < count + leave:
            return None
        return allocate_with_eviction(self._pages, self._prefix, count)

    def _give_back(self, sequence: DecodeSequence, *, keep: bool) -> None:
        """Release the pages; ``keep``: their whole pages stay in the prefix cache."""
        if keep:
            computed = sequence.token_ids[: sequence.position]
            self._prefix.insert(computed, sequence.page_ids)
        self._pages.release(sequence.page_ids)
        sequence.page_ids = []
