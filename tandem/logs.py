"""Where log lines go: to stderr, and to whoever wants to be told."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, TextIO

from tandem.config.tree import LogConfig

PACKAGES = ("tandem", "kv_transfer", "prefill_worker", "decode_worker", "router", "launcher")

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


def write_logs(config: LogConfig) -> None:
    """Write this process's own records to stderr from the configured level on.

    A record is one line, ``time level name text``, with the time in UTC. A traceback follows on
    lines that are indented, so that every line which is not begins a record. A second call replaces
    what the first one set.
    """
    level = logging.getLevelNamesMapping()[config.level.upper()]
    handler = _ToStderr()
    handler.setFormatter(_OneLine())
    handler.setLevel(level)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        for former in [it for it in logger.handlers if isinstance(it, _ToStderr)]:
            logger.removeHandler(former)
        logger.setLevel(min(level, logging.INFO))
        logger.addHandler(handler)
        logger.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """Looks stderr up for each record, so that progress bars can hold it for a moment."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _OneLine(logging.Formatter):
    """Keeps line breaks of a message, which may come from outside, from looking like records."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _TIME_FORMAT)
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return textwrap.indent(super().formatException(ei), "    ")


class Listener(logging.Handler):
    """Hands each record of our packages, from level info on, to a function."""

    def __init__(self, heard: Callable[[int, str], None]) -> None:
        """Start listening.

        Args:
            heard: takes a record's level and message; called in the thread that logs.
        """
        super().__init__(logging.INFO)
        self._heard = heard
        for package in PACKAGES:
            logging.getLogger(package).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        self._heard(record.levelno, record.getMessage())

    def close(self) -> None:
        """Stop listening."""
        for package in PACKAGES:
            logging.getLogger(package).removeHandler(self)
        super().close()
