"""Cutting a layer's pages into frames, and pages into spans of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kv_transfer.transport import RegisteredMemory, Span
from tandem.cache.groups import CacheGroup

FRAME_BYTES = 2 << 20
"""Payloads are cut near this size: larger ones outgrow the processor's caches."""
MAX_FRAME_PAGES = 1024
"""Pages in one frame, so that its scatter list stays bounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Pages of one group and layer that travel in one frame."""

    layer: int
    group: int
    first_page: int
    page_ids: tuple[int, ...]
    nbytes: int


def cut_layer(
    groups: Sequence[CacheGroup],
    layer: int,
    page_ids: Sequence[int],
    first_page: int,
    frame_bytes: int,
) -> Iterator[Piece]:
    """Cut one layer's pages into pieces, group after group."""
    for index, group in enumerate(groups):
        step = min(MAX_FRAME_PAGES, max(1, frame_bytes // group.page_bytes))
        for start in range(0, len(page_ids), step):
            ids = tuple(page_ids[start : start + step])
            yield Piece(
                layer=layer,
                group=index,
                first_page=first_page + start,
                page_ids=ids,
                nbytes=len(ids) * group.page_bytes,
            )


def spans_of(
    group: CacheGroup, index: int, layer: int, page_ids: Sequence[int], num_pages: int
) -> tuple[Span, ...]:
    """Name the bytes of pages in one group's buffer; neighbours become one span.

    Args:
        group: the group.
        index: its position in the layout.
        layer: which layer.
        page_ids: in the order of the payload.
        num_pages: of the pool.
    """
    size = group.page_bytes
    base = layer * num_pages * size
    spans: list[Span] = []
    start = end = -1
    for page in page_ids:
        if page != end:
            if start >= 0:
                spans.append(Span(index, base + start * size, (end - start) * size))
            start = page
        end = page + 1
    if start >= 0:
        spans.append(Span(index, base + start * size, (end - start) * size))
    return tuple(spans)


def checksum(memory: RegisteredMemory, spans: Sequence[Span]) -> int:
    """xxh3_64 of the bytes of ``spans``, one after the other."""
    digest = xxhash.xxh3_64()
    for span in spans:
        digest.update(memory.view(span))
    return digest.intdigest()


class Cursor:
    """Walks through spans, a bounded window at a time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._index = 0
        self._offset = 0
        self.remaining = sum(span.nbytes for span in spans)
        """Bytes not walked over yet."""

    def window(self, max_bytes: int) -> list[Span]:
        """Return the next spans, of at most ``max_bytes`` together."""
        window: list[Span] = []
        index, offset = self._index, self._offset
        while max_bytes > 0 and index < len(self._spans):
            span = self._spans[index]
            nbytes = min(span.nbytes - offset, max_bytes)
            window.append(Span(span.buffer, span.offset + offset, nbytes))
            max_bytes -= nbytes
            index, offset = index + 1, 0
        return window

    def advance(self, nbytes: int) -> list[Span]:
        """Walk over ``nbytes`` and return their spans."""
        passed: list[Span] = []
        self.remaining -= nbytes
        while nbytes:
            span = self._spans[self._index]
            step = min(span.nbytes - self._offset, nbytes)
            passed.append(Span(span.buffer, span.offset + self._offset, step))
            nbytes -= step
            self._offset += step
            if self._offset == span.nbytes:
                self._index, self._offset = self._index + 1, 0
        return passed
