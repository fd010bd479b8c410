"""Progress of start-up steps, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from launcher.terminal import STDERR

Report = Callable[[str, int, int], None]
"""(what, done, total); total 0 is unknown. Any thread may call it."""


@contextmanager
def progress_report() -> Iterator[Report]:
    """Show each step that is reported: bars on a terminal, a line for each step elsewhere."""
    if STDERR.is_terminal:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=STDERR,
        ) as bars:
            yield _Bars(bars)
    else:
        yield _Lines()


class _Bars:
    """One bar for each step; a step ends when it is complete or the next one starts."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None, amount="")
        self._bars.update(
            self._tasks[what],
            completed=done,
            total=total or None,
            amount=f"{100 * done // total} %" if total else "",
        )


class _Lines:
    """A line when a step starts."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        del done, total
        if what not in self._seen:
            self._seen.add(what)
            STDERR.print(f"{what} ...", markup=False)
