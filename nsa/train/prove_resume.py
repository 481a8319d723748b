"""`nsa prove-resume`: train once uninterrupted and once with a stop and a resume in a new process,
and require bitwise equal losses and weights.

resume_proof.json, version 1: what was run (`config`, `device`, `steps`, `stopped_at`, `torch`), the
losses of both runs by step, the sha256 of both models' weights, and `holds`.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from nsa.config import Config
from nsa.files import read_text, write_text
from nsa.records import MODEL, TRAINING, TrainingRow, read_metrics, read_rows
from nsa.train.checkpoint.file import load_tensors
from nsa.train.checkpoint.model_file import weights_sha256
from nsa.train.runner import run

NAME = "resume_proof.json"
VERSION = 1


def prove_resume(cfg: Config, config_path: str, folder: Path, steps: int, stop_at: int) -> bool:
    """Do the runs, write the proof, and return whether the two runs were equal."""
    if not 0 < stop_at < steps:
        raise ValueError(f"--stop-at {stop_at} must lie between 0 and --steps {steps}")
    runs = {name: _prepared(cfg, folder / name, stop_at) for name in ("whole", "parts")}
    for config in runs.values():
        if Path(config.train.out_dir).exists():
            raise ValueError(f"{config.train.out_dir} exists; name another --out-dir, or remove it")
    # `whole`: one process. `parts`: one process up to stop_at, then a second one that resumes.
    for name, until in (("whole", steps), ("parts", stop_at), ("parts", steps)):
        _in_a_process(runs[name], config_path, until)
    proof = compare_runs(folder / "whole", folder / "parts", steps)
    proof = {"config": config_path, "steps": steps, "stopped_at": stop_at, **proof}
    write_text(folder / NAME, json.dumps({"version": VERSION, **proof}, indent=2) + "\n")
    return bool(proof["holds"])


def read_proof(folder: Path) -> dict[str, Any]:
    """Read resume_proof.json."""
    proof: dict[str, Any] = json.loads(read_text(folder / NAME))
    if proof.get("version") != VERSION:
        raise ValueError(f"{folder / NAME} has version {proof.get('version')!r}, not {VERSION}")
    return proof


def _prepared(cfg: Config, folder: Path, stop_at: int) -> Config:
    """The same config with a checkpoint at `stop_at`, a log line per step, and fixed-order sums."""
    train = dataclasses.replace(
        cfg.train, out_dir=str(folder), save_every=stop_at, log_every=1, keep_last=0, backup_dir=""
    )
    train = dataclasses.replace(train, tracker="none")  # a proof must not show up as a run
    runtime = dataclasses.replace(cfg.runtime, deterministic=True)
    return dataclasses.replace(cfg, train=train, runtime=runtime)


def _in_a_process(cfg: Config, config_path: str, until: int) -> None:
    """Train in a new process, so that no state of the first part survives in memory."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's state
    process = context.Process(target=_train, args=(cfg, config_path, until))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(
            f"the run in {cfg.train.out_dir} ended with exit code {process.exitcode}; "
            "see its message above"
        )


def _train(cfg: Config, config_path: str, until: int) -> None:
    run(cfg, config_path=config_path, stop_after=until, allow_long_run=True, out=sys.stderr)


def compare_runs(whole: Path, parts: Path, steps: int) -> dict[str, Any]:
    """Losses by step and weight hashes of both runs.

    `holds` requires that all are equal, that no step is missing, and that `parts` was resumed.
    """
    losses = {
        folder.name: {row.step: row.loss for row in read_rows(TrainingRow, folder / TRAINING)}
        for folder in (whole, parts)
    }
    hashes = {folder.name: _weights_sha256(folder / MODEL) for folder in (whole, parts)}
    complete = all(sorted(by_step) == list(range(1, steps + 1)) for by_step in losses.values())
    same = losses["whole"] == losses["parts"] and hashes["whole"] == hashes["parts"]
    metrics = read_metrics(parts)
    return {
        # Without a resume, `parts` would trivially be equal.
        "holds": same and complete and metrics.resumed_at is not None,
        "resumed_at": metrics.resumed_at,
        "device": metrics.device,
        "dtype": metrics.dtype,
        "attention": metrics.attention,
        "torch": torch.__version__,
        "losses": losses,
        "weights_sha256": hashes,
    }


def _weights_sha256(path: Path) -> str:
    return weights_sha256(load_tensors(path)["state_dict"])
