"""Workers whose pages differ in size: the smaller of the two sizes travels.

A page of 64 tokens is, byte for byte, four consecutive pages of 16. So the worker with the larger
pages presents its pool to this peer as one of more and smaller pages, and nothing is rearranged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVTarget
from kv_transfer.transport import RegisteredMemory
from tandem.cache.groups import CacheGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Paging:
    """Our pool in the pages that travel between us and one peer."""

    page_tokens: int
    """Tokens in a travelling page."""
    groups: tuple[CacheGroup, ...]
    """Our groups in travelling pages."""
    memory: RegisteredMemory
    """Our buffers in travelling pages."""
    ratio: int
    """Travelling pages in one page of ours."""
    their_ratio: int
    """Travelling pages in one page of the peer's."""

    @classmethod
    def between(cls, ours: KVLayout, theirs: KVLayout, memory: RegisteredMemory) -> Paging:
        """Agree on the smaller pages.

        Args:
            ours: our layout.
            theirs: the peer's, compatible with ours.
            memory: our buffers.
        """
        page_tokens = min(ours.page_tokens, theirs.page_tokens)
        ratio = ours.page_tokens // page_tokens
        if ratio > 1:
            memory = RegisteredMemory(
                [
                    replace(
                        buffer,
                        group=replace(buffer.group, page_tokens=page_tokens),
                        num_pages=buffer.num_pages * ratio,
                    )
                    for buffer in memory.buffers
                ]
            )
        return cls(
            page_tokens=page_tokens,
            groups=tuple(replace(group, page_tokens=page_tokens) for group in ours.groups),
            memory=memory,
            ratio=ratio,
            their_ratio=theirs.page_tokens // page_tokens,
        )

    def ids(self, page_ids: Sequence[int]) -> tuple[int, ...]:
        """Name the travelling pages that our pages are made of."""
        parts = range(self.ratio)
        return tuple(page * self.ratio + part for page in page_ids for part in parts)

    def sent(
        self, page_ids: Sequence[int], first_page: int, num_pages: int
    ) -> tuple[Sequence[int], int]:
        """Convert pages of ours that are to be sent.

        Args:
            page_ids: consecutive pages of a prompt.
            first_page: position of the first of them.
            num_pages: travelling pages of the whole prompt; what the last page of ours has beyond
                them is left out.

        Returns:
            Travelling pages and the position of the first.
        """
        if self.ratio == 1:
            return page_ids, first_page
        ids, first = self.ids(page_ids), first_page * self.ratio
        if 0 < first + len(ids) - num_pages < self.ratio:
            ids = ids[: num_pages - first]
        return ids, first

    def target(self, target: KVTarget, ratio: int) -> KVTarget:
        """Convert a target's counts.

        Args:
            target: in pages of the decode worker.
            ratio: travelling pages in one of those.
        """
        num_pages = -(-target.num_tokens // self.page_tokens)
        first_page = min(num_pages, target.first_page * ratio)
        return replace(target, num_pages=num_pages, first_page=first_page)
