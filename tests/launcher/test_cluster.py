from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cluster import Cluster


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("Traceback\nValueError: out of luck\n\n", "ValueError: out of luck"),
        ("2026-12-01 WARNING x slow\n2026-12-01 INFO x all is well\n", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_last_words_of_a_process_are_its_last_line(
    tmp_path: Path, log: str | None, words: str
) -> None:
    if log is not None:
        (tmp_path / "worker-abc-01000000-77.err").write_text(log)
    (tmp_path / "worker-abc-01000000-78.err").write_text("another's")
    assert Cluster(ray=None, logs=tmp_path).last_words(77) == words
