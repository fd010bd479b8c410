"""What numbers a setting may take, written in its type so that loader and schema read the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers from ``minimum`` to ``maximum``, both included unless said otherwise."""

    minimum: float
    maximum: float = math.inf
    above: bool = False
    """``minimum`` itself is outside."""

    def __contains__(self, number: float) -> bool:
        low = number > self.minimum if self.above else number >= self.minimum
        return low and number <= self.maximum

    def __str__(self) -> str:
        low = f"above {self.minimum:g}" if self.above else f"at least {self.minimum:g}"
        return low if self.maximum == math.inf else f"{low} and at most {self.maximum:g}"


Count = Annotated[int, Range(minimum=1)]
CountOrAuto = Annotated[int, Range(minimum=0)]
"""0 lets Tandem choose."""
Limit = Annotated[int, Range(minimum=0)]
"""0 allows none."""
Port = Annotated[int, Range(minimum=0, maximum=65535)]
Seconds = Annotated[float, Range(minimum=0, above=True)]
Bytes = Annotated[int, Range(minimum=1)]
