"""One request on its way through a decode worker."""

from __future__ import annotations

import enum

from tandem.requests import GenerateRequest


class SequenceState(enum.Enum):
    """Where a request stands; see `decode_worker.scheduler`."""

    QUEUED = "queued"
    RESERVED = "reserved"
    RUNNING = "running"
    SWAPPED = "swapped"
    GONE = "gone"


class DecodeSequence:
    """Changed by the scheduler only."""

    def __init__(self, request: GenerateRequest, max_pages: int) -> None:
        self.request = request
        self.max_pages = max_pages
        """Pages that prompt and output need at most."""
        self.state = SequenceState.QUEUED
        self.order = 0
        """Place in the order of admission, from 1 on; 0 while queued."""
        self.page_ids: list[int] = []
        """Empty while queued or swapped."""
        self.cached_pages = 0
        """Leading pages that were found in the prefix cache; others may read them, too."""
        self.swapped_pages = 0
        """Pages whose contents are in host memory."""
        self.token_ids = list(request.token_ids)
        """Prompt and output so far."""
        self.paused = False
        self.busy = False
        """The device thread uses its pages."""

    @property
    def token_id(self) -> int:
        """Input of the next step: the last token, whose K and V are not in the pages yet."""
        return self.token_ids[-1]

    @property
    def position(self) -> int:
        """Where that token stands; also the number of tokens whose K and V are there."""
        return len(self.token_ids) - 1

    @property
    def held_pages(self) -> int:
        """Pages of K and V that it has, wherever they are."""
        return len(self.page_ids) + self.swapped_pages
