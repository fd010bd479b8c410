"""A result that one thread sets and coroutines wait for."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """Set once, from any thread; the first of `succeed` and `fail` counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._future: Future[T] = Future()
        # A running future cannot be cancelled, so a waiter that gives up cancels only itself.
        self._future.set_running_or_notify_cancel()

    @property
    def done(self) -> bool:
        """Whether it is set."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What `fail` was given, when that came first."""
        return self._future.exception() if self._future.done() else None

    @property
    def value(self) -> T | None:
        """What `succeed` was given, when that came first."""
        if not self._future.done() or self._future.exception() is not None:
            return None
        return self._future.result()

    def succeed(self, value: T) -> bool:
        """Set the value; returns False, changing nothing, when already set."""
        with self._lock:
            if self._future.done():
                return False
            self._future.set_result(value)
            return True

    def fail(self, error: BaseException) -> bool:
        """Set the error; returns False, changing nothing, when already set."""
        with self._lock:
            if self._future.done():
                return False
            self._future.set_exception(error)
            return True

    async def wait(self) -> T:
        """Return the value or raise the error, once it is set."""
        return await asyncio.wrap_future(self._future)
