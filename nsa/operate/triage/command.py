"""`nsa triage`: run the trainer briefly with one setting changed at a time, to locate a fault."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa.config import load_config
from nsa.config.describe import markdown_table, text_table
from nsa.config.env import read
from nsa.config.load import DEFAULT
from nsa.files import read_text, write_text
from nsa.operate.process import find_gpus
from nsa.operate.run_files import require_types
from nsa.operate.triage.trials import (
    BASELINE,
    Outcome,
    Toggle,
    Trial,
    config_of,
    matrix,
    run_trial,
)

DONE, NOT_CLEARED = 0, 1
"""Exit codes: no fault, or cleared by a toggle; not cleared, or intermittent."""


# --- the command ---


def command(args: argparse.Namespace) -> int:
    """Find the toggle that clears the fault, print the table, return the exit code."""
    trial = Trial(
        config_path=args.config or read("CONFIG") or DEFAULT,
        overrides=tuple(args.overrides),
        folder=Path(args.out_dir),
        steps=args.steps,
        timeout_s=args.timeout,
        ranks=args.np,
    )
    _check(trial)
    toggles = chosen(trial, args.only)
    if args.list:
        for toggle in toggles:
            print(f"{toggle.name}: {toggle.setting}: {toggle.meaning}")
        return DONE
    trial.folder.mkdir(parents=True, exist_ok=True)
    triage = find(trial, toggles, try_all=args.all)
    print(f"\n{as_text(triage)}\n\n{triage.verdict}: {conclusion(triage)}")
    for file in write_triage(trial.folder, triage):
        print(f"wrote {file}")
    return DONE if triage.verdict in ("healthy", "cleared") else NOT_CLEARED


def chosen(trial: Trial, only: str | None) -> list[Toggle]:
    """All toggles that apply to this run, or the named subset."""
    config = config_of(trial, BASELINE)
    on_cuda = config.runtime.device != "cpu" and bool(find_gpus().gpus)
    toggles = matrix(config, trial.ranks, on_cuda=on_cuda)
    if only is None:
        return toggles
    names = only.split(",")
    known = {toggle.name: toggle for toggle in toggles}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name} is not a toggle of this run; use {', '.join(known)}")
    return [known[name] for name in known if name in names]


def find(trial: Trial, toggles: Sequence[Toggle], *, try_all: bool = False) -> Triage:
    """Run the baseline; if it fails, try each toggle; then repeat the baseline to confirm."""
    outcomes = [_run(trial, BASELINE, 0)]
    cleared: list[str] = []
    verdict = "healthy"
    if not outcomes[0].is_ok:
        for number, toggle in enumerate(toggles, 1):
            outcomes.append(_run(trial, toggle, number))
            if outcomes[-1].is_ok:
                cleared.append(toggle.name)
                if not try_all:
                    break
        verdict = "not_cleared"
    if cleared:
        # If the baseline works now, the fault is intermittent and the toggle proves nothing.
        outcomes.append(_run(trial, BASELINE, len(toggles) + 1))
        verdict = "intermittent" if outcomes[-1].is_ok else "cleared"
    return Triage(
        config_file=trial.config_path,
        overrides=list(trial.overrides),
        steps=trial.steps,
        timeout_s=trial.timeout_s,
        ranks=trial.ranks,
        verdict=verdict,
        cleared_by=cleared,
        outcomes=outcomes,
    )


def _run(trial: Trial, toggle: Toggle, number: int) -> Outcome:
    print(f"[triage] {toggle.name}: {toggle.setting}", flush=True)
    outcome = run_trial(trial, toggle, f"{number:02d}_{toggle.name}")
    ended = outcome.fault or f"all {outcome.steps_done} steps done"
    print(f"[triage]   {ended} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


def _check(trial: Trial) -> None:
    for problem in _problems(trial):
        raise ValueError(problem)
    load_config(trial.config_path, list(trial.overrides))


def _problems(trial: Trial) -> Iterator[str]:
    if trial.steps < 1 or trial.ranks < 1:
        yield f"--steps {trial.steps} and --np {trial.ranks} must both be at least 1"
    if not 0 < trial.timeout_s < float("inf"):
        yield f"--timeout {trial.timeout_s} must be a number of seconds above 0"


# --- triage.json and triage.md: writer and reader ---
# Schema of triage.json, version 1: the fields of Triage; `outcomes` is a list of Outcome objects in
# run order.

VERSION = 1
JSON, TABLE = "triage.json", "triage.md"
VERDICTS = {
    "healthy": "the run as it is has no fault: there is nothing to clear",
    "cleared": "a toggle cleared the fault, and without it the fault came back",
    "intermittent": "the fault did not come back without the toggle: it is intermittent",
    "not_cleared": "no toggle cleared the fault",
}


@dataclass(frozen=True, kw_only=True)
class Triage:
    """The result of a triage."""

    version: int = VERSION
    config_file: str
    overrides: list[str]
    steps: int
    timeout_s: float
    ranks: int
    verdict: str
    """One of VERDICTS."""
    cleared_by: list[str]
    """Toggle names; more than one only with --all."""
    outcomes: list[Outcome] = field(default_factory=list)


def write_triage(folder: Path, triage: Triage) -> list[Path]:
    """Write both files atomically."""
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
    """The result as a Markdown page."""
    head = f"# Triage of {triage.config_file}: {triage.verdict.replace('_', ' ')}\n\n"
    how = f"{triage.steps} steps each, at most {triage.timeout_s:g} s, {triage.ranks} rank(s)"
    extra = f", with {' '.join(triage.overrides)}" if triage.overrides else ""
    return f"{head}{conclusion(triage)}\n\n{how}{extra}.\n\n{markdown_table(rows(triage))}\n"


def conclusion(triage: Triage) -> str:
    """The result in one or two sentences."""
    text = VERDICTS[triage.verdict]
    found = [outcome for outcome in triage.outcomes if outcome.name in triage.cleared_by]
    for outcome in found:
        text += f"; `{outcome.setting}` points to {outcome.meaning}"
    if triage.verdict == "not_cleared":
        text += f" ({triage.outcomes[0].fault}); the logs are in the folder of this file"
    return text + "."


def rows(triage: Triage) -> list[tuple[str, ...]]:
    """Table header, then one row per run."""
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
    """The table as terminal text."""
    return text_table(rows(triage))
