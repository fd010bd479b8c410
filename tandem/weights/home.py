"""Where Tandem keeps what it downloads and prepares, and the forms that the other modules share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tandem.errors import WeightsError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); a total of 0 means that it is not known."""

_SPARE_BYTES = 64 << 20


def silent(what: str, done: int, total: int) -> None:
    """Report to nobody."""


def tandem_home() -> Path:
    """`$TANDEM_HOME`, or `~/.cache/tandem`."""
    home = os.environ.get("TANDEM_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "tandem"


def need_disk_space(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        WeightsError: the disk of ``folder`` has less free than ``num_bytes`` and a little.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        needed, has = (num_bytes + _SPARE_BYTES) / 2**20, free / 2**20
        raise WeightsError(
            str(folder),
            f"{what} needs {needed:.0f} MiB of disk and {has:.0f} MiB are free; "
            "free some space or point TANDEM_HOME at another disk",
        )


def need_memory(num_bytes: int, what: str) -> None:
    """Refuse to begin what would drive the machine out of memory, where the system tells.

    Raises:
        WeightsError: less than ``num_bytes`` of memory is available.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    available = next((line for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None and (has := int(available.split()[1]) << 10) < num_bytes:
        raise WeightsError(
            what, f"needs {num_bytes >> 20} MiB of memory and {has >> 20} MiB are available"
        )


def write_failed(path: Path, problem: OSError) -> WeightsError:
    """What to tell about a write that the system refused."""
    if problem.errno == errno.ENOSPC:
        free = shutil.disk_usage(path.parent).free >> 20
        return WeightsError(str(path), f"the disk is full ({free} MiB free); free some space")
    return WeightsError(str(path), f"cannot be written: {problem.strerror}")


def make_folder(path: Path) -> Path:
    """Create ``path`` with its parents.

    Raises:
        WeightsError: the system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise WeightsError(
            str(path), f"cannot create this folder ({problem.strerror}); set TANDEM_HOME"
        ) from problem
    return path


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file ``path``; at most one process on the machine does at a time."""
    make_folder(path.parent)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that prepares the same model", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def file_sha256(path: Path, progress: Progress = silent) -> str:
    """SHA-256 of a whole file, as hex."""
    total = path.stat().st_size
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
            done += len(piece)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def sync_to_disk(path: Path) -> None:
    """Make what was written to a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
