"""What the command line shows: results on stdout, progress and tables on stderr."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from rich.console import Console

logger = logging.getLogger(__name__)

_FILE_WIDTH = 160  # of tables that go to a file or a pipe

STDERR = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _FILE_WIDTH)
STDOUT = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


class _Chatter(io.TextIOBase):
    """Takes what a library prints, for the log."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        if text.strip():
            logger.debug("%s", text.strip())
        return len(text)


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """Keep what libraries print off stdout, which other programs read."""
    with redirect_stdout(_Chatter(sys.stdout)):
        yield


def write_out(text: str) -> None:
    """Write ``text`` to stdout at once, as it is."""
    out = sys.stdout.behind if isinstance(sys.stdout, _Chatter) else sys.stdout
    out.write(text)
    out.flush()


def complain(problem: str) -> None:
    """Write one line about what went wrong to stderr."""
    sys.stderr.write(f"tandem: {' '.join(problem.split())}\n")
    sys.stderr.flush()
