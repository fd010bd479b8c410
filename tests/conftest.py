"""Settings and helpers for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# before torch is loaded, and for processes that tests start: small tensors gain nothing from more
# threads, which wait by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
