"""The one thread that a process's model runs in; the event loop never computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tandem.models.model import Model

T = TypeVar("T")


class DeviceThread:
    """Runs one piece of work after the other; two workers in one process share it and its model."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._model: Model | None = None

    async def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` in the thread and wait for its end, whichever it is.

        Cancelling the wait does not stop the work.

        Returns:
            The future, done: its result or its exception is the caller's to look at, because an
            error inside a model concerns some requests and not the loop.

        Raises:
            RuntimeError: the thread is gone.
        """
        future = asyncio.wrap_future(self._pool.submit(work))
        await asyncio.wait([future])
        return future

    def model(self, load: Callable[[], Model]) -> Model:
        """The model, loaded by whoever asks first; called in the thread."""
        if self._model is None:
            self._model = load()
        return self._model

    def close(self) -> None:
        """Take no more work; what runs goes on to its end."""
        self._pool.shutdown(wait=False)
