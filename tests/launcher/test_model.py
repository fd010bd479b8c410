from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli import main
from tandem.testing.tiny import TINY_VOCAB_SIZE, write_tiny_llama


def test_info_says_what_a_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_llama(tmp_path / "tiny")
    assert main(["model", "info", str(tmp_path / "tiny"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == "tiny"
    assert shown["architecture"] == "llama"
    assert shown["vocab_size"] == TINY_VOCAB_SIZE
    assert shown["has_chat_template"]
    assert main(["model", "info", str(tmp_path / "tiny")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(shown)
    assert lines[0].split() == ["name", "tiny"]


def test_pulling_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "pull", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert "no-such-model" in error
    assert "smollm2" in error
