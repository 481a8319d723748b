"""Records of a run, made with the writers of a real one under a clock that a test sets."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.records import (
    TRAINING,
    CsvLog,
    GpuReading,
    Heartbeat,
    Metrics,
    TrainingRow,
    fallback_counts,
    heartbeat,
    write_env,
    write_metrics,
)

START = 1_800_000_000.0
GATES = {
    "entropy_mean": 0.9,
    "entropy_min": 0.4,
    "max_gate_mean": 0.5,
    "max_gate_max": 0.8,
    "collapse_fraction": 0.0,
    "branch_shares": [0.3, 0.3, 0.4],
    "sel_k_mean": 3.0,
    "sel_k_max": 3.0,
    "sel_rows": 64.0,
    "sel_pct_at_max": 0.9,
}
LAYER = {name: value for name, value in GATES.items() if isinstance(value, float)}
LAYER |= {"share_cmp": 0.3, "share_sel": 0.3, "share_win": 0.4}


class Recorder:
    """Writes what a run writes, step by step, at times of its own clock."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        ranks: int = 1,
        log_every: int = 20,
        step_s: float = 2.0,
        steps: int = 50_000,
        device: str = "cuda:0",
        csv: bool = True,
    ) -> None:
        self.folder, self.now, self.step = folder, START, 0
        self.log_every, self.step_s = log_every, step_s
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: self.now))
        self.beats = [Heartbeat(folder, rank) for rank in range(ranks)]
        self.rows = CsvLog(TrainingRow, folder / TRAINING if csv else None)
        self.random = random.Random(7)
        self.metrics = Metrics(
            config_file="test",
            num_params=1,
            tokens_per_step=4096,
            device=device,
            dtype="bf16",
            attention="test",
            steps=steps,
            seq_len=2048,
            batch_global=2,
            lr=2e-4,
        )
        write_env(folder)
        self.boot()

    def boot(self) -> None:
        """A process begins."""
        for beat in self.beats:
            beat.boot(self.step)
        self.status("running")

    def status(self, word: str) -> None:
        """Say how it stands in metrics.json."""
        self.metrics.status, self.metrics.step = word, self.step
        write_metrics(self.folder, self.metrics)

    def run(self, steps: int, **logged: Any) -> None:
        """Do updates; what is given replaces a number of each line that is logged."""
        for _ in range(steps):
            self.step += 1
            for beat in self.beats:
                beat.beat(self.step)
            self.now += self.step_s * self.random.uniform(0.9, 1.1)
            if self.step % self.log_every == 0:
                self.log(**logged)

    def log(self, **changed: Any) -> None:
        """Log an update: a loss that falls under noise, memory and speed that waver."""
        loss = 2.5 + 8.0 / (1 + self.step) ** 0.4 + self.random.gauss(0, 0.08)
        line: dict[str, Any] = {
            "loss": loss,
            "toks_per_s": 4096 / self.step_s * self.random.uniform(0.9, 1.1),
            "lr": 2e-4,
            "grad_norm": self.random.uniform(0.3, 0.9),
            "index_loss": 0.3,
            "step_time_s": self.step_s,
            "mfu": 0.31,
            "dt_fetch_s": 0.002,
            "fetch_p50_ms": 2.0,
            "fetch_p95_ms": 4.0,
            "gpu": GpuReading(18_000 + self.random.randrange(40), 21_000, 97, 61),
            "attention": GATES,
            "layers": [LAYER, LAYER],
            "fallbacks": fallback_counts({}),
        } | changed
        gpu: GpuReading = line.pop("gpu")
        self.rows.append(TrainingRow(self.step, line["loss"], line["lr"], line["toks_per_s"]))
        for beat in self.beats:
            beat.progress(self.step, **line, **gpu._asdict())
            beat.step_end(self.step)
        self.metrics.loss_last = line["loss"]


def dead_pid() -> int:
    """A number that no process has."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
