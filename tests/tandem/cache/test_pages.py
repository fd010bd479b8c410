"""Who holds which page, and which pages come together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.pages import PageAllocator


def test_page_0_is_nobodys() -> None:
    pages = PageAllocator(5)
    assert (pages.num_total, pages.num_free, pages.num_held) == (4, 4, 0)
    assert pages.allocate(4) == [1, 2, 3, 4]
    assert (pages.num_total, pages.num_free, pages.num_held) == (4, 0, 4)


def test_too_few_pages_is_an_answer_and_takes_none() -> None:
    pages = PageAllocator(5)
    held = pages.allocate(2)
    assert held == [1, 2]
    assert pages.allocate(3) is None
    assert pages.num_free == 2
    assert pages.allocate(2) == [3, 4]
    assert pages.allocate(1) is None


def test_nothing_is_a_count_like_any_other() -> None:
    pages = PageAllocator(2)
    assert pages.allocate(0) == []
    assert pages.allocate(1) == [1]
    assert pages.allocate(0) == []


def test_a_page_is_free_after_its_last_release() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(2)
    assert held is not None
    pages.retain(held)
    pages.release(held)
    assert pages.num_held == 2
    assert [pages.references(page) for page in range(4)] == [0, 1, 1, 0]
    pages.release(held)
    assert pages.num_held == 0
    assert pages.allocate(3) == [1, 2, 3]


def test_one_release_may_name_a_page_as_often_as_it_is_held() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(1)
    assert held == [1]
    pages.retain([1, 1])
    pages.release([1, 1, 1])
    assert pages.num_free == 2


@pytest.mark.parametrize("page", [0, 1])
def test_a_free_page_is_neither_released_nor_retained(page: int) -> None:
    pages = PageAllocator(3)
    with pytest.raises(AssertionError):
        pages.release([page])
    with pytest.raises(AssertionError):
        pages.retain([page])


def test_neighbours_are_preferred_to_holes() -> None:
    pages = PageAllocator(101)
    held = pages.allocate(100)
    assert held is not None
    pages.release(range(1, 40, 2))  # holes of one page
    pages.release(range(50, 58))
    pages.release(range(70, 100))
    assert pages.allocate(8) == list(range(50, 58))
    assert pages.allocate(20) == list(range(70, 90))


def test_scattered_pages_come_in_few_ascending_runs() -> None:
    pages = PageAllocator(101)
    held = pages.allocate(100)
    assert held is not None
    pages.release(range(1, 30, 2))
    pages.release(range(40, 50))
    pages.release(range(60, 68))
    taken = pages.allocate(18)
    assert taken is not None
    assert taken == sorted(taken)
    assert {*range(40, 49), *range(60, 68)} <= set(taken)
    assert runs(taken) <= 3
    everything = pages.allocate(pages.num_free)
    assert everything is not None
    assert pages.num_free == 0
    assert not set(everything) & set(taken)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 40))
def test_any_shape_of_free_pages(free: list[bool], count: int) -> None:
    pages = PageAllocator(len(free) + 1)
    everything = pages.allocate(len(free))
    assert everything is not None
    ours = [page for page, is_free in zip(everything, free, strict=True) if is_free]
    pages.release(ours)
    taken = pages.allocate(count)
    if count > len(ours):
        assert taken is None
        assert pages.num_free == len(ours)
        return
    assert taken is not None
    assert len(taken) == count
    assert taken == sorted(set(taken) & set(ours))
    assert pages.num_free == len(ours) - count
    if any(set(range(first, first + count)) <= set(ours) for first in ours):
        assert runs(taken) == 1


def runs(pages: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in itertools.pairwise(pages))
