"""The cache of unpacked models: once, by one process, wholly or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import WeightsError
from tandem.requests import Message
from tandem.testing.tiny import write_tiny_llama
from tandem.testing.tiny_gguf import TINY_GGUF_VOCAB_SIZE, write_tiny_gguf
from tandem.tokenizer import load_tokenizer
from tandem.weights import unpack
from tandem.weights.prepared import MANIFEST_NAME
from tandem.weights.store import ModelFolder, prepare, tandem_home

Steps = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tandem_home()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "hf", vocab_size=TINY_GGUF_VOCAB_SIZE)
    write_tiny_gguf(tmp_path / "Tiny-1.5.gguf", tmp_path / "hf", packing="Q8_0")
    return tmp_path / "Tiny-1.5.gguf"


def steps_of(path: Path) -> tuple[ModelFolder, Steps]:
    seen: Steps = []
    return prepare(str(path), lambda *step: seen.append(step)), seen


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "prepared").iterdir() if path.suffix != ".lock"]


def test_second_time_only_opens(gguf: Path) -> None:
    first, steps = steps_of(gguf)
    assert any("unpacking" in what for what, _, _ in steps)
    second, steps = steps_of(gguf)
    assert first == second
    assert steps == []
    assert first.name == "Tiny-1.5"


def test_prepared_folder_works(gguf: Path) -> None:
    folder = prepare(str(gguf))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a to") == [ord("a"), 260, ord("o")]
    ids = tokenizer.encode_chat([Message(role="user", content="x")])
    assert tokenizer.decode(ids) == "x\n"


def test_digest_follows_the_content_not_the_place(gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(gguf.read_bytes())
    assert prepare(str(copy)).weights_digest == prepare(str(gguf)).weights_digest
    assert prepare(str(copy)).path == prepare(str(gguf)).path


def test_changed_file_is_unpacked_anew(gguf: Path) -> None:
    before = prepare(str(gguf))
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    after = prepare(str(gguf))
    assert after.weights_digest != before.weights_digest
    assert after.path != before.path


def test_opening_the_prepared_folder_by_path_gives_the_same_digest(gguf: Path) -> None:
    folder = prepare(str(gguf))
    assert prepare(str(folder.path)).weights_digest == folder.weights_digest


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_incomplete_folder_is_made_anew(gguf: Path, name: str, damage: str, home: Path) -> None:
    folder = prepare(str(gguf))
    victim = folder.path / name
    expected = victim.read_bytes()
    if damage == "remove" or name == MANIFEST_NAME:
        victim.unlink()
    else:
        victim.write_bytes(expected[:-1])
    assert prepare(str(gguf)) == folder
    assert victim.read_bytes() == expected
    assert len(leftovers(home)) == 1


def test_what_a_crash_left_is_removed(gguf: Path, home: Path) -> None:
    folder = prepare(str(gguf))
    half_done = folder.path.parent / f".{folder.path.name}.abc"
    folder.path.rename(half_done)
    assert prepare(str(gguf)) == folder
    assert leftovers(home) == [folder.path.name]


def test_full_disk_leaves_nothing(gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(unpack, "_write_weights", full)
        with pytest.raises(WeightsError, match=r"disk is full \(\d+ MiB free\)"):
            prepare(str(gguf))
    assert leftovers(home) == []
    assert prepare(str(gguf)).path.is_dir()


def test_bad_file_leaves_nothing(gguf: Path, home: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-4000])
    with pytest.raises(WeightsError, match="truncated"):
        prepare(str(gguf))
    assert leftovers(home) == []


def test_home_that_cannot_be_made(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(gguf / "below-a-file"))
    with pytest.raises(WeightsError, match="set TANDEM_HOME"):
        prepare(str(gguf))


@pytest.mark.parametrize("name", ["no-such-model", "missing.gguf", ""])
def test_names_that_mean_nothing(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError):
        prepare(name)


def _prepare_in_process(path: str, results: Any) -> None:
    seen: Steps = []
    folder = prepare(path, lambda *step: seen.append(step))
    results.put(
        (str(folder.path), any("MiB" in what or "unpacking" in what for what, _, _ in seen))
    )


def test_many_processes_unpack_once(gguf: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=_prepare_in_process, args=(str(gguf), results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert len({path for path, _ in found}) == 1
    assert sum(worked for _, worked in found) == 1
    assert np.isfinite(np.fromfile(Path(found[0][0]) / "model.safetensors", "<f4")).any()
