"""Chunks of one request between the step loop and its reader."""

from __future__ import annotations

import asyncio

from tandem.errors import ServingError
from tandem.requests import OutputChunk


class Outbox:
    """Bounded; what a slow reader has not taken is handed over as one chunk."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[OutputChunk] = []
        self._error: ServingError | None = None
        self._ready = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether nothing more may be put in until the reader takes something."""
        return len(self._chunks) >= self._limit

    def put(self, chunk: OutputChunk) -> None:
        """Add the next chunk; the box is not full."""
        assert not self.full
        self._chunks.append(chunk)
        self._ready.set()

    def fail(self, error: ServingError) -> None:
        """Let the reader have what is there, then ``error``."""
        self._error = error
        self._ready.set()

    async def take(self) -> OutputChunk:
        """Wait for chunks and return all that are there, joined.

        Raises:
            ServingError: the request failed.
        """
        await self._ready.wait()
        if not self._chunks:
            assert self._error is not None
            raise self._error
        chunks, self._chunks = self._chunks, []
        if self._error is None:
            self._ready.clear()
        return join_chunks(chunks)


def join_chunks(chunks: list[OutputChunk]) -> OutputChunk:
    """Consecutive chunks of one output as one; at least one."""
    if len(chunks) == 1:
        return chunks[0]
    return OutputChunk(
        index=chunks[0].index,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=chunks[-1].finish_reason,
    )
