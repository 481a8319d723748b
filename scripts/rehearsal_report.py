"""rehearsal.json and rehearsal.md: how every command of the surface went.

Schema of rehearsal.json, version 1: the fields of Rehearsal, as one JSON object; `rows` is a list
of objects with the fields of Row.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from nsa.config.describe import markdown_table
from nsa.files import write_text
from scripts.surface import Command

VERSION = 1
JSON, TABLE = "rehearsal.json", "rehearsal.md"
PASS, FAIL, MISSING, EXEMPT = "PASS", "FAIL", "MISSING", "EXEMPT"


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one command went."""

    id: str
    command: str
    """As an operator types it."""
    ran: str
    """What was run: the same with smaller sizes, or in its place."""
    because: str
    """Why something else was run; empty where only sizes differ."""
    verdict: str
    """PASS, FAIL, MISSING (a part does not exist yet) or EXEMPT."""
    reason: str
    exit_code: int | None
    """None where it was not run, or was ended because it does not end by itself."""
    artifact: str
    """A file that it left, in the copy of the tree."""
    seconds: float
    log: str

    @classmethod
    def exempt(cls, command: Command) -> Row:
        """A command that is not run."""
        return cls.of(command, verdict=EXEMPT, reason=command.exempt)

    @classmethod
    def of(
        cls,
        command: Command,
        *,
        verdict: str,
        reason: str,
        exit_code: int | None = None,
        artifact: str = "",
        seconds: float = 0.0,
        log: str = "",
    ) -> Row:
        """The result of a command."""
        return cls(
            id=command.id,
            command=command.run.strip(),
            ran="" if command.exempt else command.rehearsed,
            because=command.because,
            verdict=verdict,
            reason=reason,
            exit_code=exit_code,
            artifact=artifact,
            seconds=round(seconds, 1),
            log=log,
        )


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """All of them."""

    version: int = VERSION
    seconds: float
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and nothing is missing."""
        return all(row.verdict in (PASS, EXEMPT) for row in self.rows)

    @property
    def summary(self) -> str:
        """Counts by verdict, in a line."""
        counts = Counter(row.verdict for row in self.rows)
        words = [f"{counts[v]} {v}" for v in (PASS, FAIL, MISSING, EXEMPT)]
        return f"rehearsal: {', '.join(words)} in {self.seconds:.0f} s"


def write_rehearsal(folder: Path, rehearsal: Rehearsal) -> list[Path]:
    """Write both files, each complete or not at all."""
    write_text(folder / JSON, json.dumps(dataclasses.asdict(rehearsal), indent=2) + "\n")
    write_text(folder / TABLE, describe(rehearsal))
    return [folder / TABLE, folder / JSON]


def read_rehearsal(folder: Path) -> Rehearsal:
    """Read rehearsal.json of a folder."""
    content = json.loads((folder / JSON).read_text(encoding="utf-8"))
    if content.get("version") != VERSION:
        raise ValueError(f"{folder / JSON} has version {content.get('version')!r}, not {VERSION}")
    return Rehearsal(**{**content, "rows": [Row(**row) for row in content["rows"]]})


def describe(rehearsal: Rehearsal) -> str:
    """The table for a person, as Markdown."""
    head = ("id", "command", "verdict", "exit code", "artifact", "s", "what was seen")
    lines = [
        (
            row.id,
            f"`{' '.join(row.command.split())[:160]}`",
            row.verdict,
            "" if row.exit_code is None else str(row.exit_code),
            row.artifact,
            f"{row.seconds:.0f}" if row.seconds else "",
            row.reason + (f" ({row.because})" if row.because else ""),
        )
        for row in rehearsal.rows
    ]
    return f"# Rehearsal\n\n{rehearsal.summary}\n\n{markdown_table([head, *lines])}\n"
