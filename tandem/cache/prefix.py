"""Reuse of K and V between prompts that begin alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tandem.cache.pages import PageAllocator


class _Node:
    """One whole page of tokens, at its place after the pages of its ancestors."""

    __slots__ = ("children", "page", "parent", "token_ids")

    def __init__(self, parent: _Node | None, token_ids: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.page = page
        self.children: dict[tuple[int, ...], _Node] = {}


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
        self.page_tokens = page_tokens
        """Tokens in one page."""
        self._enabled = enabled
        self._root = _Node(None, (), 0)
        self._by_use: dict[_Node, None] = {}
        """All nodes, least recently used first, and every node before its parent."""

    @property
    def num_cached(self) -> int:
        """Pages that nobody but the cache holds.

        Now and then one of them has to stay: two requests computed the same page at once, the
        cache kept the first one's, and the second one still holds a page that comes after it.
        """
        return sum(self._pages.references(node.page) == 1 for node in self._by_use)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Find the leading pages of a prompt and retain them for the caller.

        Returns:
            Page ids in order. At least the last token is left to compute: its logits are needed.
        """
        path: list[_Node] = []
        node = self._root
        for key in self._whole_pages(token_ids, len(token_ids) - 1):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        self._use(path)
        matched = [node.page for node in path]
        self._pages.retain(matched)
        return matched

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        """Keep whole pages of computed tokens; those that are known already stay as they are.

        Args:
            token_ids: those whose K and V are in the pages.
            page_ids: its pages in order, held by the caller.
        """
        if not self._enabled:
            return
        path: list[_Node] = []
        node = self._root
        # strict=False: the last page may be partly filled
        for key, page in zip(self._whole_pages(token_ids, len(token_ids)), page_ids, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, page)
                self._pages.retain([page])
            path.append(child)
            node = child
        self._use(path)

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that nobody but the cache holds; returns how many it freed."""
        victims = self._victims(count)
        self._forget(victims)
        return len(victims)

    def make_room(self, count: int) -> bool:
        """Free ``count`` pages that nobody but the cache holds, or none when there are fewer."""
        victims = self._victims(count)
        if len(victims) < count:
            return False
        self._forget(victims)
        return True

    def _victims(self, count: int) -> Collection[_Node]:
        """The next ``count`` nodes to go, or all that can: a page goes after all its children."""
        victims: dict[_Node, None] = {}
        for node in self._by_use:  # one pass is enough: a parent comes after its children
            if len(victims) >= count:
                break
            alone = self._pages.references(node.page) == 1
            if alone and all(child in victims for child in node.children.values()):
                victims[node] = None
        return victims

    def _forget(self, nodes: Collection[_Node]) -> None:
        for node in nodes:
            del self._by_use[node]
            assert node.parent is not None
            del node.parent.children[node.token_ids]
        self._pages.release(node.page for node in nodes)

    def _use(self, path: Sequence[_Node]) -> None:
        """Make the nodes of a path from the root the most recently used, the deepest first."""
        for node in reversed(path):
            self._by_use.pop(node, None)
            self._by_use[node] = None

    def _whole_pages(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, ...]]:
        """Tokens of each page that lies wholly within the first ``num_tokens``."""
        for end in range(self.page_tokens, num_tokens + 1, self.page_tokens):
            yield tuple(token_ids[end - self.page_tokens : end])


def allocate_with_eviction(
    pages: PageAllocator, prefix: PrefixCache, count: int
) -> list[int] | None:
    """Take ``count`` pages, at the cost of cached ones if need be; None when even that is too few.

    A request that cannot start for want of pages leaves the cache as it is.
    """
    missing = count - pages.num_free
    if missing > 0 and not prefix.make_room(missing):
        return None
    return pages.allocate(count)
