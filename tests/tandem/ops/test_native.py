from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.ops import native

PROBE = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import torch
from tandem.ops import library as ops
from tandem.ops.native import is_loaded, load_native
reports = []
status = load_native(lambda what, done, total: reports.append(done))
load_native()
assert torch.equal(ops.linear(torch.ones(1, 2), torch.ones(3, 2)), torch.full((1, 3), 2.0))
assert status.loaded == is_loaded()
sys.stdout.write(f"{status.loaded}|{status.detail}|{reports}")
"""


def probe(home: Path, **environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "TANDEM_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("|"), done.stderr


def test_without_a_compiler_one_warning_says_what_helps(tmp_path: Path) -> None:
    (loaded, detail, reports), warnings = probe(tmp_path, CXX="no-such-compiler")
    assert loaded == "False"
    assert "install g++" in detail
    assert reports == "[]"
    assert warnings.count("no native CPU kernels") == 1


def test_a_failing_compiler_leaves_its_log(tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho out of sorts\nexit 3\n")
    compiler.chmod(0o755)
    (loaded, detail, reports), _ = probe(tmp_path / "home", CXX=str(compiler))
    assert loaded == "False"
    assert "status 3" in detail
    assert "out of sorts" in Path(detail.split("see ")[1]).read_text()
    assert reports == "[0]"
    assert not list((tmp_path / "home").rglob("*.so"))


def test_a_built_library_needs_no_compiler(tmp_path: Path) -> None:
    status = native.load_native()
    if not status.loaded:
        pytest.skip(f"native kernels: {status.detail}")
    built = Path(status.detail)
    copy = tmp_path / "kernels" / built.parent.name / built.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(built.read_bytes())
    (loaded, detail, reports), warnings = probe(tmp_path, CXX="no-such-compiler")
    assert (loaded, detail, reports, warnings) == ("True", str(copy), "[]", "")


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    status = native.load_native()
    if not status.loaded:
        pytest.skip(f"native kernels: {status.detail}")
    compiler = tmp_path / "cxx"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo started >> {tmp_path}/log\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {status.detail} "$2"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "TANDEM_HOME": str(tmp_path / "home"), "CXX": str(compiler)}
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for start in starts:
        output, _ = start.communicate()
        assert output.startswith("True|")
    assert (tmp_path / "log").read_text() == "started\n"


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / native._build_key()
    folder.mkdir(parents=True)
    (folder / "tandem_kernels.so").write_bytes(b"not a library")
    (loaded, detail, _), _ = probe(tmp_path)
    assert loaded == "False"
    assert "delete its folder" in detail


def test_unlike_machines_never_share_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for features in ("avx2 fma", "avx2 avx512f fma"):
        monkeypatch.setattr(native, "_cpu_features", lambda features=features: features)
        keys.add(native._build_key())
    assert len(keys) == 2
