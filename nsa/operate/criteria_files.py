"""Criteria about what a run leaves behind: checkpoints that load, the model, faultless time."""

from __future__ import annotations

import pickle
from pathlib import Path

from nsa.files import size
from nsa.operate.criterion import judged, missing
from nsa.operate.evidence import Evidence
from nsa.operate.limits import Limits
from nsa.operate.text import first_line
from nsa.operate.verdict import Row
from nsa.telemetry import MODEL
from nsa.telemetry.metrics import NAME as METRICS
from nsa.train import checkpoint

UNLOADABLE = (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What reading a file of weights can raise that is not what it should be."""


def saved(e: Evidence, limits: Limits) -> Row:
    """That checkpoints appear as often as they should."""
    every = e.config.train.save_every if e.config else None
    limit = "one" if not every else f"one every {every} steps"
    newest = e.run.checkpoints[-1] if e.run.checkpoints else None
    if newest is None:
        if not e.run.over and every != 0 and e.step < (every or e.step + 1):
            evidence = f"none yet at step {e.step}"
            todo = "judge again after the first checkpoint"
            return missing(
                "checkpoint", limit=limit, evidence=evidence, advice=todo, essential=True
            )
        return judged(
            "checkpoint",
            False,
            "none",
            limit=limit,
            evidence=f"no checkpoint_step*.pt after step {e.step}",
            advice="set train.save_every; look for [checkpoint] lines in the log",
        )
    behind = e.step - newest.step
    allowed = (every or e.step) * (1 if e.run.over else 2)  # one may be on its way to the disk
    return judged(
        "checkpoint",
        behind <= allowed,
        f"step {newest.step}, {size(newest.num_bytes)}, {len(e.run.checkpoints)} in the folder",
        limit=limit,
        evidence=f"{checkpoint.NAME.format(step=newest.step)}, {behind} steps behind",
        advice="look for [checkpoint] lines in the log, and at the room on the disk",
    )


def loads(e: Evidence, limits: Limits) -> Row:
    """That the newest checkpoint is what its manifest says, and a model can be built from it."""
    limit = "its manifest's bytes and sha256; a model loads"
    path = _newest(e)
    if path is None:
        evidence = "no checkpoint with a manifest"
        todo = "a checkpoint without one was not finished"
        return missing(
            "checkpoint loads", limit=limit, evidence=evidence, advice=todo, essential=True
        )
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        return judged(
            "checkpoint loads",
            False,
            "no",
            limit=limit,
            evidence=first_line(error),
            advice="use an older one; `nsa checkpoint verify RUN_FOLDER` looks at all",
        )
    value = f"{count / 1e6:.1f}M parameters, {size(path.stat().st_size)}"
    evidence = f"{path.name}, {checkpoint.manifest_path(path).name}"
    return judged("checkpoint loads", True, value, limit=limit, evidence=evidence)


def resumed(e: Evidence, limits: Limits) -> Row:
    """That the run has gone on from a checkpoint."""
    at = e.run.metrics.resumed_at if e.run.metrics else None
    if at is None:
        return missing(
            "resumed",
            limit="from a checkpoint",
            evidence=f'{METRICS}, "resumed_at": null: nobody stopped it',
            advice="touch .HALT, then the same command; or `nsa prove-resume`",
            essential=False,
        )
    return judged(
        "resumed",
        e.step > at,
        f"at step {at}, now at {e.step}",
        limit="from a checkpoint",
        evidence=f'{METRICS}, "resumed_at"',
        advice="no step has followed yet: judge again",
    )


def backed_up(e: Evidence, limits: Limits) -> Row:
    """That the newest checkpoint also lies elsewhere, whole."""
    folder, newest = e.config.train.backup_dir if e.config else "", _newest(e)
    limit = "a verified copy elsewhere"
    if not folder or newest is None:
        return missing(
            "backup",
            limit=limit,
            evidence="train.backup_dir is empty" if newest else "no checkpoint",
            advice="set train.backup_dir, or `nsa checkpoint backup RUN_FOLDER --to DIR`",
            essential=False,
        )
    copy = Path(folder) / newest.name
    try:
        checkpoint.verify(copy)
    except (OSError, ValueError) as error:
        advice = "look for [checkpoint] lines in the log; `nsa checkpoint backup` copies it"
        evidence = str(error)
        return judged("backup", False, "no", limit=limit, evidence=evidence, advice=advice)
    return judged("backup", True, f"{copy}", limit=limit, evidence=f"{copy}, its manifest")


def model_saved(e: Evidence, limits: Limits) -> Row:
    """That the final model is there and loads."""
    path, limit = e.run.folder / MODEL, "there, and loads"
    if not path.exists() and not e.run.over:
        todo = "judge again when the run has ended"
        evidence = f"no {MODEL} yet"
        return missing("model", limit=limit, evidence=evidence, advice=todo, essential=True)
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        advice = "`nsa checkpoint export` makes one of a checkpoint; --save may have put it away"
        return judged("model", False, "no", limit=limit, evidence=first_line(error), advice=advice)
    value = f"{count / 1e6:.1f}M parameters, {size(path.stat().st_size)}"
    return judged("model", True, value, limit=limit, evidence=MODEL)


def long_enough(e: Evidence, limits: Limits) -> Row:
    """That it ran long enough to trust it, or to the end."""
    metrics, limit = e.run.metrics, f">= {limits.pilot_h:g} h, or all steps"
    hours = metrics.train_s / 3600 if metrics else 0.0
    is_done = metrics is not None and metrics.step >= metrics.steps
    if metrics is None or (hours < limits.pilot_h and not is_done and not e.run.over):
        evidence = f"{hours:.2f} h so far"
        todo = "judge again later"
        return missing("time", limit=limit, evidence=evidence, advice=todo, essential=False)
    return judged(
        "time",
        is_done or hours >= limits.pilot_h,
        f"{hours:.2f} h, {metrics.step} of {metrics.steps} steps",
        limit=limit,
        evidence=f'{METRICS}, "train_s"',
        advice="the same command goes on from the last checkpoint",
    )


def _newest(e: Evidence) -> Path | None:
    """The newest checkpoint that is finished: one on its way to the disk has no manifest yet."""
    for found in reversed(e.run.checkpoints):
        path = e.run.folder / checkpoint.NAME.format(step=found.step)
        if checkpoint.manifest_path(path).exists():
            return path
    return None


def _count_parameters(path: Path) -> int:
    """Build the model of a file; raises one of UNLOADABLE where that cannot be done."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    from nsa.train.model_file import load_model  # torch takes seconds: only where there is a file

    model, _ = load_model(path)
    return sum(p.numel() for p in model.parameters())
