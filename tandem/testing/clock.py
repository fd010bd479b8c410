"""A clock that stands still until it is told to move."""

from __future__ import annotations


class ManualClock:
    """A `tandem.clock.Clock` for tests.

    Code that takes a plain function gets its `monotonic`.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        """The time as it was set last."""
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Let ``by_s`` seconds pass; time never goes back."""
        assert by_s >= 0
        self._now_s += by_s
