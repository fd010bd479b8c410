"""Reuse of K and V between prompts that begin alike."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from tandem.cache.pages import PageAllocator


class _Node:
    """One whole page of tokens, at its place after the pages of its ancestors."""

    __slots__ = ("children", "last_use", "page", "parent", "token_ids")

    def __init__(self, parent: _Node | None, token_ids: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.page = page
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_use = 0


class PrefixCache:
    """A tree of whole pages, keyed by the very tokens in them: a hit is never a guess.

    The cache holds one reference to each of its pages, so a page outlives the request that
    computed it until `evict` needs it, least recently used first and leaves before their parents.
    """

    def __init__(self, pages: PageAllocator, page_tokens: int, enabled: bool = True) -> None:
        """Share ``pages`` with the requests.

        Args:
            pages: holds the reference counts.
            page_tokens: tokens in one page.
            enabled: when False nothing is ever found or kept.
        """
        self._pages = pages
        self._page_tokens = page_tokens
        self._enabled = enabled
        self._root = _Node(None, (), 0)
        self._nodes: set[_Node] = set()
        self._clock = itertools.count(1)

    @property
    def num_cached(self) -> int:
        """Pages that nobody but the cache holds."""
        return sum(self._pages.references(node.page) == 1 for node in self._nodes)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Find the leading pages of a prompt and retain them for the caller.

        Returns:
            Page ids in order. At least the last token is left to compute: its logits are needed.
        """
        now = next(self._clock)
        matched = []
        node = self._root
        for key in self._whole_pages(token_ids, len(token_ids) - 1):
            child = node.children.get(key)
            if child is None:
                break
            child.last_use = now
            matched.append(child.page)
            node = child
        self._pages.retain(matched)
        return matched

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        """Keep the whole pages of a computed prompt; those that are known already stay as they are.

        Args:
            token_ids: the prompt.
            page_ids: its pages in order, held by the caller.
        """
        if not self._enabled:
            return
        now = next(self._clock)
        node = self._root
        # strict=False: the prompt's last page may be partly filled
        for key, page in zip(self._whole_pages(token_ids, len(token_ids)), page_ids, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, page)
                self._nodes.add(child)
                self._pages.retain([page])
            child.last_use = now
            node = child

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that nobody but the cache holds; returns how many it freed."""
        evictable = [
            (node.last_use, node.page, node) for node in self._nodes if self._is_evictable(node)
        ]
        heapq.heapify(evictable)
        freed = 0
        while evictable and freed < count:
            *_, node = heapq.heappop(evictable)
            parent = node.parent
            assert parent is not None
            del parent.children[node.token_ids]
            self._nodes.remove(node)
            self._pages.release([node.page])
            freed += 1
            if parent is not self._root and self._is_evictable(parent):
                heapq.heappush(evictable, (parent.last_use, parent.page, parent))
        return freed

    def _is_evictable(self, node: _Node) -> bool:
        return not node.children and self._pages.references(node.page) == 1

    def _whole_pages(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, ...]]:
        """Tokens of each page that lies wholly within the first ``num_tokens``."""
        for end in range(self._page_tokens, num_tokens + 1, self._page_tokens):
            yield tuple(token_ids[end - self._page_tokens : end])


def allocate_with_eviction(
    pages: PageAllocator, prefix: PrefixCache, count: int
) -> list[int] | None:
    """Take ``count`` pages, at the cost of cached ones if need be; None when even that is too few.

    Nothing is evicted in vain: a request that cannot start leaves the cache as it is.
    """
    missing = count - pages.num_free
    if missing > 0:
        if missing > prefix.num_cached:
            return None
        prefix.evict(missing)
    return pages.allocate(count)
