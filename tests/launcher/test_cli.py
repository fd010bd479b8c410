from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli import build_parser, main
from tandem import __version__
from tandem.config.load import from_mapping
from tandem.config.tree import TandemConfig
from tandem.config.yamls import parse

# What people's scripts rely on. Adding is deliberate, removing breaks somebody.
CONFIGURED = {"--config", "--set"}
COMMANDS = {
    "tandem": {"--version", "COMMAND"},
    "tandem config": {"verb"},
    "tandem config show": CONFIGURED,
    "tandem config schema": {"--markdown"},
    "tandem model": {"verb"},
    "tandem model pull": {"NAME"},
    "tandem model info": {"NAME", "--json"},
    "tandem serve": CONFIGURED | {"--address", "--model", "--port", "--first", "--once"},
    "tandem status": {"--address", "--json"},
    "tandem generate": {
        "--address", "--prompt", "--chat", "--model", "--max-tokens", "--temperature", "--top-k",
        "--top-p", "--min-p", "--seed", "--stop", "--logprobs", "--timeout", "--json",
    },
}  # fmt: skip


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def arguments_of(parser: argparse.ArgumentParser) -> set[str]:
    names: set[str] = set()
    for action in parser._actions:
        names |= set(action.option_strings) or {str(action.metavar or action.dest)}
    return names - {"-h", "--help"}


def test_commands_and_their_arguments_are_these() -> None:
    found = {parser.prog: arguments_of(parser) for parser in parsers(build_parser())}
    assert found == COMMANDS


@pytest.mark.parametrize("prog", [prog for prog in COMMANDS if COMMANDS[prog] - {"verb"}])
def test_every_argument_is_documented(prog: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert prog in page
    assert all(name in page for name in COMMANDS[prog] - {"COMMAND", "--version"})


@pytest.mark.parametrize("prog", COMMANDS)
def test_every_command_has_help(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*prog.split()[1:], "--help"])
    assert caught.value.code == 0
    assert f"usage: {prog}" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"tandem {__version__}\n"


def test_config_show_prints_what_is_in_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "router.port=7"]) == 0
    shown = parse(capsys.readouterr().out)
    assert isinstance(shown, dict)
    assert shown["router"]["port"] == 7
    assert from_mapping(shown).cache == TandemConfig().cache


def test_config_schema_prints_json_or_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Tandem configuration"
    assert main(["config", "schema", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration")


def test_a_wrong_setting_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "router.prot=7"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem: router.prot: no such setting")
    assert error.count("\n") == 1


def test_a_missing_model_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "info", "/no/such/model"]) == 1
    error = capsys.readouterr().err
    assert "/no/such/model" in error
    assert error.count("\n") == 1


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m launcher config schema | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=60)
    assert done.stdout == b"{"
    assert done.stderr == b""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["config", "show"], ["status", "--address", "127.0.0.1:1"]],
    ids=lambda arguments: arguments[0],
)
def test_quick_commands_load_neither_torch_nor_ray(arguments: list[str]) -> None:
    code = (
        "import contextlib, sys\n"
        "from launcher.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({arguments!r})\n"
        "assert not {'torch', 'ray'} & set(sys.modules), 'slow start'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
