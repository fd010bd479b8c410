"""Progress of start-up steps, on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from launcher.terminal import STDERR

_COUNTS = re.compile(r" done=\d+ total=\d+$")


class Steps(Protocol):
    """Shows steps that follow one another, and members that start side by side."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Step ``what`` is ``done`` of ``total``, 0 if unknown; any thread may call it."""

    def member(self, name: str, doing: str, ready: bool) -> None:
        """Member ``name`` is doing something, or is ready."""


@contextmanager
def show_steps() -> Iterator[Steps]:
    """Show what is reported until the block ends."""
    if not STDERR.is_terminal:
        yield _Lines()
        return
    columns = (
        SpinnerColumn(finished_text="[green]ok"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=STDERR) as bars:
        steps = _Bars(bars)
        yield steps
        steps.finish()


class _Bars:
    """One bar for each step and each member; a step ends when the next one starts."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._current: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        task = self._task(what, what)
        if task != self._current:
            self.finish()
            self._current = task
        amount = f"{100 * done // total} %" if total else ""
        self._bars.update(task, completed=done, total=total or None, amount=amount)

    def member(self, name: str, doing: str, ready: bool) -> None:
        self.finish()
        task = self._task(name, "")
        self._bars.update(task, description=f"{name}: {doing}", total=1, completed=int(ready))

    def finish(self) -> None:
        """The current step is over."""
        if self._current is not None:
            self._bars.update(self._current, total=1, completed=1, amount="")
            self._current = None

    def _task(self, key: str, description: str) -> TaskID:
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(description, total=None, amount="")
        return self._tasks[key]


class _Lines:
    """A line for each new step and each change of a member."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        del done, total
        self._say(what)

    def member(self, name: str, doing: str, ready: bool) -> None:
        del ready
        self._say(f"{name}: {_COUNTS.sub('', doing)}")

    def _say(self, line: str) -> None:
        if line not in self._seen:
            self._seen.add(line)
            STDERR.print(line, markup=False, soft_wrap=True)
