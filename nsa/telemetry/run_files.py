"""The folder of a run: made fresh, with the files of an earlier run moved aside."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from nsa.config import ConfigError
from nsa.files import explain
from nsa.telemetry import (
    alarms,
    config_file,
    counter_files,
    csv_log,
    curve,
    env_file,
    gate_details,
    hang_report,
    metrics,
    phase_file,
    sample,
    selection_file,
    sentinels,
    size_files,
    tensorboard,
    tracker,
)
from nsa.telemetry.atomic import write_text

MODEL = "model.pt"
PROBE = ".writable"
CHECKPOINTS = "checkpoint_step*"
RUN_FILES = (
    csv_log.TRAINING,
    csv_log.VAL,
    metrics.NAME,
    config_file.NAME,
    sample.NAME,
    curve.NAME,
    MODEL,
    CHECKPOINTS,
    counter_files.K_STATS,
    counter_files.FALLBACK_COUNTERS,
    selection_file.NAME,
    env_file.NAME,
    size_files.DTYPES,
    size_files.OPT_STATE,
    tensorboard.FOLDER,
    tracker.NAME,
    tracker.LOG,
    "wandb",
    alarms.NAME,
    gate_details.NAME,
    phase_file.NAME,
    sentinels.ANOMALY,
    sentinels.DONE + "*",
    "anomaly_step*.pt",
    "heartbeat_rank*.jsonl",
    "stackdump_*.txt",
    "watchdog_stackdump_*.txt",
    "span_rank*.json",
    hang_report.PATTERN,
    "mem_boot*",
    "mem_step1*",
    "mem_pre_step*",
    "mem_post_step*",
)
"""Patterns of what a run writes; other files, a .HALT, which is an order, and the locks
are not touched."""


class Folder(NamedTuple):
    """A run folder that is ready, and where the files of the run before went, if there were any."""

    path: Path
    previous: Path | None


def open_folder(path: Path, *, resumed: bool = False) -> Folder:
    """Create the folder; move an earlier run's files to previous/<time>/, unless it goes on."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / PROBE, "")
        (path / PROBE).unlink()
    except OSError as error:
        raise not_made(path, error) from None
    old = [file for pattern in RUN_FILES for file in sorted(path.glob(pattern))]
    if resumed or not old:
        return Folder(path, None)
    previous = _new_folder(path / "previous")
    for file in old:
        file.rename(previous / file.name)
    return Folder(path, previous)


def not_made(path: Path, error: OSError) -> ConfigError:
    """What is wrong with a run folder that could not be made."""
    return ConfigError(
        f"train.out_dir={path}: the folder cannot be made or written ({explain(error, path)}); "
        "name one that can"
    )


def _new_folder(parent: Path) -> Path:
    """Name it after the time; a second run within the same second gets a number."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return folder
