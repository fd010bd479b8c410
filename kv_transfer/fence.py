"""What decides, before every single placement, whether pages still belong to a transfer."""

from __future__ import annotations

import threading

from kv_transfer.outcome import Outcome


class Fence:
    """Admits placements into one reservation's pages until it is closed.

    A placement never waits for the peer (`kv_transfer.transport.Payload.place`), so the time
    between `close` and quiet is the time of one copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._placing = False
        self._quiet: Outcome[None] = Outcome()

    def enter(self) -> bool:
        """Begin one placement; False when the pages are no longer the transfer's."""
        with self._lock:
            self._placing = self._open
            return self._open

    def leave(self) -> None:
        """End the placement that `enter` admitted."""
        with self._lock:
            self._placing = False
            if not self._open:
                self._quiet.succeed(None)

    def close(self) -> None:
        """Admit no more placements; idempotent, never blocks."""
        with self._lock:
            self._open = False
            if not self._placing:
                self._quiet.succeed(None)

    async def quiet(self) -> None:
        """Return when the fence is closed and no placement is under way."""
        await self._quiet.wait()
