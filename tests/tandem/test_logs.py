from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from tandem.config.tree import LogConfig
from tandem.logs import PACKAGES, Listener, write_logs

logger = logging.getLogger("tandem.somewhere")
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\S+) (\S+) (.*)")


@pytest.fixture(autouse=True)
def untouched_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(it, it.level, it.propagate, list(it.handlers)) for it in loggers]
    yield
    for it, level, propagate, handlers in before:
        it.setLevel(level)
        it.propagate = propagate
        it.handlers[:] = handlers


class Stderr:
    """What was written to stderr since the last look."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def raw(self) -> list[str]:
        return self._capture.readouterr().err.splitlines()

    def lines(self) -> list[tuple[str, ...]]:
        """Level, name and text of each line."""
        found = [LINE.fullmatch(line) for line in self.raw()]
        assert all(found)
        return [line.groups() for line in found if line is not None]

    def texts(self) -> list[str]:
        return [line[2] for line in self.lines()]


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Stderr:
    return Stderr(capsys)


def test_a_record_is_one_line(stderr: Stderr) -> None:
    write_logs(LogConfig())
    logger.info("request_id=%s state=%s", "r1", "running")
    assert stderr.lines() == [("INFO", "tandem.somewhere", "request_id=r1 state=running")]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_records_below_the_level_are_not_written(
    level: str, written: list[str], stderr: Stderr
) -> None:
    write_logs(LogConfig(level=level))  # type: ignore[arg-type]
    for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(severity, "text")
    assert [line[0] for line in stderr.lines()] == written


@pytest.mark.parametrize("package", PACKAGES)
def test_all_our_packages_are_written_and_nobody_else(package: str, stderr: Stderr) -> None:
    write_logs(LogConfig())
    logging.getLogger(f"{package}.module").info("ours")
    logging.getLogger("grpc").info("theirs")
    assert stderr.lines() == [("INFO", f"{package}.module", "ours")]


def test_a_second_call_replaces_the_first(stderr: Stderr) -> None:
    write_logs(LogConfig(level="debug"))
    write_logs(LogConfig(level="warning"))
    logger.info("no")
    logger.warning("once")
    assert stderr.texts() == ["once"]


def test_a_message_from_outside_cannot_look_like_a_record(stderr: Stderr) -> None:
    write_logs(LogConfig())
    logger.info("peer said: %s", "bye\n2026-01-01T00:00:00.000Z INFO router all is well\r\n")
    assert stderr.texts() == [
        r"peer said: bye\n2026-01-01T00:00:00.000Z INFO router all is well\r\n"
    ]


def test_a_traceback_follows_on_indented_lines(stderr: Stderr) -> None:
    write_logs(LogConfig())
    logger.error("worker=%s failed", "w", exc_info=ValueError("first\nsecond"))
    first, *rest = stderr.raw()
    assert LINE.fullmatch(first)
    assert [line.strip() for line in rest][-2:] == ["ValueError: first", "second"]
    assert all(line.startswith("    ") for line in rest)


def test_stderr_may_be_replaced_later(stderr: Stderr, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logs(LogConfig())
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logger.info("text")
    assert not stderr.raw()
    assert later.getvalue().endswith(" INFO tandem.somewhere text\n")


def test_a_listener_hears_from_info_on_whatever_is_written(stderr: Stderr) -> None:
    write_logs(LogConfig(level="error"))
    heard: list[tuple[int, str]] = []
    listener = Listener(lambda level, text: heard.append((level, text)))
    logger.debug("a")
    logger.info("b=%d", 1)
    logging.getLogger("router").warning("c")
    listener.close()
    logger.error("d")
    assert heard == [(logging.INFO, "b=1"), (logging.WARNING, "c")]
    assert stderr.texts() == ["d"]
