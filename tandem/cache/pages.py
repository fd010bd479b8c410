"""Who holds which page. Pages are counted references; page 0 belongs to nobody."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class PageAllocator:
    """Hands out pages 1 to ``num_pages - 1`` and takes them back at their last release.

    Free pages are kept as runs of consecutive ids, so that a request gets neighbours where there
    are any: neighbouring pages travel as one span.
    """

    def __init__(self, num_pages: int) -> None:
        """Own the pages of a pool.

        Args:
            num_pages: pages of the pool, page 0 included; at least 2.
        """
        assert num_pages > 1, "page 0 alone holds nothing"
        self.num_total = num_pages - 1
        """Pages that can be handed out."""
        self.num_free = self.num_total
        self._references = [0] * num_pages
        self._run_starts = [1]
        self._run_lengths = {1: self.num_total}

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return self.num_total - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` free pages with one reference each, or none at all when there are fewer.

        Returns:
            Ascending ids: one run where a free run is long enough, else as few runs as possible.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            start = self._best_run(count - len(taken))
            length = min(count - len(taken), self._run_lengths[start])
            self._cut_run(start, length)
            taken += range(start, start + length)
        taken.sort()
        for page in taken:
            self._references[page] = 1
        self.num_free -= count
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each of some held pages."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page; those without any become free."""
        freed = []
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if not self._references[page]:
                freed.append(page)
        self.num_free += len(freed)
        freed.sort()
        first = 0
        for place in range(1, len(freed) + 1):
            if place == len(freed) or freed[place] != freed[place - 1] + 1:
                self._add_run(freed[first], place - first)
                first = place

    def references(self, page: int) -> int:
        """References that exist to ``page``; 0 when it is free."""
        return self._references[page]

    def _best_run(self, count: int) -> int:
        """The first run that is long enough, or the longest."""
        longest = self._run_starts[0]
        for start in self._run_starts:
            if self._run_lengths[start] >= count:
                return start
            if self._run_lengths[start] > self._run_lengths[longest]:
                longest = start
        return longest

    def _cut_run(self, start: int, length: int) -> None:
        place = bisect_left(self._run_starts, start)
        rest = self._run_lengths.pop(start) - length
        if rest:
            self._run_starts[place] = start + length
            self._run_lengths[start + length] = rest
        else:
            del self._run_starts[place]

    def _add_run(self, start: int, length: int) -> None:
        place = bisect_right(self._run_starts, start)
        if place < len(self._run_starts) and self._run_starts[place] == start + length:
            length += self._run_lengths.pop(self._run_starts.pop(place))
        if place:
            before = self._run_starts[place - 1]
            if before + self._run_lengths[before] == start:
                self._run_lengths[before] += length
                return
        self._run_starts.insert(place, start)
        self._run_lengths[start] = length
