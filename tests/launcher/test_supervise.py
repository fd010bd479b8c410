from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from launcher.supervise import Member
from tandem.actors import HostState
from tandem.errors import WorkerError, WorkerLost

STARTING = HostState(start="a", version=1, phase="starting", pid=10, detail="loading")
READY = replace(STARTING, version=2, phase="ready", detail="", addresses=("127.0.0.1:1",))
FAILED = replace(STARTING, version=2, phase="failed", detail="no memory")


class Method:
    """What an actor's handle offers for each method."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.remote = answer


class ScriptedActor:
    """Answers each question for the next state with the next scripted one, then never."""

    def __init__(self, *script: HostState | Exception) -> None:
        self._script = list(script)
        self.seen: list[HostState | None] = []
        self.next_state = Method(self._next_state)
        self.stop = Method(self._stop)

    async def _next_state(self, seen: HostState | None, timeout_s: float) -> HostState:
        del timeout_s
        self.seen.append(seen)
        if not self._script:
            await asyncio.Event().wait()
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _stop(self, timeout_s: float) -> bool:
        return timeout_s > 0


def member_of(actor: ScriptedActor) -> tuple[Member, list[str]]:
    shown: list[str] = []

    def show(name: str, state: HostState) -> None:
        assert name == "decode-0"
        shown.append(state.phase)

    return Member("decode-0", actor, show, lambda pid: f"words of {pid}"), shown


def test_it_is_awaited_until_ready_and_every_change_is_shown_once() -> None:
    actor = ScriptedActor(STARTING, STARTING, READY)
    member, shown = member_of(actor)
    assert asyncio.run(member.ready()) == READY
    assert shown == ["starting", "ready"]
    assert actor.seen == [None, STARTING, STARTING]


def test_a_start_that_fails_says_why() -> None:
    member, _ = member_of(ScriptedActor(STARTING, FAILED))
    with pytest.raises(WorkerError, match="worker decode-0: no memory"):
        asyncio.run(member.ready())


def test_an_actor_that_is_gone_for_good_is_lost() -> None:
    member, _ = member_of(ScriptedActor(ActorDiedError()))
    with pytest.raises(WorkerLost, match="gone for good"):
        asyncio.run(member.ready())


def test_a_death_and_warnings_are_told(caplog: pytest.LogCaptureFixture) -> None:
    once = replace(READY, version=3, warnings=((3, "no compiler"),))
    twice = replace(READY, version=4, warnings=((3, "no compiler"), (4, "slow disk")))
    again = replace(READY, start="b", version=1, pid=11, warnings=((1, "no compiler"),))
    actor = ScriptedActor(READY, once, twice, again, ActorDiedError())
    member, _ = member_of(actor)
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerLost):
        asyncio.run(member.follow(lambda actor: None))
    assert caplog.messages == [
        "decode-0: no compiler",
        "decode-0: slow disk",
        "decode-0 died (pid 10), started again as pid 11; it logged last: words of 10",
        "decode-0: no compiler",
    ]


def test_a_worker_that_cannot_start_again_is_restarted_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    restarted: list[Any] = []

    async def no_time(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", no_time)
    failures = [replace(FAILED, start=str(number)) for number in range(7)]
    actor = ScriptedActor(READY, *failures, READY, FAILED, ActorDiedError())
    member, _ = member_of(actor)
    with pytest.raises(WorkerLost):
        asyncio.run(member.follow(restarted.append))
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 1]
    assert restarted == [actor] * 8


def test_stopping_waits_for_the_actor() -> None:
    member, _ = member_of(ScriptedActor())
    assert asyncio.run(member.stop(1.0))
