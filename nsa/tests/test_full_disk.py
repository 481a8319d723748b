"""A disk that really refuses bytes: the run goes on, says so once, and nothing is left half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nsa.telemetry import TRAINING, TrainingRow, read_metrics, read_rows
from nsa.tests.conftest import REPOSITORY
from nsa.tests.effects import TINY

RUN = """
import io, json, resource, sys
from nsa.config import load_config
from nsa.train import TrainError, run
from nsa.train.loop import Trainer

path, full_from, full_to = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
real, seen = Trainer.update, {}

def update(self, step, *args):
    if step in (full_from, full_to):
        self.saver.wait()
        limit = 100 if step == full_from else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if step == full_to:
        seen["then"] = json.loads((self.folder / "metrics.json").read_text())["step"]
    return real(self, step, *args)

Trainer.update = update
cfg = load_config(path, [f"train.out_dir={path}.run", "train.steps=6", "train.save_every=2"])
try:
    result = run(cfg, config_path=path, out=io.StringIO())
    print(json.dumps({"status": result.metrics.status, **seen}))
except TrainError as error:
    print(json.dumps({"error": str(error)}))
"""
"""The kernel refuses to let any file grow beyond 100 bytes, from one step to another."""


def run_in(folder: Path, full_from: int, full_to: int) -> tuple[dict[str, object], str]:
    path = folder / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    command = [sys.executable, "-c", RUN, str(path), str(full_from), str(full_to)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_disk_that_is_full_for_some_steps_costs_their_lines_and_is_said_once(
    tmp_path: Path,
) -> None:
    found, said = run_in(tmp_path, 3, 5)
    folder = tmp_path / "tiny.yaml.run"
    assert found == {"status": "finished", "then": 2}, "metrics.json kept its old content"
    complaints = [line for line in said.splitlines() if "metrics.json" in line]
    assert len(complaints) == 1 and "File too large" in complaints[0]
    assert read_metrics(folder).step == 6
    assert [row.step for row in read_rows(TrainingRow, folder / TRAINING)] == [1, 2, 5, 6]
    assert (folder / "model.pt").is_file() and not list(folder.glob(".*.tmp"))
    assert sorted(p.name for p in folder.glob("checkpoint_step*.pt")) == [
        "checkpoint_step2.pt",
        "checkpoint_step6.pt",
    ]


def test_a_disk_that_stays_full_ends_with_what_to_do_and_no_half_file(tmp_path: Path) -> None:
    found, said = run_in(tmp_path, 3, 99)
    folder = tmp_path / "tiny.yaml.run"
    assert "model.pt could not be written" in str(found["error"])
    assert "checkpoint export" in str(found["error"])
    assert sum("metrics.json" in line for line in said.splitlines()) == 1
    assert not (folder / "model.pt").exists() and not list(folder.glob(".*.tmp"))
    assert [p.name for p in folder.glob("checkpoint_step*.pt")] == ["checkpoint_step2.pt"]
