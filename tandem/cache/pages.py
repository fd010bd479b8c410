"""Who holds which page. Pages are counted references; page 0 belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterable

_FREE = b"\1"
_HELD = b"\0"


class PageAllocator:
    """Hands out pages 1 to ``num_pages - 1`` and takes them back at their last release.

    One byte per page says whether it is free, so that looking for neighbours is a search for a
    run of equal bytes, whatever shape the free pages are in.
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
        self._is_free = bytearray(_HELD + _FREE * self.num_total)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return self.num_total - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` free pages with one reference each, or none at all when there are fewer.

        Returns:
            Ascending ids. Neighbours travel as one span, so they are one run where a free run is
            long enough, else runs of a half, a quarter and so on of what is wanted.
        """
        assert count >= 0
        if count > self.num_free:
            return None
        taken: list[int] = []
        length, begin = count, 0
        while len(taken) < count:
            start = self._is_free.find(_FREE * length, begin)
            if start < 0:
                length, begin = length // 2, 0
                continue
            begin = start + length
            self._is_free[start:begin] = _HELD * length
            taken += range(start, begin)
            if count - len(taken) < length:
                length, begin = count - len(taken), 0
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
        references, is_free = self._references, self._is_free
        for page in pages:
            left = references[page] - 1
            assert left >= 0, f"page {page} is free"
            references[page] = left
            if not left:
                is_free[page] = 1
                self.num_free += 1

    def references(self, page: int) -> int:
        """References that exist to ``page``; 0 when it is free."""
        return self._references[page]
