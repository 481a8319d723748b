"""docs/reliability.md names a test for each promise: all of them exist, and none is left out."""

from __future__ import annotations

import re

from nsa.tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reliability.md"


def text_of(test_file: str) -> str:
    (path,) = (REPOSITORY / "nsa" / "tests").rglob(test_file)
    return path.read_text(encoding="utf-8")


def promises() -> list[str]:
    """Rows of the tables whose last column is the test."""
    tables = re.findall(r"^\|.*\| test \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) >= 28
    return rows


def test_every_row_names_a_test_that_exists_and_every_chaos_test_has_a_row() -> None:
    named: set[tuple[str, str]] = set()
    for row in promises():
        found = re.findall(r"`(test_\w+)`(?: \((test_\w+\.py)\))? \|$", row)
        assert found, f"no test: {row[:60]}"
        named |= {(file or "test_chaos.py", name) for name, file in found}
    missing = [
        f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in text_of(file)
    ]
    assert missing == []
    chaos = re.findall(r"^def (test_\w+)", text_of("test_chaos.py"), re.MULTILINE)
    assert {name for file, name in named if file == "test_chaos.py"} == set(chaos)
