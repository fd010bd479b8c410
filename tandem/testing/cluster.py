"""A whole deployment for tests: ``tandem serve`` in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_READY_PREFIX = "ready: grpc://"
_STOP_TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCluster:
    """A deployment that answers requests."""

    address: str
    """host:port of its public server."""
    process: subprocess.Popen[str]
    """The launcher; SIGTERM and SIGINT stop the deployment."""
    log: Path
    """What the launcher wrote to stderr."""

    def stop(self) -> int:
        """Stop the deployment as Ctrl-C would and wait; the launcher's exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(_STOP_TIMEOUT_S)


@contextmanager
def served_cluster(
    sets: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    ready_timeout_s: float = 300.0,
) -> Iterator[ServedCluster]:
    """Start ``tandem serve`` and stop it at the end of the block.

    Args:
        sets: settings as ``a.b=value``; the port is a free one unless set.
        environment: variables besides this process's own.
        ready_timeout_s: a guard against hangs.

    Raises:
        RuntimeError: the deployment did not become ready; the message holds what it wrote.
    """
    command = [sys.executable, "-m", "launcher", "serve"]
    for setting in ("router.port=0", *sets):
        command += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        assert process.stdout is not None
        try:
            address = _wait_for_ready(process.stdout, ready_timeout_s)
            if address is None:
                raise RuntimeError(f"tandem serve did not become ready:\n{log.read_text()}")
            cluster = ServedCluster(address=address, process=process, log=log)
            yield cluster
            cluster.stop()
        finally:
            if process.poll() is None:
                process.kill()  # Ray's processes follow: they die with the one that started them
                process.wait()
            process.stdout.close()


def _wait_for_ready(output: IO[str], timeout_s: float) -> str | None:
    """The address in the ready line; None when the output ends or nothing comes in time."""
    found: list[str] = []
    decided = threading.Event()

    def read() -> None:
        for line in output:
            if line.startswith(_READY_PREFIX):
                found.append(line.removeprefix(_READY_PREFIX).strip())
                break
        decided.set()

    threading.Thread(target=read, name="ready-line", daemon=True).start()
    decided.wait(timeout_s)
    return found[0] if found else None
