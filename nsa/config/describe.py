"""Text for people: tables, durations, one line of an error; settings as tables.

The tables of settings are for `nsa keys` and `nsa env`, and for docs/configuration.md.

`python -m nsa.config.describe PAGE` rewrites the generated tables in a page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsa.config import schema
from nsa.config.env import HIDDEN, TABLE, Variable, raw
from nsa.config.load import REPOSITORY, known_keys, to_container

Rows = list[tuple[str, ...]]


# --- tables ---


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Align rows as plain-text columns; columns with an index in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first row is the header."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def yaml_value(value: object) -> str:
    """A value as YAML writes it: true, and "" for an empty string."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


# --- text ---


def printable(text: str) -> str:
    """Replace control characters: files of a run may contain terminal escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text)


def first_line(error: BaseException) -> str:
    """First line of an error message; the class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def duration(seconds: float) -> str:
    """Format a time span in its two largest units: 7 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    rest = round(seconds)
    if rest < 60:
        return f"{rest} s"
    if rest < 3600:
        return f"{rest // 60} min {rest % 60} s"
    if rest < 86400:
        return f"{rest // 3600} h {rest % 3600 // 60} min"
    return f"{rest // 86400} d {rest % 86400 // 3600} h"


def install_line(extra: str) -> str:
    """The command that installs what an extra of this package brings."""
    if (REPOSITORY / "constraints.txt").is_file():  # a clone, with the versions that were tested
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("nsa") or []
    except PackageNotFoundError:  # neither a clone nor installed, e.g. a copied folder
        listed = []
    return f"pip install {' '.join(repr(need) for need in needs_of(extra, listed))}"


def needs_of(extra: str, listed: Sequence[str]) -> list[str]:
    """Packages of an extra, from the wheel's metadata; includes those of extras it refers to."""
    found: list[str] = []
    for text in listed:
        need, _, marker = (part.strip() for part in text.partition(";"))
        if re.search(rf"extra == [\"']{re.escape(extra)}[\"']", marker):
            other = re.fullmatch(r"nsa\[(.+)\]", need)
            names = other[1].split(",") if other else []
            found += [need] if other is None else []
            found += [inner for name in names for inner in needs_of(name, listed)]
    return found


# --- settings ---


def variable_rows(environ: Mapping[str, str] | None = None) -> Rows:
    """Every environment variable with its current value."""
    rows: Rows = [("name", "default", "current", "honoured", "meaning")]
    for variable in TABLE.values():
        current = raw(variable.name, environ)
        rows.append(
            (
                variable.name,
                _default(variable),
                "-" if current is None else HIDDEN if variable.secret else repr(current),
                variable.honoured,
                _meaning(variable),
            )
        )
    return rows


def variable_markdown() -> str:
    """The same for the documentation, without current values."""
    rows: Rows = [("name", "default", "honoured", "meaning")]
    for v in TABLE.values():
        rows.append((f"`{v.name}`", f"`{_default(v)}`", v.honoured, _meaning(v)))
    return markdown_table(rows)


def key_rows() -> Rows:
    """Every config key with type, default and meaning."""
    defaults, meanings = to_container(schema.Config()), key_meanings()
    rows: Rows = [("key", "type", "default", "meaning")]
    for key, kind in known_keys().items():
        group, name = key.split(".")
        rows.append((key, kind.__name__, yaml_value(defaults[group][name]), meanings[key]))
    return rows


def key_markdown() -> str:
    """The same for the documentation."""
    header, *rows = key_rows()
    return markdown_table([header, *((f"`{k}`", t, f"`{d}`", m) for k, t, d, m in rows)])


def key_meanings() -> dict[str, str]:
    """Meaning of each key: the string under each field of schema.py, which is its only source."""
    classes = {
        node.name: node
        for node in ast.parse(inspect.getsource(schema)).body
        if isinstance(node, ast.ClassDef)
    }
    groups = {name: type(value).__name__ for name, value in vars(schema.Config()).items()}
    return {
        f"{group}.{name}": line
        for group, class_name in groups.items()
        for name, line in _field_lines(classes[class_name]).items()
    }


def refresh(page: str) -> str:
    """Return a documentation page with its generated tables updated."""
    return fill(page, {"keys": key_markdown(), "variables": variable_markdown()})


def fill(page: str, parts: Mapping[str, str]) -> str:
    """Replace what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in a page."""
    for name, text in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in page or end not in page:
            raise ValueError(f"the page has no {begin} ... {end}; put both lines where it belongs")
        above, below = page.partition(begin)[0], page.partition(end)[2]
        page = f"{above}{begin}\n{text}\n{end}{below}"
    return page


def _field_lines(node: ast.ClassDef) -> dict[str, str]:
    lines = {}
    # A field's documentation is the string right below it; Python drops it, the AST keeps it.
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            lines[field.target.id] = str(below.value.value)
    return lines


def _meaning(variable: Variable) -> str:
    sets = f" (sets {', '.join(s.partition('=')[0] for s in variable.sets)})"
    return variable.meaning + (sets if variable.sets else "")


def _default(variable: Variable) -> str:
    if isinstance(variable.default, bool):
        return str(int(variable.default))  # 0 or 1, as in a shell
    return "-" if variable.default is None else yaml_value(variable.default)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(refresh(document.read_text(encoding="utf-8")), encoding="utf-8")
