"""report.json: a verdict about a run, criterion by criterion, with the evidence of each.

Schema, version 1: the fields of Verdict, with `schema` before them and `verdict` in words after
them. Page: docs/schemas/report.md.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config.describe import markdown_table, text_table
from nsa.files import read_text, write_text
from nsa.operate.run_folder import require_types
from nsa.operate.text import printable

SCHEMA = 1
NAME = "report.json"
PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
GO, NO_GO, UNKNOWN = "GO", "NO-GO", "CANNOT JUDGE"
EXIT_CODES = {GO: 0, NO_GO: 1, UNKNOWN: 2}
COLUMNS = ("criterion", "verdict", "value", "limit", "evidence")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One criterion."""

    name: str
    value: str
    """What was measured."""
    limit: str
    """What is allowed."""
    verdict: str
    """PASS, FAIL or NOT MEASURED; what was not recorded never passes."""
    evidence: str
    """The file and the record that the value is from, or what is missing."""
    advice: str = ""
    """What to do where it did not pass."""
    essential: bool = True
    """Whether nothing can be said about the run without it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All criteria of a point in a run's life, and what they come to."""

    folder: str
    at: str
    """The point: launch, 100, 500, checkpoint, phase1, phase2 or final; or preflight."""
    made: str
    """When, UTC."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the run is and how far it came."""
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def word(self) -> str:
        """GO, NO-GO where a criterion fails, or CANNOT JUDGE where an essential one is missing."""
        if any(row.verdict == FAIL for row in self.rows):
            return NO_GO
        missing = [row for row in self.rows if row.verdict == NOT_MEASURED and row.essential]
        return UNKNOWN if missing or not self.rows else GO

    @property
    def go(self) -> bool:
        """Whether the run may go on to what comes next."""
        return self.word == GO

    @property
    def exit_code(self) -> int:
        """0 GO, 1 NO-GO, 2 cannot judge."""
        return EXIT_CODES[self.word]

    def summary(self) -> str:
        """The last line: the verdict, and the criteria that did not pass by name."""
        parts = []
        for verdict, word in ((FAIL, "failed"), (NOT_MEASURED, "not measured")):
            names = [row.name for row in self.rows if row.verdict == verdict]
            parts += [f"{word}: {', '.join(names)}"] if names else []
        passed = sum(row.verdict == PASS for row in self.rows)
        return f"{self.word} at {self.at}: {'; '.join([f'{passed} passed', *parts])}"

    def text(self) -> str:
        """The verdict for a terminal; the last line says GO, NO-GO or CANNOT JUDGE."""
        lines = [f"{name}: {value}" for name, value in {"run": self.folder, **self.facts}.items()]
        lines += ["", text_table(self._table()), ""]
        lines += [f"{row.name}: {row.advice}" for row in self.rows if row.verdict != PASS]
        lines += [f"found: {problem}" for problem in self.problems]
        return "\n".join(
            printable(part) for line in [*lines, self.summary()] for part in line.split("\n")
        )

    def markdown(self) -> str:
        """The same as a page."""
        facts = [f"- {name}: {_inline(value)}" for name, value in self.facts.items()]
        todo = [row for row in self.rows if row.verdict != PASS and row.advice]
        parts = [
            f"# {self.word}: {_inline(self.folder)} at {self.at}",
            _inline(self.summary()) + f" ({self.made})",
            "\n".join(facts),
            markdown_table([[_inline(cell) for cell in row] for row in self._table()]),
        ]
        if todo:
            parts.append("\n".join(f"- **{row.name}**: {_inline(row.advice)}" for row in todo))
        if self.problems:
            found = "\n".join(f"- {_inline(problem)}" for problem in self.problems)
            parts.append(f"Found in the folder:\n\n{found}")
        return "\n\n".join(part for part in parts if part) + "\n"

    def json(self) -> str:
        """report.json as text."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self), "verdict": self.word}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def _table(self) -> list[tuple[str, ...]]:
        cells = ((r.name, r.verdict, r.value, r.limit, r.evidence) for r in self.rows)
        return [COLUMNS, *cells]


def write_report(folder: Path, verdict: Verdict) -> Path:
    """Write report.json."""
    write_text(folder / NAME, verdict.json())
    return folder / NAME


def read_report(folder: Path) -> Verdict:
    """Read report.json back; a newer schema, or another kind of file, is refused."""
    path = folder / NAME
    try:
        content: dict[str, Any] = json.loads(read_text(path))
        schema, word = content.pop("schema"), content.pop("verdict")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}; this program reads {SCHEMA}")
        rows = [Row(**row) for row in content.pop("rows")]
        verdict = Verdict(**content, rows=rows)
        for part in (*rows, verdict):
            require_types(part, str(path))
        if verdict.word != word:
            raise ValueError(f"it says {word!r}, its criteria come to {verdict.word!r}")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a report ({error}); use the program that wrote it"
        ) from None
    return verdict


def _inline(text: str) -> str:
    """A text that stays within its line and cannot be taken for markup."""
    return printable(text).replace("<", "&lt;").replace("*", "\\*").replace("`", "'")
