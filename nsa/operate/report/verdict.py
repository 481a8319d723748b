"""report.json: the criteria of a verdict with value, limit and evidence; its writer and reader.

Schema version 1: `schema`, the fields of Verdict, then `verdict` as a word.
Page: docs/schemas/report.md.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config.describe import markdown_table, printable, text_table
from nsa.files import read_text, write_text
from nsa.operate.run_files import require_types

SCHEMA = 1
REPORT_FILE = "report.json"
PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
GO, NO_GO, UNKNOWN = "GO", "NO-GO", "CANNOT JUDGE"
EXIT_CODES = {GO: 0, NO_GO: 1, UNKNOWN: 2}
COLUMNS = ("criterion", "verdict", "value", "limit", "evidence")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One criterion."""

    name: str
    value: str
    """Measured value."""
    limit: str
    """Allowed value."""
    verdict: str
    """PASS, FAIL or NOT MEASURED; a value that was not recorded never passes."""
    evidence: str
    """File and record of the value, or what is missing."""
    advice: str = ""
    """What to do if it did not pass."""
    essential: bool = True
    """If not measured, the verdict is CANNOT JUDGE."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All criteria at one point of a run, and the resulting verdict."""

    folder: str
    at: str
    """Point in the run: launch, 100, 500, checkpoint, phase1, phase2 or final; or preflight."""
    made: str
    """Time of the verdict, ISO 8601 UTC."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the run is and how far it got."""
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Files that could not be read."""

    @property
    def word(self) -> str:
        """NO-GO if any criterion fails, CANNOT JUDGE if an essential one is missing, else GO."""
        if any(row.verdict == FAIL for row in self.rows):
            return NO_GO
        missing = [row for row in self.rows if row.verdict == NOT_MEASURED and row.essential]
        return UNKNOWN if missing or not self.rows else GO

    @property
    def go(self) -> bool:
        """Whether the next phase may start."""
        return self.word == GO

    @property
    def exit_code(self) -> int:
        """0 GO, 1 NO-GO, 2 cannot judge."""
        return EXIT_CODES[self.word]

    def summary(self) -> str:
        """The last line: the verdict, and the names of the criteria that did not pass."""
        parts = []
        # Failures first: they decide the verdict.
        for verdict, word in ((FAIL, "failed"), (NOT_MEASURED, "not measured")):
            names = [row.name for row in self.rows if row.verdict == verdict]
            parts += [f"{word}: {', '.join(names)}"] if names else []
        passed = sum(row.verdict == PASS for row in self.rows)
        return f"{self.word} at {self.at}: {'; '.join([f'{passed} passed', *parts])}"

    def text(self) -> str:
        """The verdict as terminal text; the last line starts with GO, NO-GO or CANNOT JUDGE."""
        lines = [f"{name}: {value}" for name, value in {"run": self.folder, **self.facts}.items()]
        lines += ["", text_table(self._table()), ""]
        lines += [f"{row.name}: {row.advice}" for row in self.rows if row.verdict != PASS]
        lines += [f"found: {problem}" for problem in self.problems]
        return "\n".join(
            printable(part) for line in [*lines, self.summary()] for part in line.split("\n")
        )

    def markdown(self) -> str:
        """The verdict as a Markdown page."""
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
        """The content of report.json; NaN is refused, since it is not valid JSON."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self), "verdict": self.word}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def _table(self) -> list[tuple[str, ...]]:
        cells = ((r.name, r.verdict, r.value, r.limit, r.evidence) for r in self.rows)
        return [COLUMNS, *cells]


def write_report(folder: Path, verdict: Verdict) -> Path:
    """Write report.json."""
    write_text(folder / REPORT_FILE, verdict.json())
    return folder / REPORT_FILE


def read_report(folder: Path) -> Verdict:
    """Read report.json; reject a newer schema or a different kind of file."""
    path = folder / REPORT_FILE
    try:
        content: dict[str, Any] = json.loads(read_text(path))
        schema, word = content.pop("schema"), content.pop("verdict")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}; this program reads {SCHEMA}")
        # Unknown fields raise TypeError here, which the handler below turns into ValueError.
        rows = [Row(**row) for row in content.pop("rows")]
        verdict = Verdict(**content, rows=rows)
        for part in (*rows, verdict):
            require_types(part, str(path))
        # The stored word must follow from the stored rows; otherwise somebody edited the file.
        if verdict.word != word:
            raise ValueError(f"its verdict is {word!r}, but its criteria give {verdict.word!r}")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a report ({error}); use the program that wrote it"
        ) from None
    return verdict


def _inline(text: str) -> str:
    """Escape text so that it stays on one line and is not read as Markdown."""
    return printable(text).replace("<", "&lt;").replace("*", "\\*").replace("`", "'")
