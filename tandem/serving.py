"""The calls that a worker process serves at this moment: admits them, waits for them, ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.errors import ServingError, WorkerLost


@dataclass(eq=False, slots=True)
class _Call:
    task: asyncio.Task[object]
    error: ServingError | None = None


class Calls:
    """Every call runs inside `serve`; closing refuses new ones and leaves the others alone."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._live: set[_Call] = set()
        self._none_live = asyncio.Event()
        self._none_live.set()
        self._closing = False

    @property
    def closing(self) -> bool:
        """Whether new calls are refused."""
        return self._closing

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Enclose the handling of one call, in the task that handles it.

        Raises:
            WorkerLost: the worker is closing.
            ServingError: what `end` was called with.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            raise WorkerLost(self._worker_id, "is draining and takes no new requests")
        call = _Call(task)
        self._live.add(call)
        self._none_live.clear()
        try:
            yield
        except asyncio.CancelledError:
            if call.error is None:
                raise
            task.uncancel()  # cancelled by `end`, not by the caller
            raise call.error from None
        finally:
            self._live.remove(call)
            if not self._live:
                self._none_live.set()

    def close(self) -> None:
        """Refuse new calls from now on."""
        self._closing = True

    async def drained(self) -> None:
        """Return when no call is live."""
        await self._none_live.wait()

    def end(self, error: ServingError) -> None:
        """Make every live call fail with ``error``."""
        for call in self._live:
            if call.error is None:
                call.error = error
                call.task.cancel()
