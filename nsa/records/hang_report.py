"""hang_report_{unixtime}.txt: what every rank was doing when the run hung.

Schema, version 1: the first line is a sentence that says which rank is where and who waits for
whom; the rest is a JSON object with `schema`, `ts`, `iso`, `by` (the rank that wrote it), `why`
(what took too long) and `ranks`, a list of RankState fields.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.files import read_text, write_text
from nsa.records.heartbeat import iso, strict
from nsa.records.spans import UPDATE

SCHEMA = 1
PATTERN = "hang_report_*.txt"

RUNS, STOPPED, GONE, SILENT = "runs", "stopped", "gone", "silent"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What is known about one rank."""

    rank: int
    pid: int
    host: str
    state: str
    """runs (it answered), stopped (by a signal), gone (no process), silent (no answer)."""
    step: int
    span: str
    waits: bool
    """Whether that span waits for other ranks."""
    still_s: float
    """Seconds in that span, at least."""
    stacks: list[str] = field(default_factory=list)
    """Stacks of its threads, line by line; empty if it could not write them."""
    recorder: dict[str, Any] | None = None
    """Last collectives in torch's flight recorder; null if there is none."""

    @property
    def exchanges(self) -> int | None:
        """Collectives that it has begun, over all groups; None if torch did not count them."""
        begun = (self.recorder or {}).get("begun")
        return begun if isinstance(begun, int) else None

    @property
    def place(self) -> str:
        """Span and update, worded for a sentence."""
        if self.step == 0:
            return f"{self.span}, before update 1"
        return (
            f"update {self.step}" if self.span == UPDATE else f"{self.span} of update {self.step}"
        )


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """A report, parsed."""

    sentence: str
    ts: float
    iso: str
    by: int
    why: str
    ranks: list[RankState]
    schema: int = SCHEMA


class BadReport(ValueError):
    """The file is not a valid hang report."""


def write_report(folder: Path, ranks: Sequence[RankState], *, by: int, why: str) -> Path:
    """Write a report; never replaces an existing one."""
    now = time.time()
    content = {
        "schema": SCHEMA,
        "ts": round(now, 3),
        "iso": iso(now),
        "by": by,
        "why": why,
        "ranks": [dataclasses.asdict(state) for state in ranks],
    }
    stem = f"hang_report_{int(now)}"
    # Several reports may fall into the same second.
    names = (f"{stem}.txt", *(f"{stem}_{number}.txt" for number in range(2, 1000)))
    path = next(folder / name for name in names if not (folder / name).exists())
    write_text(path, f"{sentence(ranks)}\n{json.dumps(strict(content), indent=1)}\n")
    return path


def read_report(path: Path) -> HangReport:
    """Read a report."""
    first, _, rest = read_text(path).partition("\n")
    try:
        content = json.loads(rest)
        ranks = [RankState(**state) for state in content.pop("ranks")]
        report = HangReport(sentence=first, ranks=ranks, **content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadReport(f"{path}: not a hang report ({error}); read it as text instead") from None
    if report.schema != SCHEMA:
        raise BadReport(f"{path}: schema {report.schema}; this program reads {SCHEMA}")
    return report


def sentence(ranks: Sequence[RankState]) -> str:
    """Say in one sentence which rank is where and who waits for whom."""
    held = culprits(ranks)
    others = [state for state in ranks if state not in held]
    if len(ranks) == 1:
        return f"{_where(ranks[0])}; no other rank is waited for."
    if not held:
        places = "; ".join(_grouped(ranks))
        counts = {state.exchanges for state in ranks}
        same = (
            f", each in exchange {counts.pop()}" if len(counts) == 1 and None not in counts else ""
        )
        return f"All ranks wait for each other{same} (the network, or a device?): {places}."
    blamed = "; ".join(_where(state) for state in held)
    if not others:
        return f"{blamed}."
    whom = "it" if len(held) == 1 else "them"
    return f"{blamed}; {'; '.join(_grouped(others, f'for {whom} '))}."


def culprits(ranks: Sequence[RankState]) -> list[RankState]:
    """The ranks that the others wait for; none if all wait at the same place.

    First those that do not answer; else those that do not wait; else those that are behind, by
    update and by number of collectives.
    """
    found = [state for state in ranks if state.state != RUNS]
    found = found or [state for state in ranks if not state.waits]
    if found:
        return found
    # All wait. In a mismatched collective, the rank with the lowest count is the late one.
    positions = {state.rank: (state.step, state.exchanges or 0) for state in ranks}
    least = min(positions.values())
    behind = [state for state in ranks if positions[state.rank] == least]
    return behind if len(behind) < len(ranks) else []


def _where(state: RankState) -> str:
    name, where = f"Rank {state.rank} (pid {state.pid} on {state.host})", state.place
    if state.state == GONE:
        return f"{name} is gone: its process ended in {where}"
    if state.state == STOPPED:
        return f"{name} is stopped by a signal, in {where}, for {state.still_s:.0f} s or more"
    if state.state == SILENT:
        return (
            f"{name} gives no sign of life: silent for {state.still_s:.0f} s or more, since {where}"
        )
    return f"{name} has been in {where} for {state.still_s:.0f} s"


def _grouped(states: Sequence[RankState], for_whom: str = "") -> list[str]:
    """One clause per place, naming all ranks there."""
    by_place: dict[str, list[int]] = {}
    # The clause is built in the plural; `_ranks` turns it into the singular for one rank.
    for state in states:
        verb = "wait" if state.waits else "are"
        by_place.setdefault(f"{verb} {for_whom if state.waits else ''}in {state.place}", []).append(
            state.rank
        )
    return [_ranks(numbers, text) for text, numbers in by_place.items()]


def _ranks(numbers: Sequence[int], text: str) -> str:
    if len(numbers) > 1:
        return f"ranks {', '.join(map(str, numbers))} {text}"
    verb, _, rest = text.partition(" ")
    return f"rank {numbers[0]} {'waits' if verb == 'wait' else 'is'} {rest}"
