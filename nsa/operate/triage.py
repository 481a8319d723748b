"""`nsa triage`: short real runs, with one thing switched at a time, to find where a fault sits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa.config import load_config
from nsa.config.env import read
from nsa.operate.machine import look
from nsa.operate.triage_report import Triage, as_text, conclusion, write_triage
from nsa.operate.triage_run import TRAINER, Outcome, Trial, config_of, run_trial
from nsa.operate.triage_toggles import BASELINE, Toggle, matrix

DONE, NOT_CLEARED = 0, 1
"""Exit codes: nothing to clear, or cleared; a fault is left, or comes and goes."""


def command(args: argparse.Namespace) -> int:
    """Find the toggle that clears the fault of a run, print the table, return the exit code."""
    trial = Trial(
        config_path=args.config or read("CONFIG"),
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
    """The toggles of this run, or those of them that were named."""
    config = config_of(trial, BASELINE)
    on_cuda = config.runtime.device != "cpu" and bool(look().gpus)
    toggles = matrix(config, trial.ranks, on_cuda=on_cuda)
    if only is None:
        return toggles
    names = only.split(",")
    known = {toggle.name: toggle for toggle in toggles}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name} is no toggle of this run; use {', '.join(known)}")
    return [known[name] for name in known if name in names]


def find(trial: Trial, toggles: Sequence[Toggle], *, try_all: bool = False) -> Triage:
    """Run as it is; while that fails, toggle by toggle; then as it is again, to be sure."""
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
    if not TRAINER.is_file():
        yield f"{TRAINER} is not there; nsa triage runs from a checkout of the repository"
