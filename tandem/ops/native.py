"""Builds the C++ kernels once per machine kind, keeps them on disk, and loads them.

The library is compiled for exactly this CPU, so its folder's name covers the CPU's features: a
home folder shared between unlike machines never hands one the other's instructions.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from tandem.ops import library as _library  # noqa: F401 - defines the operators
from tandem.weights.home import Progress, silent, tandem_home

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_LIBRARY_NAME = "tandem_kernels.so"
_COMPILE_TIMEOUT_S = 600
_REMEDY = "install g++ (Debian, Ubuntu: apt install g++) or name a compiler in CXX"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStatus:
    """Whether the native kernels serve this process."""

    loaded: bool
    detail: str
    """The library's path, or why there is none and what helps."""


_loaded: list[NativeStatus] = []  # an operator library loads once in a process
_warned: list[str] = []


def load_native(progress: Progress = silent) -> NativeStatus:
    """Load the native kernels, compiling them first if this machine has none yet.

    Without them the operators run their references, which is slower and cannot be captured; a
    warning says so once in a process.

    Args:
        progress: told when the compiler starts and when it is done.

    Returns:
        What came of it.
    """
    if _loaded:
        return _loaded[0]
    status = _find_or_build(progress)
    if status.loaded:
        _loaded.append(status)
    elif status.detail not in _warned:
        _warned.append(status.detail)
        logger.warning("no native CPU kernels, steps run eagerly and slowly: %s", status.detail)
    return status


def is_loaded() -> bool:
    """Whether the native kernels serve this process."""
    return bool(_loaded)


def _find_or_build(progress: Progress) -> NativeStatus:
    folder = tandem_home() / "kernels" / _build_key()
    path = folder / _LIBRARY_NAME
    if not path.is_file():
        compiler = _find_compiler()
        if compiler is None:
            return NativeStatus(loaded=False, detail=f"no C++ compiler found; {_REMEDY}")
        try:
            problem = _build(compiler, folder, progress)
        except OSError as error:
            problem = f"cannot write {folder}: {error.strerror}; set TANDEM_HOME"
        if problem is not None:
            return NativeStatus(loaded=False, detail=problem)
    return _load(path)


def _load(path: Path) -> NativeStatus:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return NativeStatus(
            loaded=False, detail=f"cannot load {path} ({error}); delete its folder to rebuild it"
        )
    return NativeStatus(loaded=True, detail=str(path))


def _build(compiler: str, folder: Path, progress: Progress) -> str | None:
    """Compile into ``folder``, whole or not at all; returns what went wrong, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, progress):
        if (folder / _LIBRARY_NAME).is_file():  # another process was first
            return None
        progress("compiling CPU kernels", 0, 1)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built, log = Path(scratch) / _LIBRARY_NAME, folder / "build.log"
            source = str(_SOURCES / "kernels.cpp")
            command = [compiler, *_flags(), source, "-o", str(built), *_link_flags()]
            with log.open("w") as output:
                output.write(" ".join(command) + "\n")
                output.flush()
                try:
                    done = subprocess.run(
                        command,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        timeout=_COMPILE_TIMEOUT_S,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    return f"{compiler} took more than {_COMPILE_TIMEOUT_S} s; see {log}"
            if done.returncode != 0:
                return f"{compiler} failed with status {done.returncode}; see {log}"
            built.replace(folder / _LIBRARY_NAME)
        progress("compiling CPU kernels", 1, 1)
    logger.info("built CPU kernels path=%s", folder)
    return None


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that compiles the CPU kernels", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _find_compiler() -> str | None:
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O3", native, f"-std={_cxx_standard()}", "-fPIC", "-shared", "-w"]
    flags += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    if sys.platform == "linux":
        flags.append("-fopenmp")
    return flags


def _link_flags() -> list[str]:
    flags = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        flags.append("-Wl,-undefined,dynamic_lookup")
    return flags


def _cxx_standard() -> str:
    """The standard torch itself was built with: its headers need it."""
    found = re.search(r"C\+\+ Version: (\d{4})", torch.__config__.show())
    year = int(found.group(1)) if found else 2017
    return "c++20" if year >= 2020 else "c++17"


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return " ".join(sorted(value.split()))
    return platform.processor()


def _build_key() -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*_flags(), torch.__version__, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]
