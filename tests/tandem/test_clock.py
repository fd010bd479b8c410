from __future__ import annotations

import time

import pytest

from tandem.clock import Clock
from tandem.testing.clock import ManualClock


def test_the_time_module_is_a_clock() -> None:
    clock: Clock = time
    assert clock.monotonic() <= clock.monotonic()


def test_a_manual_clock_moves_only_when_told() -> None:
    manual = ManualClock(5.0)
    clock: Clock = manual
    assert clock.monotonic() == clock.monotonic() == 5.0
    manual.advance(2.5)
    assert clock.monotonic() == 7.5
    manual.advance(0.0)
    assert clock.monotonic() == 7.5


def test_time_does_not_go_back() -> None:
    with pytest.raises(AssertionError):
        ManualClock().advance(-1.0)
