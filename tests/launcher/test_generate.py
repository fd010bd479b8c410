from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import grpc
import pytest

from launcher.cli import main
from tests.launcher.conftest import ScriptedServer


def test_text_goes_to_stdout_and_times_to_stderr(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--address", server.address, "--prompt", "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Sí... €\n"
    assert "1.5 ms" in captured.err
    assert "5 prompt tokens (4 cached), 3 generated, finish reason length" in captured.err


def test_json_prints_one_object(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--address", server.address, "--prompt", "hello", "--json"]
    assert main([*arguments, "--logprobs", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"] == "Sí... €"
    assert shown["token_ids"] == [7, 8, 9]
    assert shown["finish_reason"] == "length"
    assert shown["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4}
    assert shown["timings"]["total_ms"] == 12.25
    assert shown["timings"]["per_token_ms"] == 0
    assert shown["logprobs"] == [{"logprob": -0.25, "top": [[1, -0.5]]}] * 3


def test_only_what_was_given_is_sent(server: ScriptedServer) -> None:
    assert main(["generate", "--address", server.address, "--prompt", "hello"]) == 0
    (request,) = server.requests
    assert request.text == "hello"
    assert request.ListFields()[0][0].name == "text"
    assert not request.HasField("model")
    assert not request.HasField("sampling")


def test_every_argument_reaches_the_server(server: ScriptedServer) -> None:
    given = (
        "--prompt hello --chat --model tiny --max-tokens 0 --temperature 0 --top-k 3 --top-p 0.5 "
        f"--min-p 0.25 --seed {2**64 - 1} --stop a b --timeout 20"
    )
    assert main(["generate", "--address", server.address, *given.split()]) == 0
    (request,) = server.requests
    assert request.chat.messages[0].role == "user"
    assert request.model == "tiny"
    assert request.stopping.HasField("max_tokens")
    assert request.stopping.max_tokens == 0
    assert request.sampling.HasField("temperature")
    assert (request.sampling.top_k, request.sampling.top_p) == (3, 0.5)
    assert (request.sampling.min_p, request.sampling.seed) == (0.25, 2**64 - 1)
    assert list(request.stopping.stop) == ["a", "b"]


def test_a_dash_reads_the_prompt_from_stdin(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("früh\n".encode())))
    assert main(["generate", "--address", server.address, "--prompt", "-"]) == 0
    assert server.requests[0].text == "früh\n"


def test_a_refusal_is_one_line_and_exit_code_1(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full;\nretry in 1 s")
    assert main(["generate", "--address", server.address, "--prompt", "x", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tandem: RESOURCE_EXHAUSTED: queue full; retry in 1 s\n"


def test_nobody_listening_is_said_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", "127.0.0.1:1", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem: UNAVAILABLE: ")
    assert "is a server running at 127.0.0.1:1?" in error
    assert error.count("\n") == 1


def test_the_timeout_ends_the_request(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.endless = True
    arguments = ["generate", "--address", server.address, "--prompt", "x", "--timeout", "0.3"]
    assert main(arguments) == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err
    assert server.cancelled.wait(30)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "x", "--seed", "-1"],
        ["--prompt", "x", "--seed", str(2**64)],
        ["--prompt", "x", "--max-tokens", "many"],
        ["--prompt", "x", "--timeout", "0"],
        ["--prompt", "x", "--temperature", "warm"],
        ["--prompt", "x", "--unknown"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *arguments])
    assert caught.value.code == 2
    assert "usage: tandem" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--prompt", "\udcff"], ["--prompt", "x", "--logprobs"]])
def test_what_the_parser_cannot_see_is_exit_code_2_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_cancels_the_request(server: ScriptedServer) -> None:
    server.endless = True
    command = [sys.executable, "-m", "launcher", "generate"]
    process = subprocess.Popen(
        [*command, "--address", server.address, "--prompt", "hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(len("Sí".encode())) == "Sí".encode()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert server.cancelled.wait(30)
