"""The cache of unpacked GGUF files: each is unpacked once, wholly or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tandem.weights.checkpoint import read_json
from tandem.weights.home import (
    Progress,
    file_sha256,
    locked,
    make_folder,
    sync_to_disk,
    tandem_home,
    write_failed,
)

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a prepared folder was made from; written last."""

    source_sha256: str
    file_bytes: dict[str, int]
    """Size of every file beside the manifest."""

    @property
    def weights_digest(self) -> str:
        """Equal for folders unpacked from equal files in the same way."""
        return hashlib.sha256(f"gguf v{_FORMAT} {self.source_sha256}".encode()).hexdigest()


def prepared_path(source_sha256: str) -> Path:
    """Where the unpacked form of a .gguf file with this SHA-256 is kept."""
    return tandem_home() / "prepared" / f"{source_sha256}-v{_FORMAT}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a prepared folder, or None when it has none or is incomplete."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    match read_json(path):
        case {"format": int(form), "source_sha256": str(sha256), "file_bytes": dict(file_bytes)}:
            manifest = Manifest(source_sha256=sha256, file_bytes=file_bytes)
        case _:
            return None
    whole = all(
        (folder / name).is_file() and (folder / name).stat().st_size == num_bytes
        for name, num_bytes in file_bytes.items()
    )
    return manifest if whole and form == _FORMAT else None


def unpack_once(source: Path, source_sha256: str, progress: Progress) -> Path:
    """Unpack a .gguf file into the cache unless that has been done.

    Any number of processes may call this at once; one works and the others wait for it. A folder
    that a crash or a full disk left incomplete is never used and is removed by the next attempt.

    Args:
        source: the .gguf file.
        source_sha256: of its content.
        progress: told about bytes.

    Returns:
        The prepared folder.

    Raises:
        WeightsError: the file cannot be used, or disk or memory do not suffice.
    """
    folder = prepared_path(source_sha256)
    if read_manifest(folder) is not None:
        return folder
    with locked(folder.with_suffix(".lock"), progress):
        if read_manifest(folder) is None:
            _unpack(source, source_sha256, folder, progress)
    return folder


def _unpack(source: Path, source_sha256: str, folder: Path, progress: Progress) -> None:
    from tandem.weights.unpack import unpack_gguf  # a start that finds its model needs no gguf

    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        target = make_folder(Path(scratch) / "model")
        try:
            unpack_gguf(source, target, progress)
            _write_manifest(target, source_sha256)
            progress(f"writing {source.name} to disk", 0, 0)
            for path in (*target.iterdir(), target):
                sync_to_disk(path)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(target, folder)
        except OSError as problem:
            raise write_failed(folder, problem) from problem
    sync_to_disk(folder.parent)


def _write_manifest(target: Path, source_sha256: str) -> None:
    file_bytes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    content = {"format": _FORMAT, "source_sha256": source_sha256, "file_bytes": file_bytes}
    (target / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def remembered_sha256(path: Path, progress: Progress) -> str:
    """SHA-256 of a file, remembered until its size, time or place on disk changes."""
    state = path.stat()
    key = {
        "path": str(path),
        "bytes": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "inode": state.st_ino,
    }
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    stamp = make_folder(tandem_home() / "digests") / f"{name}.json"
    if stamp.is_file():
        known = read_json(stamp)
        if isinstance(sha256 := known.pop("sha256", None), str) and known == key:
            return sha256
    sha256 = file_sha256(path, progress)
    with tempfile.NamedTemporaryFile("w", dir=stamp.parent, delete=False) as scratch:
        json.dump({**key, "sha256": sha256}, scratch)
    os.replace(scratch.name, stamp)
    return sha256
