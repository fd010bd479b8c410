"""A stretch of a coroutine that others can end with an error of their choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.errors import ServingError


class Scope:
    """Handle to a running `stoppable` block."""

    def __init__(self, timeout: asyncio.Timeout, expired: ServingError | None) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.error = expired
        """What the block will end with once its time is over."""

    def stop(self, error: ServingError, after_s: float = 0.0) -> None:
        """End the block with ``error``, unless it is over or ends sooner for another reason."""
        when = self._loop.time() + after_s
        due = self._timeout.when()
        if not self._open or self._timeout.expired() or (due is not None and due <= when):
            return
        self.error = error
        self._timeout.reschedule(when)

    def close(self) -> None:
        """Ignore every later `stop`."""
        self._open = False


@asynccontextmanager
async def stoppable(
    after_s: float | None = None, expired: ServingError | None = None
) -> AsyncIterator[Scope]:
    """Run the block until it is done or stopped; the block sees a stop as its cancellation.

    Args:
        after_s: end it on its own after this long; None waits for `Scope.stop`.
        expired: what it then ends with.

    Raises:
        ServingError: the one handed to `Scope.stop`, or ``expired``.
    """
    assert (after_s is None) == (expired is None)
    scope = None
    try:
        async with asyncio.timeout(after_s) as timeout:
            scope = Scope(timeout, expired)
            try:
                yield scope
            finally:
                scope.close()
    except TimeoutError:
        if scope is None or scope.error is None or not timeout.expired():
            raise
        raise scope.error from None
