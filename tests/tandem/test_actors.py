from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from tandem.actors import Host, HostState, OnReady
from tandem.errors import ConfigError
from tandem.secret import Secret

HANG_GUARD_S = 60.0


async def serve_until_told(stopping: asyncio.Event, on_ready: OnReady) -> None:
    on_ready("127.0.0.1:1", "127.0.0.1:2")
    await stopping.wait()


def wait_for(host: Host, phase: str) -> HostState:
    state = host.next_state(None, HANG_GUARD_S)
    while state.phase != phase:
        later = host.next_state(state, HANG_GUARD_S)
        assert later != state, f"hangs in {state}"
        state = later
    return state


def test_a_server_starts_tells_its_addresses_and_stops() -> None:
    host = Host("one", serve_until_told)
    assert wait_for(host, "ready").addresses == ("127.0.0.1:1", "127.0.0.1:2")
    assert host.stop(HANG_GUARD_S)
    assert wait_for(host, "stopped").phase == "stopped"
    assert host.stop(HANG_GUARD_S)


def test_stopping_may_come_before_ready() -> None:
    entered = threading.Event()

    async def slow(stopping: asyncio.Event, on_ready: OnReady) -> None:
        del on_ready
        entered.set()
        await stopping.wait()

    host = Host("slow", slow)
    assert entered.wait(HANG_GUARD_S)
    assert host.stop(HANG_GUARD_S)


def test_a_server_that_does_not_stop_is_told() -> None:
    release = threading.Event()

    async def stubborn(stopping: asyncio.Event, on_ready: OnReady) -> None:
        on_ready()
        await stopping.wait()
        await asyncio.to_thread(release.wait)

    host = Host("stubborn", stubborn)
    wait_for(host, "ready")
    assert not host.stop(0.01)
    release.set()
    assert host.stop(HANG_GUARD_S)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_failing_start_tells_why_and_leaves_the_process(grouped: bool) -> None:
    ended: list[int] = []
    known = ConfigError("decode.graph", "no compiler")

    async def failing(stopping: asyncio.Event, on_ready: OnReady) -> None:
        del stopping, on_ready
        raise ExceptionGroup("two", [ValueError("other"), known]) if grouped else known

    host = Host("failing", failing, ended.append)
    assert wait_for(host, "failed").detail == "decode.graph: no compiler"
    assert not ended


def test_a_failure_while_serving_ends_the_process() -> None:
    ended: list[int] = []

    async def failing(stopping: asyncio.Event, on_ready: OnReady) -> None:
        del stopping
        on_ready()
        raise ValueError("out of luck")

    host = Host("failing", failing, ended.append)
    assert wait_for(host, "failed").detail == "ValueError: out of luck"
    assert ended == [1]


def test_what_a_server_logs_is_its_detail_and_its_warnings() -> None:
    logger = logging.getLogger("tandem.test_actors")
    logging.getLogger("tandem").setLevel(logging.INFO)
    go_on = threading.Event()

    async def talking(stopping: asyncio.Event, on_ready: OnReady) -> None:
        logger.info("loading %s", "model")
        await asyncio.to_thread(go_on.wait)
        logger.warning("no compiler")
        on_ready()
        await stopping.wait()

    host = Host("talking", talking)
    state = host.next_state(None, HANG_GUARD_S)
    while not state.detail:
        state = host.next_state(state, HANG_GUARD_S)
    assert (state.phase, state.detail) == ("starting", "loading model")
    go_on.set()
    state = wait_for(host, "ready")
    assert [message for _, message in state.warnings] == ["no compiler"]
    assert state.detail == ""
    host.stop(HANG_GUARD_S)


def test_a_secret_shows_only_when_asked() -> None:
    secret = Secret.draw()
    assert len(secret.reveal()) == 32
    assert secret.reveal() != Secret.draw().reveal()
    assert secret.reveal().hex() not in f"{secret!r} {secret}"
