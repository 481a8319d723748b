"""metrics.json (state of a run, replaced at every logged step) and config.yaml (its settings).

Schema of metrics.json, version 1: the fields of Metrics as one JSON object. Unknown numbers are
null; so are non-finite ones, because JSON has no NaN.
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
METRICS_FILE = "metrics.json"


@dataclass(kw_only=True)
class Metrics:
    """The state of a run in numbers."""

    version: int = VERSION
    status: str = "running"
    """running, finished, halted (asked to stop; can be resumed), non_finite (the loss was NaN or
    infinite), oom (out of memory), no_data (the source failed; can be resumed), bad_data (a shard
    is damaged) or interrupted (a second Ctrl-C)."""
    config_file: str
    """The file that the run was started with; config.yaml holds the resolved settings."""
    data_fallback: str | None = None
    """Why the run fell back to random tokens; null if it did not."""
    num_params: int
    tokens_per_step: int
    """Tokens in an optimizer update: batch_global x seq_len."""
    flops_per_token: float = 0.0
    """Model FLOPs of training one token, forward and backward: nsa/model/cost.py."""
    peak_flops: float | None = None
    """Peak FLOP/s of all devices; null if unknown: then there is no MFU."""
    device: str
    dtype: str
    """Compute precision; weights and optimizer are fp32 in both."""
    attention: str
    """The attention plan: which backend runs, and why."""
    steps: int
    """Optimizer updates planned."""
    step: int = 0
    """Optimizer updates done."""
    resumed_at: int | None = None
    """The update after which the run last resumed; null if it never did."""
    init_from: str | None = None
    """File of the initial weights (train.init_from); null for random ones."""
    init_sha256: str | None = None
    """sha256 of those weights."""
    seq_len: int
    world_size: int = 1
    """Number of ranks."""
    batch_global: int
    """Rows in an optimizer update, over all ranks."""
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
    """Seconds in training steps."""
    eval_and_save_s: float = 0.0
    """Seconds in evaluations and checkpoints between the steps."""
    toks_per_s: float | None = None
    """Tokens of the whole run over train_s."""
    mfu: float | None = None
    """Share of peak_flops, 0 to 1, over the whole run."""
    peak_mem_mib: float | None = None
    """Peak tensor memory on the GPU; on a CPU, peak RSS of the process."""
    attention_stats: dict[str, float | list[float] | None] = field(default_factory=dict)
    """Gates and selection over all layers at the last logged step; empty if not collected."""


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    """Replace metrics.json in the folder."""
    # JSON has no NaN: json.dumps would raise.
    content = _finite(dataclasses.asdict(metrics))
    write_text(folder / METRICS_FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return folder / METRICS_FILE


def read_metrics(folder: Path) -> Metrics:
    """Read metrics.json of a run folder."""
    content = json.loads(read_text(folder / METRICS_FILE))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / METRICS_FILE} has version {content.get('version')!r}; this program reads "
            f"version {VERSION}; use the program that wrote it"
        )
    return Metrics(**content)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- config.yaml: the resolved settings; the file can be used as --config again ---

CONFIG_FILE = "config.yaml"


def write_config(folder: Path, config: Config, source: str) -> Path:
    """Write the resolved settings; the first line names the file they came from."""
    head = f"# Resolved settings of a run that was started with {source}\n"
    write_text(folder / CONFIG_FILE, head + yaml.safe_dump(to_container(config), sort_keys=False))
    return folder / CONFIG_FILE


def read_config(folder: Path) -> Config:
    """Read the settings back. Environment overrides are already in them and are not applied."""
    return parse_config(read_text(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
