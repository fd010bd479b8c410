"""Time as something that is handed over, so that tests can hold it still."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Tells how much time has passed; the module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...
