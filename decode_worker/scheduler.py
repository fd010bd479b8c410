"""Which requests take part in the next decode step, and who holds which pages. Synchronous.

The states a request walks:

    QUEUED    accepted; waits for pages and for its turn
    RESERVED  holds pages for prompt and output; its K and V are on their way
    RUNNING   one row of every step, unless it is paused because its reader is slow
    GONE      the pages are back, or come back when the step that uses them ends

A request is admitted only with pages for its prompt and its whole output, so one that runs never
waits for another: no set of requests can block one another, at the price of pages that short
answers leave unused. Admission is in order of arrival and passes nobody.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem.cache.pages import PageAllocator
from tandem.config.tree import DecodeConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest

_RETRY_AFTER_S = 1.0


class SequenceState(enum.Enum):
    """Where a request stands; see the module's docstring."""

    QUEUED = "queued"
    RESERVED = "reserved"
    RUNNING = "running"
    GONE = "gone"


class DecodeSequence:
    """One request on its way through the worker; changed by the scheduler only."""

    def __init__(self, request: GenerateRequest, num_pages: int) -> None:
        self.request = request
        self.num_pages = num_pages
        """Pages that prompt and output need at most."""
        self.state = SequenceState.QUEUED
        self.page_ids: list[int] = []
        """Empty while queued."""
        self.token_id = -1
        """Input of the next step: the last token, whose K and V are not in the pages yet."""
        self.position = len(request.token_ids)
        """Where that token stands in the sequence; also the tokens whose K and V are there."""
        self.paused = False
        self.in_step = False
        """A step that is under way uses its pages."""


class DecodeScheduler:
    """Admits requests, forms one step after the other, and accounts for pages."""

    def __init__(
        self,
        pages: PageAllocator,
        page_tokens: int,
        max_context_tokens: int,
        config: DecodeConfig,
    ) -> None:
        """Take over the accounting of ``pages``.

        Args:
            pages: nobody else takes pages from it.
            page_tokens: tokens in one page.
            max_context_tokens: prompt and output together; generation ends there.
            config: bounds.
        """
        self._pages = pages
        self._page_tokens = page_tokens
        self._max_context_tokens = max_context_tokens
        self._config = config
        self._queued: dict[DecodeSequence, None] = {}  # ordered, with cheap removal
        self._reserved: set[DecodeSequence] = set()
        self._running: dict[DecodeSequence, None] = {}

    @property
    def num_queued(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Requests that hold pages, whether their K and V have arrived or not."""
        return len(self._reserved) + len(self._running)

    @property
    def pages_used(self) -> int:
        """Pages that requests hold."""
        return self._pages.num_held

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
        """Give pages to as many queued requests as possible; those become RESERVED."""
        admitted: list[DecodeSequence] = []
        for sequence in list(self._queued):
            if self.num_running >= self._config.max_running_requests:
                break
            page_ids = self._pages.allocate(sequence.num_pages)
            if page_ids is None:
                break
            sequence.page_ids = page_ids
            sequence.state = SequenceState.RESERVED
            del self._queued[sequence]
            self._reserved.add(sequence)
            admitted.append(sequence)
        return admitted

    def start(self, sequence: DecodeSequence, first_token_id: int) -> None:
        """The prompt's K and V are in the pages: decode from the handed-over token on."""
        assert sequence.state is SequenceState.RESERVED
        sequence.token_id = first_token_id
        sequence.state = SequenceState.RUNNING
        self._reserved.remove(sequence)
        self._running[sequence] = None

    def plan(self) -> list[DecodeSequence]:
        """The rows of the next step; `end_step` must follow before the next plan."""
        rows = [sequence for sequence in self._running if not sequence.paused]
        for sequence in rows:
            assert not sequence.in_step, "the last step has not ended"
            sequence.in_step = True
        return rows

    def end_step(self, rows: Sequence[DecodeSequence], token_ids: Sequence[int] | None) -> None:
        """Account for a step that ended.

        Args:
            rows: as planned.
            token_ids: one new token for each, or None when the step failed.
        """
        for place, sequence in enumerate(rows):
            sequence.in_step = False
            if sequence.state is SequenceState.GONE:
                self._pages.release(sequence.page_ids)
            elif token_ids is not None:
                sequence.token_id = token_ids[place]
                sequence.position += 1

    def pause(self, sequence: DecodeSequence) -> None:
        """Leave the request out of steps until `resume`."""
        sequence.paused = True

    def resume(self, sequence: DecodeSequence) -> None:
        """Undo `pause`."""
        sequence.paused = False

    def drop(self, sequence: DecodeSequence) -> None:
        """End the request in any state; its pages come back now or when its step ends.

        A RESERVED request may be dropped only once no transfer can write into its pages any more.
        A second call does nothing.
        """
        match sequence.state:
            case SequenceState.QUEUED:
                del self._queued[sequence]
            case SequenceState.RESERVED:
                self._reserved.remove(sequence)
            case SequenceState.RUNNING:
                del self._running[sequence]
            case SequenceState.GONE:
                return
        sequence.state = SequenceState.GONE
        if not sequence.in_step:
            self._pages.release(sequence.page_ids)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` take."""
        return -(-num_tokens // self._page_tokens)
