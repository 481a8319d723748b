"""metrics.json: what a run is and how far it came, replaced at every logged step.

Schema, version 1: the fields of Metrics, as one JSON object. A number that is not known yet is
null; so is one that is not finite, because JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nsa.config import Config, to_container
from nsa.config.load import parse_config
from nsa.files import read_text, write_text

VERSION = 1
NAME = "metrics.json"


@dataclass(kw_only=True)
class Metrics:
    """The state of a run in numbers."""

    version: int = VERSION
    status: str = "running"
    """running, finished, halted (asked to stop; can be resumed), non_finite (the loss was NaN or
    infinite), oom (no memory left), no_data (the source failed; can be resumed), bad_data (a shard
    is damaged) or interrupted (a second Ctrl-C)."""
    config_file: str
    """The file that the run was started with; config.yaml holds what it resolved to."""
    data_fallback: str | None = None
    """Why the run is on random tokens instead of the source it was started with; null if not."""
    num_params: int
    tokens_per_step: int
    """Tokens in an optimizer update: batch_global x seq_len."""
    flops_per_token: float = 0.0
    """Model FLOPs of training one token, forward and backward: nsa/model/cost.py."""
    peak_flops: float | None = None
    """FLOP/s of the devices at most; null where it is not known: then there is no MFU."""
    device: str
    dtype: str
    """Compute precision; weights and optimizer are fp32 in both."""
    attention: str
    """The attention plan: which backend runs, and why."""
    steps: int
    """Optimizer updates that the run is meant to do."""
    step: int = 0
    """Optimizer updates done."""
    resumed_at: int | None = None
    """The update after which the run went on from a checkpoint; null for a run in one piece."""
    init_from: str | None = None
    """The file whose weights the run started from (train.init_from); null for random ones."""
    init_sha256: str | None = None
    """Of those weights."""
    seq_len: int
    world_size: int = 1
    """Processes that train together."""
    batch_global: int
    """Rows in an optimizer update, over all of them."""
    lr: float
    """Peak learning rate."""
    loss_first: float | None = None
    loss_last: float | None = None
    spikes: int = 0
    """Updates whose loss was a spike (train.spike_rule)."""
    val_loss: float | None = None
    """Nats per token on held-out rows, at the last evaluation."""
    val_ppl: float | None = None
    val_bits_per_byte: float | None = None
    train_s: float = 0.0
    """Seconds spent in training steps."""
    eval_and_save_s: float = 0.0
    """Seconds spent in evaluations and checkpoints between the steps."""
    toks_per_s: float | None = None
    """Tokens of the whole run over train_s."""
    mfu: float | None = None
    """Share of peak_flops, 0 to 1, over the whole run."""
    peak_mem_mib: float | None = None
    """The most that tensors took on the GPU; on a CPU, the most RAM of the process."""
    attention_stats: dict[str, float | list[float]] = field(default_factory=dict)
    """Gates and selection over all layers at the last logged step; empty when switched off."""


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    """Replace metrics.json in the folder."""
    content = _finite(dataclasses.asdict(metrics))
    write_text(folder / NAME, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return folder / NAME


def read_metrics(folder: Path) -> Metrics:
    """Read metrics.json of a run folder."""
    content = json.loads(read_text(folder / NAME))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / NAME} has version {content.get('version')!r}; this program reads "
            f"version {VERSION}; use the program that wrote it"
        )
    return Metrics(**content)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# config.yaml: every setting of a run as it was resolved; the file can be trained again.

CONFIG_NAME = "config.yaml"


def write_config(folder: Path, config: Config, source: str) -> Path:
    """Write the resolved settings, with the file that they came from in the first line."""
    head = f"# Resolved settings of a run that was started with {source}\n"
    write_text(folder / CONFIG_NAME, head + yaml.safe_dump(to_container(config), sort_keys=False))
    return folder / CONFIG_NAME


def read_config(folder: Path) -> Config:
    """Read the settings back; the environment took part when they were resolved, not again."""
    return parse_config(read_text(folder / CONFIG_NAME), str(folder / CONFIG_NAME))
