"""Where log lines go: to stderr, and to whoever wants to be told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from tandem.config.tree import LogConfig

PACKAGES = ("tandem", "kv_transfer", "prefill_worker", "decode_worker", "router", "launcher")

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def write_logs(config: LogConfig) -> None:
    """Write this process's own records to stderr from the configured level on."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.setLevel(level)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(min(level, logging.INFO))
        logger.addHandler(handler)
        logger.propagate = False


class _ToStderr(logging.Handler):
    """Looks stderr up for each record, so that progress bars can hold it for a moment."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


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
