"""What the command line shows: results on stdout, progress and tables on stderr."""

from __future__ import annotations

import sys

from rich.console import Console

STDERR = Console(stderr=True, highlight=False)
STDOUT = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def write_out(text: str) -> None:
    """Write ``text`` to stdout at once, as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(problem: str) -> None:
    """Write one line about what went wrong to stderr."""
    sys.stderr.write(f"tandem: {' '.join(problem.split())}\n")
    sys.stderr.flush()
