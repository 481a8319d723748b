"""What a run prints before its first step, so that nobody trains the wrong thing unnoticed."""

from __future__ import annotations

from nsa.config import Config, to_container
from nsa.data import Data, Rows
from nsa.telemetry import Folder, Metrics
from nsa.train.progress import Progress
from nsa.train.runtime import Runtime


def announce(
    cfg: Config, metrics: Metrics, data: Data, runtime: Runtime, folder: Folder, to: Progress
) -> None:
    """Print the resolved config, its size, and where and how it will run."""
    train, checkpointing = cfg.train, "on" if cfg.runtime.gradient_checkpointing else "off"
    to.say(f"[boot] loading config {metrics.config_file}")
    for group, values in to_container(cfg).items():
        to.say(f"  {group}: " + " ".join(f"{key}={value}" for key, value in values.items()))
    to.say(
        f"[boot] effective config: S={train.seq_len} B={train.batch_size} "
        f"accum={train.accumulate_grad_batches} gc={checkpointing}"
    )
    to.say(f"[boot] parameters: {metrics.num_params:,}")
    to.say(f"[boot] tokens per step: {metrics.tokens_per_step:,} | steps: {metrics.steps:,}")
    to.say(f"[boot] device: {runtime.describe_device()}")
    to.say(f"[boot] {runtime.describe_flash()} | precision {runtime.precision.upper()}")
    to.say(f"[boot] {runtime.plan}")
    to.say(
        f"[boot] data: {cfg.data.dataset}, rows of {train.seq_len} tokens: "
        f"{_count(data.train)} to train on, {_count(data.val)} held out"
    )
    to.say(f"[train] gradient_checkpointing={checkpointing}")
    if folder.previous is not None:
        to.say(f"[boot] {folder.path} held an earlier run; its files are now in {folder.previous}")


def _count(rows: Rows) -> str:
    return "endless" if rows.num_rows is None else f"{rows.num_rows:,}"
