"""triage.json and triage.md: which switch cleared a fault, and how every run ended.

Schema of triage.json, version 1: the fields of Triage, as one JSON object; `outcomes` is a list of
objects with the fields of Outcome, in the order of the runs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from nsa.config.describe import markdown_table, text_table
from nsa.files import read_text
from nsa.operate.triage_run import Outcome
from nsa.operate.typed import require_types
from nsa.telemetry.atomic import write_text

VERSION = 1
JSON, TABLE = "triage.json", "triage.md"
VERDICTS = {
    "healthy": "the run as it is has no fault: there is nothing to clear",
    "cleared": "a toggle cleared the fault, and without it the fault came back",
    "intermittent": "the fault did not come back without the toggle: it comes and goes by itself",
    "not_cleared": "no toggle cleared the fault",
}


@dataclass(frozen=True, kw_only=True)
class Triage:
    """What a triage found."""

    version: int = VERSION
    config_file: str
    overrides: list[str]
    steps: int
    timeout_s: float
    ranks: int
    verdict: str
    """One of VERDICTS."""
    cleared_by: list[str]
    """Names of the toggles; more than one only where all were tried."""
    outcomes: list[Outcome] = field(default_factory=list)


def write_triage(folder: Path, triage: Triage) -> list[Path]:
    """Write both files, each complete or not at all."""
    content = dataclasses.asdict(triage)
    write_text(folder / JSON, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_text(folder / TABLE, describe(triage))
    return [folder / TABLE, folder / JSON]


def read_triage(folder: Path) -> Triage:
    """Read triage.json of a folder."""
    path = folder / JSON
    try:
        content = json.loads(read_text(path))
        if content.get("version") != VERSION:
            raise ValueError(
                f"{path} has version {content.get('version')!r}; this program reads version "
                f"{VERSION}; use the program that wrote it"
            )
        outcomes = [Outcome(**outcome) for outcome in content.pop("outcomes")]
        triage = Triage(**content, outcomes=outcomes)
        for record in (triage, *outcomes):
            require_types(record, str(path))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not the record of a triage ({error})") from None
    return triage


def describe(triage: Triage) -> str:
    """The result for a person, as Markdown."""
    head = f"# Triage of {triage.config_file}: {triage.verdict.replace('_', ' ')}\n\n"
    how = f"{triage.steps} steps each, at most {triage.timeout_s:g} s, {triage.ranks} rank(s)"
    extra = f", with {' '.join(triage.overrides)}" if triage.overrides else ""
    return f"{head}{conclusion(triage)}\n\n{how}{extra}.\n\n{markdown_table(rows(triage))}\n"


def conclusion(triage: Triage) -> str:
    """What was found, in a sentence or two."""
    text = VERDICTS[triage.verdict]
    found = [outcome for outcome in triage.outcomes if outcome.name in triage.cleared_by]
    for outcome in found:
        text += f"; `{outcome.setting}` points to {outcome.meaning}"
    if triage.verdict == "not_cleared":
        text += f" ({triage.outcomes[0].fault}); the logs are in the folder of this file"
    return text + "."


def rows(triage: Triage) -> list[tuple[str, ...]]:
    """A line for every run."""
    head = ("toggle", "setting", "ended", "steps", "loss", "s", "what happened")
    lines = [
        (
            outcome.name,
            outcome.setting,
            outcome.kind,
            str(outcome.steps_done),
            "" if outcome.loss_last is None else f"{outcome.loss_last:.4f}",
            f"{outcome.seconds:.0f}",
            outcome.fault or "all steps done",
        )
        for outcome in triage.outcomes
    ]
    return [head, *lines]


def as_text(triage: Triage) -> str:
    """The table for a terminal."""
    return text_table(rows(triage))
