"""Runs a server in a thread of its own and tells how it is doing.

    starting --> ready --> stopped
        |          `-----> the process ends, so that whoever supervises it starts another
        `--> failed        a server that cannot start would fail again: the supervisor is told why

A phase ends when the server says so or raises; nothing here polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandem.errors import ServingError
from tandem.logs import Listener

logger = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "stopped", "failed"]

_KEPT_WARNINGS = 20


OnReady = Callable[..., None]
"""Called once with the addresses that the server serves at."""
Serve = Callable[[asyncio.Event, OnReady], Coroutine[Any, Any, None]]
"""Serves until the event is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostState:
    """How a hosted server is doing."""

    start: str
    """Names this start of the process; another one means that the process is another."""
    version: int
    """Counts the changes since the start."""
    phase: Phase
    pid: int
    detail: str = ""
    """What it is doing while it starts, or why it failed."""
    addresses: tuple[str, ...] = ()
    """Where it serves, from the time when it is ready."""
    warnings: tuple[tuple[int, str], ...] = ()
    """(version, message) of the latest warnings."""


class Host:
    """One server in its own thread; any thread may ask for its state."""

    def __init__(
        self,
        name: str,
        serve: Serve,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Start the thread.

        Args:
            name: of the server, for logs.
            serve: runs in that thread's event loop.
            end_process: called with an exit code when a server that was ready fails.
        """
        self._name = name
        self._serve = serve
        self._end_process = end_process
        self._changed = threading.Condition()
        self._warnings: deque[tuple[int, str]] = deque(maxlen=_KEPT_WARNINGS)
        self._state = HostState(
            start=secrets.token_hex(8), version=0, phase="starting", pid=os.getpid()
        )
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._listener = Listener(self._hear)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next_state(self, seen: HostState | None, timeout_s: float) -> HostState:
        """The state as soon as it differs from ``seen``, or as it is after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._differs(seen), timeout_s)
            return self._state

    def stop(self, timeout_s: float) -> bool:
        """Ask the server to stop and wait for it; whether it did in time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _differs(self, seen: HostState | None) -> bool:
        now = self._state
        return seen is None or (seen.start, seen.version) != (now.start, now.version)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(self._stopping, self._on_ready))
        except Exception as error:
            self._listener.close()  # the phase and its detail say it already
            logger.exception("server=%s failed", self._name)
            if self._state.phase == "ready":
                self._end_process(1)
            self._change(phase="failed", detail=_reason(error))
        else:
            self._change(phase="stopped")
        finally:
            self._listener.close()

    def _on_ready(self, *addresses: str) -> None:
        self._change(phase="ready", detail="", addresses=addresses)

    def _hear(self, level: int, message: str) -> None:
        if level >= logging.WARNING:
            self._warnings.append((self._state.version + 1, message))
            self._change(warnings=tuple(self._warnings))
        elif self._state.phase == "starting":
            self._change(detail=message)

    def _change(self, **changes: object) -> None:
        with self._changed:
            version = self._state.version + 1
            self._state = replace(self._state, version=version, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()


def _reason(error: Exception) -> str:
    """The first error of the kind we know, in one line."""
    while isinstance(error, ExceptionGroup):
        error = (error.subgroup(ServingError) or error).exceptions[0]
    return str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"


class HostActor:
    """What a supervisor may ask of a process that hosts a server."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def next_state(self, seen: HostState | None, timeout_s: float) -> HostState:
        """The state as soon as it differs from ``seen``, or as it is after ``timeout_s``."""
        return self._host.next_state(seen, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Stop serving after what runs has ended; whether that was in time."""
        return self._host.stop(timeout_s)
