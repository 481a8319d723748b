"""The source agrees with the table of environment variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from nsa.config.env import TABLE
from nsa.config.load import REPOSITORY

READER = REPOSITORY / "nsa" / "config" / "env.py"
LISTING = REPOSITORY / "nsa" / "config" / "describe.py"
"""Prints the raw values of all variables, which honours none of them."""


def test_only_one_module_touches_the_environment() -> None:
    touching = [
        f"{path.relative_to(REPOSITORY)}: {ast.unparse(node)}"
        for path, node in _nodes()
        if path != READER and _touches_environment(node)
    ]

    assert touching == []


def test_every_code_variable_is_read_and_no_planned_one_is() -> None:
    read_names = set(_read_names())
    by_config = {v.name for v in TABLE.values() if v.sets}
    code, planned = (
        {v.name for v in TABLE.values() if v.honoured == mark} for mark in ("code", "planned")
    )

    assert code - read_names - by_config == set()
    assert planned & (read_names | by_config) == set()
    assert read_names <= TABLE.keys()


def _read_names() -> Iterator[str]:
    """Yield the names given to `read`; each must be a literal, or nobody could check it."""
    for path, node in _nodes():
        if path in (READER, LISTING) or not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("read", "raw"):
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{path}:{node.lineno} hides the name it reads"
            yield str(name.value)


def _touches_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in names for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Yield every syntax node of the code that is not a test."""
    folders = [REPOSITORY / name for name in ("nsa", "scripts", "bench", "examples")]
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield path, node
