"""The way of one request's tokens from the decode worker to the caller: each once, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tandem.errors import WorkerError
from tandem.pb import generate_pb2, worker_pb2

Write = Callable[[generate_pb2.GenerateResponse], Awaitable[None]]
"""Sends one message to the caller; returns when there is room for the next."""


class Delivery:
    """What was sent to the caller of one request, and when."""

    def __init__(self, request_id: str, write: Write, clock: Callable[[], float]) -> None:
        self._request_id = request_id
        self._write = write
        self._clock = clock
        self.num_tokens = 0
        """Output tokens sent; also the index of the next one."""
        self.first_at = 0.0
        """When the first of them had been sent."""
        self.last_at = 0.0
        self.finish_reason = generate_pb2.FINISH_REASON_UNSPECIFIED

    async def forward(self, message: worker_pb2.DecodeChunk, worker_id: str) -> None:
        """Send a chunk on, unless its tokens were sent before.

        Raises:
            WorkerError: tokens are missing before it, or it overlaps what was sent.
        """
        chunk = message.chunk
        end = chunk.index + len(chunk.token_ids)
        repeated = end <= self.num_tokens and chunk.index < self.num_tokens
        if not repeated:
            if chunk.index != self.num_tokens:
                raise WorkerError(
                    worker_id,
                    f"sent tokens {chunk.index} to {end - 1} of request {self._request_id} when "
                    f"token {self.num_tokens} was due",
                )
            self.num_tokens = end
            await self._write(
                generate_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk)
            )
            self.last_at = self._clock()
            self.first_at = self.first_at or self.last_at
        self.finish_reason = message.finish_reason

    async def finish(self, usage: generate_pb2.Usage, timings: generate_pb2.Timings) -> None:
        """Send the last message of an OK stream."""
        finished = generate_pb2.Finished(
            finish_reason=self.finish_reason, usage=usage, timings=timings
        )
        await self._write(
            generate_pb2.GenerateResponse(request_id=self._request_id, finished=finished)
        )

    @property
    def per_token_ms(self) -> float:
        """Mean gap between tokens after the first."""
        if self.num_tokens < 2:
            return 0.0
        return 1000 * (self.last_at - self.first_at) / (self.num_tokens - 1)
