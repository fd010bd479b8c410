"""A thread that calls a function at intervals, so that time-outs need no new work to be noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.config.tree import TransferConfig

_SLOWEST_S = 1.0


def interval_s(config: TransferConfig) -> float:
    """How often time-outs are looked at: often enough to be late by an eighth at most."""
    return min(_SLOWEST_S, config.idle_timeout_s / 8, config.lease_s / 8)


class Watch:
    """Calls ``check`` every ``every_s`` seconds until stopped."""

    def __init__(self, name: str, every_s: float, check: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._every_s = every_s
        self._check = check
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for a call under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._check()
