"""docs/configuration.md tells of every key and every variable, as the code has them."""

from __future__ import annotations

import pytest

from nsa.config import known_keys
from nsa.config.describe import key_meanings, key_rows, refresh, text_table
from nsa.config.env import TABLE
from nsa.config.load import REPOSITORY

PAGE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert refresh(PAGE) == PAGE, "run: python -m nsa.config.describe docs/configuration.md"


@pytest.mark.parametrize("name", [*known_keys(), *TABLE])
def test_the_page_names_every_setting(name: str) -> None:
    assert f"| `{name}` |" in PAGE


def test_every_shipped_config_is_on_the_page() -> None:
    assert all(p.name in PAGE for p in (REPOSITORY / "configs").glob("*.yaml"))


def test_every_key_has_a_line_that_explains_it() -> None:
    meanings = key_meanings()

    assert meanings.keys() == known_keys().keys()
    assert all(line.endswith(".") for line in meanings.values())


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="begin keys"):
        refresh("# no marks\n")


def test_a_text_table_is_aligned() -> None:
    rows = [("a", "1"), ("long", "23")]

    assert text_table(rows, right=[1]).splitlines() == ["a      1", "long  23"]
    widths = {
        line.index(row[3])
        for line, row in zip(text_table(key_rows()).splitlines(), key_rows(), strict=True)
    }
    assert len(widths) == 1
