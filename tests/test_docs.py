"""What the documentation names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CASE = re.compile(r"^\| ((?:XFR|DTH|ABT|HND|CCH)-\d+) \|", re.MULTILINE)
FAULTS = ROOT / "docs" / "faults.md"


@cache
def names_of_tests(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text(encoding="utf-8"))
    missing = [f"{file}::{name}" for file, name in named if name not in names_of_tests(file)]
    assert not missing


def test_every_reported_fault_has_a_test_and_a_source() -> None:
    text = FAULTS.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if CASE.match(line)]
    assert len(rows) == len(set(CASE.findall(text))) >= 18
    for row in rows:
        assert NAMED_TEST.search(row), row
        assert "](https://github.com/" in row, row
