"""Which prompts are computed next, and who holds which pages. Synchronous: no clock, no threads.

The states a prompt walks:

    QUEUED     accepted; waits for its K/V stream to open and for pages for the whole prompt
    COMPUTING  holds all its pages; its chunks are computed in order
    SENDING    nothing is left to compute; the transfer may still read the pages
    GONE       the pages are back; whole pages of the prompt may live on in the prefix cache

A prompt starts only with pages for all of it, so those that compute always finish. Prompts start in
the order in which they came: one that waits for pages holds up all behind it, and is never passed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache, allocate_with_eviction
from tandem.config.tree import PrefillConfig
from tandem.errors import Overloaded, RequestTooLong
from tandem.requests import GenerateRequest

_RETRY_AFTER_S = 1.0


class PromptState(enum.Enum):
    """Where a prompt stands; see the module's docstring."""

    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"
    GONE = "gone"


class Prompt:
    """One prompt on its way through the worker; changed by the scheduler only."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.state = PromptState.QUEUED
        self.page_ids: list[int] = []
        """Pages of the whole prompt, in order; empty while queued."""
        self.cached_tokens = 0
        """Leading tokens whose K and V were found in the prefix cache."""
        self.num_computed = 0
        """Leading tokens whose K and V are in the pages."""
        self.sendable = False
        """Its K/V stream is open."""
        self.in_pass = False
        """A forward pass that is under way writes into its pages."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt that one forward pass computes."""

    prompt: Prompt
    start: int
    """Tokens before it; a multiple of the page."""
    end: int
    """Start of the next chunk; a multiple of the page, or the prompt's end."""
    page_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens to compute."""
        return self.prompt.request.token_ids[self.start : self.end]

    @property
    def page_ids(self) -> list[int]:
        """Pages of everything up to the chunk's end."""
        return self.prompt.page_ids[: -(-self.end // self.page_tokens)]

    @property
    def first_page(self) -> int:
        """Place of the chunk's first page among the prompt's pages."""
        return self.start // self.page_tokens

    @property
    def written_page_ids(self) -> list[int]:
        """Pages that the chunk's K and V go to."""
        return self.page_ids[self.first_page :]

    @property
    def is_first(self) -> bool:
        """Whether nothing of the prompt was computed before."""
        return self.start == self.prompt.cached_tokens

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.end == self.prompt.num_tokens


class PrefillScheduler:
    """Forms one forward pass after the other under a token budget, and accounts for pages."""

    def __init__(
        self, pages: PageAllocator, prefix: PrefixCache, page_tokens: int, config: PrefillConfig
    ) -> None:
        """Take over the accounting of ``pages``.

        Args:
            pages: nobody but ``prefix`` and this scheduler takes pages from it.
            prefix: cache over the same pages.
            page_tokens: tokens in one page; a divisor of ``config.chunk_tokens``.
            config: budget and bounds.
        """
        assert config.chunk_tokens % page_tokens == 0
        self._pages = pages
        self._prefix = prefix
        self._page_tokens = page_tokens
        self._config = config
        self._queued: dict[Prompt, None] = {}  # ordered, with cheap removal from the middle
        self._computing: dict[Prompt, None] = {}
        self._sending: set[Prompt] = set()

    @property
    def num_queued(self) -> int:
        """Prompts that hold nothing yet."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Prompts that hold pages."""
        return len(self._computing) + len(self._sending)

    @property
    def pages_used(self) -> int:
        """Pages that prompts hold; those that only the prefix cache holds do not count."""
        return self._pages.num_held - self._prefix.num_cached

    @property
    def pages_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._prefix.num_cached

    def add(self, request: GenerateRequest) -> Prompt:
        """Queue a prompt; it starts some time after `open`.

        Raises:
            RequestTooLong: it can never fit.
            Overloaded: the queue is full.
        """
        needed = self._num_pages(len(request.token_ids))
        if needed > self._pages.num_total:
            raise RequestTooLong(
                "token_ids",
                f"a prompt of {len(request.token_ids)} tokens needs {needed} pages of K and V, "
                f"but a prefill worker has {self._pages.num_total} "
                f"({self._pages.num_total * self._page_tokens} tokens)",
            )
        if len(self._queued) >= self._config.max_queued_requests:
            raise Overloaded(f"{len(self._queued)} prompts wait for prefill", _RETRY_AFTER_S)
        prompt = Prompt(request)
        self._queued[prompt] = None
        return prompt

    def open(self, prompt: Prompt) -> None:
        """The prompt's K/V stream is open: it may start."""
        prompt.sendable = True

    def plan(self) -> list[Chunk]:
        """Form the next forward pass, or none when nothing can be computed.

        Prompts under way come first, then those that start now, each in order of arrival. The
        pass must be ended with `end_pass` before the next is planned.
        """
        chunks: list[Chunk] = []
        budget = self._config.chunk_tokens
        for prompt in [*self._computing, *self._queued]:
            if len(chunks) == self._config.max_batch_requests or budget == 0:
                break
            if prompt.state is PromptState.QUEUED:
                if not prompt.sendable:
                    continue
                if not self._start(prompt):
                    break
            assert not prompt.in_pass, "the last pass has not ended"
            chunk = self._cut(prompt, budget)
            if chunk is not None:
                prompt.in_pass = True
                budget -= chunk.end - chunk.start
                chunks.append(chunk)
        return chunks

    def end_pass(self, chunks: Sequence[Chunk], *, computed: bool) -> list[Prompt]:
        """Account for a pass that ended.

        Args:
            chunks: as planned.
            computed: their K and V are in the pages; else the pass failed.

        Returns:
            Prompts that are complete now and were not stopped meanwhile; they are SENDING.
        """
        complete = []
        for chunk in chunks:
            prompt = chunk.prompt
            prompt.in_pass = False
            if prompt.state is PromptState.GONE:
                self._pages.release(prompt.page_ids)
                continue
            if not computed:
                continue
            prompt.num_computed = chunk.end
            if chunk.is_last:
                self._prefix.insert(prompt.request.token_ids, prompt.page_ids)
                if prompt.state is PromptState.COMPUTING:
                    complete.append(prompt)
                    self.stop(prompt)
        return complete

    def stop(self, prompt: Prompt) -> None:
        """Compute nothing more of the prompt; it keeps its pages until `free`."""
        if prompt.state is PromptState.QUEUED:
            del self._queued[prompt]
        elif prompt.state is PromptState.COMPUTING:
            del self._computing[prompt]
        else:
            return
        prompt.state = PromptState.SENDING
        self._sending.add(prompt)

    def free(self, prompt: Prompt) -> None:
        """Give the prompt's pages back, now or when the pass that writes them ends.

        Only once nothing reads them any more. A second call does nothing.
        """
        self.stop(prompt)
        if prompt.state is PromptState.GONE:
            return
        prompt.state = PromptState.GONE
        self._sending.remove(prompt)
        if not prompt.in_pass:
            self._pages.release(prompt.page_ids)

    def _start(self, prompt: Prompt) -> bool:
        """Take pages for all of the prompt; False when there are too few for now."""
        matched = self._prefix.match(prompt.request.token_ids)
        fresh = allocate_with_eviction(
            self._pages, self._prefix, self._num_pages(prompt.num_tokens) - len(matched)
        )
        if fresh is None:
            self._pages.release(matched)
            return False
        prompt.page_ids = [*matched, *fresh]
        prompt.cached_tokens = prompt.num_computed = len(matched) * self._page_tokens
        prompt.state = PromptState.COMPUTING
        del self._queued[prompt]
        self._computing[prompt] = None
        return True

    def _cut(self, prompt: Prompt, budget: int) -> Chunk | None:
        start = prompt.num_computed
        end = min(prompt.num_tokens, start + budget)
        if end < prompt.num_tokens:
            end -= end % self._page_tokens
        return Chunk(prompt, start, end, self._page_tokens) if end > start else None

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)
