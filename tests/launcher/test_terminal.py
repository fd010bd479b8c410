from __future__ import annotations

import sys

import pytest

from launcher.progress import show_steps
from launcher.terminal import complain, libraries_quiet, write_out


def test_off_a_terminal_each_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_steps() as steps:
        for done in range(3):
            steps("downloading", done, 2)
        steps("starting Ray", 0, 0)
        steps.member("decode-0", "capturing done=1 total=4", ready=False)
        steps.member("decode-0", "capturing done=2 total=4", ready=False)
        steps.member("decode-0", "ready (pid 7)", ready=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "downloading",
        "starting Ray",
        "decode-0: capturing",
        "decode-0: ready (pid 7)",
    ]


def test_what_libraries_print_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with libraries_quiet():
        sys.stdout.write("chatter\n")
        write_out("result\n")
    write_out("after\n")
    assert capsys.readouterr().out == "result\nafter\n"


def test_a_complaint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("two\nlines")
    assert capsys.readouterr().err == "tandem: two lines\n"
