"""What the prefix cache finds, keeps and gives up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache, allocate_with_eviction

PAGE = 4


class Cache:
    """A pool and its prefix cache, with prompts that come and go."""

    def __init__(self, usable_pages: int = 12, enabled: bool = True) -> None:
        self.pages = PageAllocator(usable_pages + 1)
        self.prefix = PrefixCache(self.pages, PAGE, enabled)

    def compute(self, token_ids: Sequence[int]) -> list[int]:
        """Do what a prompt does that reuses nothing, and return its pages, released."""
        page_ids = self.pages.allocate(-(-len(token_ids) // PAGE))
        assert page_ids is not None
        self.prefix.insert(token_ids, page_ids)
        self.pages.release(page_ids)
        return page_ids

    def hit(self, token_ids: Sequence[int]) -> list[int]:
        """What the cache finds, without holding it."""
        found = self.prefix.match(token_ids)
        self.pages.release(found)
        return found


def prompt(*pages: int, rest: int = 0) -> list[int]:
    """Whole pages, each of four tokens of its own, and some tokens more."""
    return [100 * page + offset for page in pages for offset in range(PAGE)] + [7] * rest


def test_a_prompt_with_the_same_beginning_gets_the_same_pages() -> None:
    cache = Cache()
    first, second = cache.compute(prompt(1, 2))
    assert cache.hit(prompt(1, 2, 3)) == [first, second]
    assert cache.hit(prompt(1, 3, 2)) == [first]
    assert cache.hit(prompt(2, 1, 3)) == []


def test_the_last_token_is_always_left_to_compute() -> None:
    cache = Cache()
    first, second = cache.compute(prompt(1, 2))
    assert cache.hit(prompt(1, 2)) == [first]
    assert cache.hit(prompt(1, 2, rest=1)) == [first, second]
    assert cache.hit(prompt(1)) == []
    assert cache.hit(prompt(1)[:1]) == []
    assert cache.hit([]) == []


def test_a_page_that_is_partly_filled_is_not_kept() -> None:
    cache = Cache()
    page_ids = cache.compute(prompt(1, rest=3))
    assert cache.prefix.num_cached == 1
    assert cache.hit(prompt(1, rest=3)) == page_ids[:1]


def test_one_differing_token_is_a_miss_from_there_on() -> None:
    cache = Cache()
    page_ids = cache.compute(prompt(1, 2, 3))
    for place in range(3 * PAGE):
        other = prompt(1, 2, 3, rest=1)
        other[place] += 1
        assert cache.hit(other) == page_ids[: place // PAGE]


def test_the_same_tokens_elsewhere_are_not_the_same_page() -> None:
    cache = Cache()
    first, second = cache.compute(prompt(5, 5))
    assert first != second
    assert cache.hit(prompt(5, 5, 5)) == [first, second]
    assert cache.hit(prompt(5, 6)) == [first]


def test_what_is_known_already_stays_as_it_is() -> None:
    cache = Cache()
    ours = cache.pages.allocate(2)
    theirs = cache.pages.allocate(3)
    assert ours is not None
    assert theirs is not None
    cache.prefix.insert(prompt(1, 2), ours)
    cache.prefix.insert(prompt(1, 2, 3), theirs)
    cache.pages.release(ours)
    cache.pages.release(theirs)
    assert cache.prefix.num_cached == cache.pages.num_held == 3
    assert cache.hit(prompt(1, 2, 3, rest=1)) == [*ours, theirs[2]]


def test_matched_pages_are_the_callers_until_released() -> None:
    cache = Cache(usable_pages=2)
    page_ids = cache.compute(prompt(1, 2))
    held = cache.prefix.match(prompt(1, 2, 3))
    assert held == page_ids
    assert cache.prefix.num_cached == 0
    assert cache.prefix.evict(5) == 0
    assert allocate_with_eviction(cache.pages, cache.prefix, 1) is None
    cache.pages.release(held)
    assert cache.prefix.num_cached == 2
    assert cache.prefix.evict(5) == 2
    assert cache.pages.num_held == 0


def test_least_recently_used_leaves_go_first() -> None:
    cache = Cache()
    a, b = cache.compute(prompt(1, 2))
    (c,) = cache.compute(prompt(3))
    d = cache.compute(prompt(1, 4))[1]
    assert cache.prefix.num_cached == 4
    cache.hit(prompt(3, 9))
    assert cache.prefix.evict(1) == 1
    assert cache.hit(prompt(1, 2, 9)) == [a]
    assert b not in cache.hit(prompt(1, 2, 9))
    assert cache.hit(prompt(1, 4, 9)) == [a, d]
    assert cache.prefix.evict(1) == 1
    assert cache.hit(prompt(3, 9)) == []
    assert c not in cache.hit(prompt(1, 4, 9))
    assert cache.prefix.evict(2) == 2
    assert cache.pages.num_held == cache.prefix.num_cached == 0


def test_a_parent_outlives_its_children() -> None:
    cache = Cache()
    page_ids = cache.compute(prompt(1, 2, 3, 4))
    for left in (3, 2, 1, 0):
        assert cache.prefix.evict(1) == 1
        assert cache.hit(prompt(1, 2, 3, 4, 5)) == page_ids[:left]


def test_a_page_under_one_that_is_in_use_stays() -> None:
    """Two equal prompts at once: the second one's pages follow the first one's in the tree."""
    cache = Cache()
    first = cache.pages.allocate(1)
    second = cache.pages.allocate(2)
    assert first is not None
    assert second is not None
    cache.prefix.insert(prompt(1), first)
    cache.prefix.insert(prompt(1, 2), second)
    cache.pages.release(first)
    assert cache.prefix.num_cached == 1
    assert cache.prefix.evict(3) == 0
    cache.pages.release(second)
    assert cache.prefix.evict(3) == 2
    assert cache.pages.num_held == 0


def test_a_request_that_cannot_start_evicts_nothing() -> None:
    cache = Cache(usable_pages=4)
    cache.compute(prompt(1, 2))
    held = cache.pages.allocate(1)
    assert allocate_with_eviction(cache.pages, cache.prefix, 4) is None
    assert cache.prefix.num_cached == 2
    assert cache.pages.num_free == 1
    assert held is not None
    cache.pages.release(held)
    assert allocate_with_eviction(cache.pages, cache.prefix, 3) is not None
    assert cache.prefix.num_cached == 1, "no more is evicted than is missing"


def test_a_hit_is_a_use() -> None:
    cache = Cache()
    for page in (1, 2, 3):
        cache.compute(prompt(page))
    cache.hit(prompt(1, 9))
    assert cache.prefix.evict(2) == 2
    assert cache.hit(prompt(2, 9)) == cache.hit(prompt(3, 9)) == []
    assert len(cache.hit(prompt(1, 9))) == 1


def test_nothing_is_evicted_in_vain_where_a_page_has_to_stay() -> None:
    """A page that only the cache holds stays while somebody holds one that comes after it."""
    cache = Cache(usable_pages=6)
    first, second = cache.pages.allocate(1), cache.pages.allocate(2)
    assert first is not None
    assert second is not None
    cache.prefix.insert(prompt(1), first)
    cache.prefix.insert(prompt(1, 2), second)
    cache.pages.release(first)
    cache.compute(prompt(3))
    assert (cache.pages.num_free, cache.prefix.num_cached) == (2, 2)
    assert allocate_with_eviction(cache.pages, cache.prefix, 4) is None
    assert len(cache.hit(prompt(3, 9))) == 1
    assert allocate_with_eviction(cache.pages, cache.prefix, 3) is not None
    assert cache.hit(prompt(3, 9)) == []
    cache.pages.release(second)
    assert allocate_with_eviction(cache.pages, cache.prefix, 3) is not None
    assert cache.pages.num_free == 0


@pytest.mark.parametrize("count", [0, 1, 4])
def test_free_pages_are_taken_before_cached_ones(count: int) -> None:
    cache = Cache(usable_pages=6)
    cache.compute(prompt(1, 2))
    taken = allocate_with_eviction(cache.pages, cache.prefix, count)
    assert taken is not None
    assert len(taken) == count
    assert cache.prefix.num_cached == 2


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    cache = Cache(enabled=False)
    cache.compute(prompt(1, 2))
    assert cache.pages.num_held == cache.prefix.num_cached == 0
    assert cache.hit(prompt(1, 2, 3)) == []
    assert cache.prefix.evict(1) == 0
