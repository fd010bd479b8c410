from __future__ import annotations

import json

import pytest

from launcher.cli import main
from tandem.pb import generate_pb2
from tests.launcher.conftest import ScriptedServer

WORKER = generate_pb2.WorkerState(
    worker_id="decode-0",
    role="decode",
    pid=77,
    incarnation="abc",
    state="ready",
    address="127.0.0.1:9",
    pages_used=3,
    pages_cached=2,
    pages_swapped=5,
    preemptions=6,
    pages_total=40,
    running=1,
    graph="graph 1,2",
)


def test_the_table_shows_every_worker(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.workers = [WORKER]
    assert main(["status", "--address", server.address]) == 0
    shown = capsys.readouterr().out
    assert "Tandem 1.2.3, disaggregated: 2 requests running, 0 queued" in shown
    assert "decode-0" in shown
    assert "3/40 +2 cached +5 swapped" in shown
    assert "preemptions" in shown
    assert "graph 1,2" in shown


def test_json_names_every_field(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.workers = [WORKER]
    assert main(["status", "--address", server.address, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["mode"] == "disaggregated"
    (worker,) = shown["workers"]
    assert {field.name for field in WORKER.DESCRIPTOR.fields} == set(worker)
    assert (worker["pid"], worker["queued"], worker["pages_total"]) == (77, 0, 40)


def test_nobody_listening_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("tandem: UNAVAILABLE")
