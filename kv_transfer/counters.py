"""What a sender or receiver has done so far, for status pages and tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCounters:
    """Totals since start, except ``pending``."""

    pending: int = 0
    """Transfers under way now."""
    completed: int = 0
    """Transfers that ended with a commit."""
    aborted: int = 0
    """Transfers that ended in any other way."""
    corrupt: int = 0
    """Those of them that were refused because bytes or counts differed."""
    frames: int = 0
    """DATA frames written, or placed and verified."""
    bytes: int = 0
    """K/V bytes of those frames."""
    stale_frames: int = 0
    """DATA frames drained, wholly or in part, because their transfer had ended."""
    stale_bytes: int = 0
    """K/V bytes drained."""
    refused_connections: int = 0
    """Connections ended in the handshake or because of a bad frame."""


class Tally:
    """Counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = TransferCounters()

    def add(self, **amounts: int) -> None:
        """Add to the named counters."""
        with self._lock:
            changed = {name: getattr(self._totals, name) + n for name, n in amounts.items()}
            self._totals = replace(self._totals, **changed)

    def read(self) -> TransferCounters:
        """All counters at one instant."""
        return self._totals


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """One completed transfer, as its sender saw it."""

    transport: str
    frames: int
    nbytes: int
    early_bytes: int
    """Bytes already written when the last layer had been computed: what overlap hid."""
    duration_s: float
    """From opening the stream to the receiver's acknowledgement."""
