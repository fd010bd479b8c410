"""``tandem serve`` as a process, with a tiny model: starts, tells, stops, leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from launcher.cli import main
from tandem.testing.cluster import ServedCluster, served_cluster
from tandem.testing.tiny import write_tiny_llama

pytestmark = pytest.mark.ray

HANG_GUARD_S = 180.0
MARK = "TANDEM_TEST_MARK"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(folder)
    return folder


@pytest.fixture
def mark() -> str:
    """An environment variable's value that all descendants of a process inherit."""
    return uuid.uuid4().hex


def descendants(mark: str) -> list[str]:
    """Commands of the living processes that carry ``mark``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended meanwhile
            continue
    return found


def wait_until_none_is_left(mark: str) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while left := descendants(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def serve(mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, MARK: mark},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_nothing(
    tiny: Path, mark: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_cluster([f"model.name={tiny}"], environment={MARK: mark}) as cluster:
        assert main(["status", "--address", cluster.address, "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert [worker["state"] for worker in status["workers"]] == ["ready", "ready"]
        (folder,) = set(re.findall(r"/tmp/tandem-\w+", " ".join(descendants(mark))))
        cluster.process.send_signal(number)
        assert cluster.process.wait(HANG_GUARD_S) == 0, cluster.log.read_text()
        assert "Traceback" not in cluster.log.read_text()
    host, port = cluster.address.split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
    assert not Path(folder).exists()
    wait_until_none_is_left(mark)


def wait_for_log(cluster: ServedCluster, text: str) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while text not in cluster.log.read_text():
        assert time.monotonic() < deadline, cluster.log.read_text()
        time.sleep(0.1)


def test_a_worker_that_cannot_start_again_is_tried_until_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    write_tiny_llama(folder)
    with served_cluster([f"model.name={folder}"]) as cluster:
        assert main(["status", "--address", cluster.address, "--json"]) == 0
        workers = json.loads(capsys.readouterr().out)["workers"]
        (pid,) = [worker["pid"] for worker in workers if worker["role"] == "decode"]
        folder.rename(tmp_path / "away")
        os.kill(pid, signal.SIGKILL)
        wait_for_log(cluster, "decode-0 cannot start: ")
        (tmp_path / "away").rename(folder)
        wait_for_log(cluster, "decode-0 is ready again")
        assert f"decode-0 died (pid {pid})" in cluster.log.read_text()
        assert main(["generate", "--address", cluster.address, "--prompt", "hello"]) == 0


def test_once_answers_and_ends(tiny: Path, mark: str) -> None:
    process = serve(mark, "--model", str(tiny), "--port", "0", "--once", "hello")
    output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, errors
    ready, answer = output.split("\n", 1)
    assert ready.startswith("ready: grpc://127.0.0.1:")
    assert answer.endswith("\n")
    assert "first token" in errors
    wait_until_none_is_left(mark)


def test_a_port_in_use_is_one_line(mark: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = serve(mark, "--port", str(port))
        output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 2
    assert output == ""
    assert errors.startswith(f"tandem: router.port: 127.0.0.1:{port} cannot be bound")
    assert errors.count("\n") == 1


def test_a_worker_that_cannot_start_ends_it_with_the_reason(tiny: Path, mark: str) -> None:
    process = serve(mark, "--model", str(tiny), "--port", "0", "--set", "transfer.host=192.0.2.77")
    _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("tandem: worker decode-0: ")
    assert "Traceback" not in errors
    wait_until_none_is_left(mark)


def test_a_signal_while_it_starts_ends_it(tiny: Path, mark: str) -> None:
    process = serve(mark, "--model", str(tiny), "--port", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prefill-0"):
            break
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, errors
    assert output == ""
    assert "Traceback" not in errors
    wait_until_none_is_left(mark)
