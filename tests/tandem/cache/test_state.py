"""Requests of every shape against the page allocator and the prefix cache, next to a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache, allocate_with_eviction

USABLE_PAGES = 9
PAGE_TOKENS = 2

Path = tuple[tuple[int, ...], ...]
"""The tokens of some leading pages, page by page."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@dataclass(frozen=True, eq=False)
class Request:
    token_ids: tuple[int, ...]
    page_ids: list[int]


def whole_pages(token_ids: tuple[int, ...], num_tokens: int) -> Path:
    ends = range(PAGE_TOKENS, num_tokens + 1, PAGE_TOKENS)
    return tuple(token_ids[end - PAGE_TOKENS : end] for end in ends)


@dataclass
class Kept:
    """What the model remembers of a cached page."""

    page: int
    last_use: int


class Model:
    """Page ownership and the cache, restated without any data structure to speak of."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.kept: dict[Path, Kept] = {}
        self.now = 0

    def free(self) -> set[int]:
        kept = {it.page for it in self.kept.values()}
        return {page for page in range(1, USABLE_PAGES + 1) if not self.held[page]} - kept

    def cached(self) -> int:
        return sum(not self.held[it.page] for it in self.kept.values())

    def match(self, token_ids: tuple[int, ...]) -> list[int]:
        self.now += 1
        pages = []
        path = whole_pages(token_ids, len(token_ids) - 1)
        for depth in range(1, len(path) + 1):
            known = self.kept.get(path[:depth])
            if known is None:
                break
            known.last_use = self.now
            pages.append(known.page)
        self.held.update(pages)
        return pages

    def insert(self, request: Request) -> None:
        self.now += 1
        path = whole_pages(request.token_ids, len(request.token_ids))
        for depth in range(1, len(path) + 1):
            known = self.kept.setdefault(path[:depth], Kept(request.page_ids[depth - 1], 0))
            known.last_use = self.now

    def victim(self) -> Path | None:
        """The least recently used page without followers that only the cache holds."""
        parents = {path[:-1] for path in self.kept}
        leaves = [
            path for path, it in self.kept.items() if path not in parents and not self.held[it.page]
        ]
        return min(leaves, key=lambda path: self.kept[path].last_use, default=None)

    def evict(self, count: int) -> int:
        for done in range(count):
            victim = self.victim()
            if victim is None:
                return done
            del self.kept[victim]
        return count

    def evictable(self) -> int:
        before = dict(self.kept)
        count = self.evict(USABLE_PAGES)
        self.kept = before
        return count


class CacheMachine(RuleBasedStateMachine):
    """Rules are what workers do; checks compare with the model after each."""

    computing = Bundle("computing")
    computed = Bundle("computed")
    loose = Bundle("loose")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(USABLE_PAGES + 1)
        self.prefix = PrefixCache(self.pages, PAGE_TOKENS)
        self.model = Model()
        self.content: dict[int, tuple[int, ...]] = {}

    def took(self, pages: list[int]) -> None:
        """Fresh pages came; the model has given up what the cache gave up for them."""
        free = self.model.free()
        assert pages == sorted(set(pages))
        assert set(pages) <= free
        runs = [set(range(first, first + len(pages))) for first in free]
        if any(run <= free for run in runs):
            assert set(pages) in runs
        self.model.held.update(pages)
        for page in pages:
            self.content.pop(page, None)

    def acquire(self, count: int) -> list[int] | None:
        """Allocate with eviction, and the same in the model."""
        missing = count - len(self.model.free())
        pages = allocate_with_eviction(self.pages, self.prefix, count)
        if missing > self.model.evictable():
            assert pages is None
            return None
        self.model.evict(max(0, missing))
        assert pages is not None
        assert len(pages) == count
        self.took(pages)
        return pages

    def let_go(self, pages: list[int]) -> None:
        self.pages.release(pages)
        self.model.held.subtract(pages)

    @rule(target=computing, token_ids=prompts)
    def start(self, token_ids: tuple[int, ...]) -> object:
        matched = self.prefix.match(token_ids)
        assert matched == self.model.match(token_ids)
        assert len(matched) * PAGE_TOKENS < len(token_ids)
        for page, tokens in zip(matched, whole_pages(token_ids, len(token_ids)), strict=False):
            assert self.content[page] == tokens
        fresh = self.acquire(-(-len(token_ids) // PAGE_TOKENS) - len(matched))
        if fresh is None:
            self.let_go(matched)
            return multiple()
        return Request(token_ids, matched + fresh)

    @rule(target=computed, request=consumes(computing))
    def finish(self, request: Request) -> Request:
        """All pages are written, and the cache hears of them."""
        starts = range(0, len(request.token_ids), PAGE_TOKENS)
        for page, start in zip(request.page_ids, starts, strict=True):
            self.content[page] = request.token_ids[start : start + PAGE_TOKENS]
        self.prefix.insert(request.token_ids, request.page_ids)
        self.model.insert(request)
        return request

    @rule(request=consumes(computing))
    def abort(self, request: Request) -> None:
        self.let_go(request.page_ids)

    @rule(request=consumes(computed))
    def end(self, request: Request) -> None:
        self.let_go(request.page_ids)

    @rule(token_ids=prompts)
    def serve(self, token_ids: tuple[int, ...]) -> None:
        request = self.start(token_ids)
        if isinstance(request, Request):
            self.finish(request)
            self.end(request)

    @rule(target=computed, token_ids=prompts, more=prompts)
    def race(self, token_ids: tuple[int, ...], more: tuple[int, ...]) -> object:
        """Two requests compute the same beginning at once; the one that wrote first ends first."""
        first = self.start(token_ids)
        second = self.start(token_ids + more)
        if isinstance(first, Request):
            self.finish(first)
        if isinstance(second, Request):
            self.finish(second)
        if isinstance(first, Request):
            self.end(first)
        return second

    @rule(token_ids=prompts)
    def touch(self, token_ids: tuple[int, ...]) -> None:
        """A hit that comes to nothing is a use."""
        matched = self.prefix.match(token_ids)
        assert matched == self.model.match(token_ids)
        self.let_go(matched)

    @rule(target=loose, count=st.integers(0, USABLE_PAGES + 1))
    def allocate(self, count: int) -> object:
        pages = self.pages.allocate(count)
        if count > len(self.model.free()):
            assert pages is None
            return multiple()
        assert pages is not None
        assert len(pages) == count
        self.took(pages)
        return pages

    @rule(target=loose, pages=loose)
    def retain(self, pages: list[int]) -> list[int]:
        """A second holder; nothing when the first one has left since."""
        live = [page for page in pages if self.model.held[page]]
        self.pages.retain(live)
        self.model.held.update(live)
        return live

    @rule(pages=consumes(loose))
    def release(self, pages: list[int]) -> None:
        self.let_go(pages)

    @rule(count=st.integers(0, USABLE_PAGES))
    def evict(self, count: int) -> None:
        assert self.prefix.evict(count) == self.model.evict(count)

    @invariant()
    def nobody_disagrees_about_pages(self) -> None:
        kept = [it.page for it in self.model.kept.values()]
        assert len(kept) == len(set(kept))
        for page in range(1, USABLE_PAGES + 1):
            assert self.pages.references(page) == self.model.held[page] + kept.count(page)
        assert self.pages.references(0) == 0
        assert self.pages.num_free == len(self.model.free())
        assert self.pages.num_held + self.pages.num_free == self.pages.num_total == USABLE_PAGES
        assert self.prefix.num_cached == self.model.cached()

    def teardown(self) -> None:
        """Once everybody has left, the cache can give everything back."""
        for page, count in self.model.held.items():
            self.pages.release([page] * count)
        assert self.prefix.evict(USABLE_PAGES) == len(self.model.kept)
        assert self.pages.num_free == USABLE_PAGES


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
