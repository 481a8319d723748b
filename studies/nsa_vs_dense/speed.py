"""The speed of an arm that was trained beside others: some of its updates once more, alone."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.config import Config
from nsa.train import run
from nsa.train.runtime import resolve_runtime
from studies.nsa_vs_dense.gather import steps_per_s
from studies.nsa_vs_dense.results import read_arm, write_arm

LEAST_STEPS = 10
"""Of fewer, the updates that compile would count in the median."""


def untimed(results: Sequence[dict[str, Any]]) -> list[str]:
    """Names of arms without a speed; of the seeds of a variant only the first is looked at."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        first.setdefault((result["comparison"], result["variant"]), result)
    return [result["name"] for result in first.values() if result["tokens_per_s"] is None]


def record_speed(path: Path, cfg: Config, config_path: str, steps: int) -> None:
    """Do the first so many updates of an arm, and put their speed into its result at `path`.

    The run folder of `cfg` is a scratch folder: it is gone afterwards.
    """
    result, folder = read_arm(path), Path(cfg.train.out_dir)
    _check_device(result, cfg)
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        done = run(
            _bare(cfg),
            config_path=config_path,
            stop_after=steps,  # leaves the warm-up and the schedule as they were in the arm
            allow_long_run=True,
            resume="none",
        )
        rate = steps_per_s(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if rate is None:
        raise ValueError(
            f"{result['name']}: no two updates in a row have a time; leave NSA_HEARTBEAT_EVERY at 1"
        )
    speed = round(rate * result["tokens_per_step"], 1)
    write_arm(path, result | {"tokens_per_s": speed, "speed_steps": done.metrics.step})


def _bare(cfg: Config) -> Config:
    """The same updates and log lines, and nothing else; nobody follows this run elsewhere."""
    rule = "log" if cfg.train.spike_rule == "rollback" else cfg.train.spike_rule
    train = dataclasses.replace(
        cfg.train, eval_every=0, save_every=0, backup_dir="", tracker="none", spike_rule=rule
    )
    return dataclasses.replace(cfg, train=train)


def _check_device(result: dict[str, Any], cfg: Config) -> None:
    """A result names one device, so its speed must be from there, too."""
    heads = (cfg.model.d_k, cfg.model.d_v)
    here = resolve_runtime(cfg.runtime, heads, cfg.model.attention_kind).device_name
    trained_on = result["machine"]["device"]
    if here != trained_on:
        raise ValueError(
            f"{result['name']} was trained on {trained_on}, and this is {here}; time it on the "
            "same kind of device, or leave --speed out"
        )
