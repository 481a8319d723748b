"""What a tiny real run does, as a fingerprint: to show that a setting changes it."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from nsa.config import load_config
from nsa.records import TRAINING, VAL, read_metrics
from nsa.train import run

TINY = """\
model: {dim: 16, n_layers: 1, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}
nsa: {l: 8, d: 4, l_sel: 8, n_sel: 3, w: 8}
train:
  {steps: 4, seq_len: 64, batch_size: 2, lr: 0.01, log_every: 1, eval_every: 2, eval_batches: 1}
data: {dataset: shakespeare}
runtime: {device: cpu, precision: fp32}
"""
"""Goes into a file, so that variables and overrides win over it as they would in a real run."""


class Fingerprint(NamedTuple):
    """What a run did; nothing in it merely repeats the config."""

    losses: str = ""
    """Steps and losses of training.csv."""
    rates: str = ""
    """Learning rates of training.csv."""
    evaluations: str = ""
    """val.csv."""
    weights: str = ""
    """A hash of the final weights, their names and their shapes."""
    files: str = ""
    """Names of what was written, and where."""
    kept: int = 0
    """Bytes that autograd kept for the backward passes."""
    plan: str = ""
    """The device, and the attention plan."""
    stats: str = ""
    """Names of the attention statistics in metrics.json."""
    refused: str = ""
    """Why the run did not start."""

    def differences(self, other: Fingerprint) -> set[str]:
        """Name the fields that differ."""
        return {f for f in self._fields if getattr(self, f) != getattr(other, f)}


def fingerprint(folder: Path, *overrides: str) -> Fingerprint:
    """Train the tiny model with overrides, in the environment as it is, and look at what it did."""
    path = tiny_config(folder)
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    try:
        config = load_config(path, [f"train.out_dir={folder / 'run'}", *overrides])
        with (
            keep_mkldnn(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            result = run(config, config_path=str(path), out=io.StringIO())
    except ValueError as error:
        return Fingerprint(refused=str(error))
    metrics = read_metrics(result.folder)
    return Fingerprint(
        losses=_columns(result.folder / TRAINING, 0, 1),
        rates=_columns(result.folder / TRAINING, 2),
        evaluations=_columns(result.folder / VAL, 0, 1),
        weights=_hash(result.model),
        files=_names(folder),
        kept=kept,
        plan=f"{metrics.device}: {metrics.attention}",
        stats=" ".join(metrics.attention_stats),
    )


def tiny_config(folder: Path) -> Path:
    """Write the tiny config into a new folder."""
    folder.mkdir(parents=True)
    path = folder / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@contextmanager
def keep_mkldnn() -> Iterator[None]:
    """Undo what torch does on a CPU without bf16: it warns once, and turns mkldnn off for good."""
    enabled = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns about TF32
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _names(folder: Path) -> str:
    """Without what TensorBoard puts into a name: time, host and process."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    return " ".join(sorted(re.sub(r"tfevents.*", "tfevents", name) for name in names))


def _columns(path: Path, *columns: int) -> str:
    if not path.is_file():
        return "no file"
    rows = (line.split(",") for line in path.read_text(encoding="utf-8").splitlines()[1:])
    return "\n".join(",".join(row[i] for i in columns) for row in rows)


def _hash(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
