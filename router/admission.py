"""How many requests run at once, and who waits for how long.

A request waits in first-come order until one of ``max_running`` slots is free. The queue is
bounded; whoever finds it full is told when to come back. A request that is cancelled or whose
deadline passes while it waits leaves the queue without having run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import Overloaded

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_DURATION_WEIGHT = 0.1  # of the newest request in the moving mean of durations


class Admission:
    """Slots for running requests and the queue before them."""

    def __init__(self, max_running: int, max_queued: int, clock: Callable[[], float]) -> None:
        """Start with all slots free.

        Args:
            max_running: slots, at least 1.
            max_queued: requests that may wait, at least 1.
            clock: seconds, monotonic.
        """
        self._max_running = max_running
        self._max_queued = max_queued
        self._clock = clock
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self._mean_duration_s = _MIN_RETRY_S
        self.running = 0
        """Slots taken."""

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def retry_after_s(self) -> float:
        """When the queue is likely to have room: the time it takes to work off what waits."""
        rounds = (self.queued + 1) / self._max_running
        return min(max(_MIN_RETRY_S, rounds * self._mean_duration_s), _MAX_RETRY_S)

    def refuse_if_full(self) -> None:
        """Check, before any costly work, that a request could at least wait.

        Raises:
            Overloaded: all slots are taken and the queue is full.
        """
        if self.running >= self._max_running and self.queued >= self._max_queued:
            raise Overloaded(
                f"{self.running} requests are running and {self.queued} waiting, which is all "
                "that router.max_running_requests and router.max_queued_requests allow",
                self.retry_after_s,
            )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for the length of the block, waiting for it in first-come order.

        Raises:
            Overloaded: all slots are taken and the queue is full.
        """
        await self._take()
        started = self._clock()
        try:
            yield
        finally:
            duration_s = self._clock() - started
            self._mean_duration_s += _DURATION_WEIGHT * (duration_s - self._mean_duration_s)
            self._give_on()

    async def _take(self) -> None:
        if self.running < self._max_running:
            self.running += 1
            return
        self.refuse_if_full()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.pop(waiter, None)
            if not waiter.cancelled():
                self._give_on()  # the slot came together with the cancellation
            raise

    def _give_on(self) -> None:
        while self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(None)
                return
        self.running -= 1
