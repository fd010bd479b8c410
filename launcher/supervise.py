"""Watches the actors: shows how they start, tells when one dies, restarts one that cannot start.

A member is followed by asking its actor for the next change of state. Ray repeats a call whose
actor died on the actor's next start, so the answer that names another start is the death notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tandem.actors import HostState
from tandem.errors import WorkerError, WorkerLost

logger = logging.getLogger(__name__)

Show = Callable[[str, HostState], None]
"""Told a member's name and its new state."""

_ASK_AGAIN_S = 30.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Member:
    """One actor of the deployment."""

    def __init__(self, name: str, actor: Any, show: Show, last_words: Callable[[int], str]) -> None:
        """Nothing is asked yet.

        Args:
            name: for people.
            actor: handle of a `HostActor`.
            show: told each change while it starts.
            last_words: what a process that is gone logged last.
        """
        self.name = name
        self.state: HostState | None = None
        self._actor = actor
        self._show = show
        self._last_words = last_words
        self._failed_starts = 0

    async def ready(self) -> HostState:
        """Wait until it serves.

        Raises:
            WorkerError: it cannot start; the message says why.
        """
        while True:
            before, state = self.state, await self._next_state()
            if state != before:
                self._show(self.name, state)
            if state.phase == "ready":
                return state
            if state.phase in ("failed", "stopped"):
                raise WorkerError(self.name, state.detail or "stopped while it started")

    async def follow(self, restart: Callable[[Any], None]) -> None:
        """Watch it until cancelled, and have it restarted when it cannot start."""
        while True:
            before, state = self.state, await self._next_state()
            if state.phase == "ready":
                self._failed_starts = 0
                if before is None or before.phase != "ready" or before.start != state.start:
                    logger.info("%s is ready again as pid %d", self.name, state.pid)
            elif state.phase in ("failed", "stopped"):
                self._failed_starts += 1
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failed_starts - 1))
                logger.error(
                    "%s cannot start: %s; trying again in %g s", self.name, state.detail, pause_s
                )
                await asyncio.sleep(pause_s)
                restart(self._actor)

    async def stop(self, timeout_s: float) -> bool:
        """Let it finish what runs and stop; whether it did in time."""
        from ray.exceptions import RayError

        try:
            return bool(await self._actor.stop.remote(timeout_s))
        except RayError as error:
            logger.warning("%s did not stop: %s", self.name, type(error).__name__)
            return False

    async def _next_state(self) -> HostState:
        from ray.exceptions import RayActorError

        before = self.state
        try:
            state: HostState = await self._actor.next_state.remote(before, _ASK_AGAIN_S)
        except RayActorError as error:
            raise WorkerLost(self.name, f"its actor is gone for good: {error}") from error
        self.state = state
        if before is not None and before.start != state.start:
            words = self._last_words(before.pid)
            logger.warning(
                "%s died (pid %d), started again as pid %d%s",
                self.name,
                before.pid,
                state.pid,
                f"; it logged last: {words}" if words else "",
            )
        if state != before:
            seen = before.version if before is not None and before.start == state.start else 0
            for version, message in state.warnings:
                if version > seen:
                    logger.warning("%s: %s", self.name, message)
        return state
