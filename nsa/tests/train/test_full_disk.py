"""A disk that really refuses bytes: the run continues, says so once, and nothing is left half."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.config import Config
from nsa.files import explain
from nsa.records import TRAINING, TrainingRow, read_metrics, read_rows
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.effects import TINY
from nsa.tests.support.nursery import Nursery
from nsa.train import RunRefused, run

RUN = """
import io, json, resource, shutil, sys
from nsa.config import load_config
from nsa.train import TrainError, run
from nsa.train.trainer import Trainer

path, full_from, full_to = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
real, seen = Trainer.update, {}
real_usage, usage = shutil.disk_usage, type(shutil.disk_usage("/"))

def update(self, step, *args):
    if step in (full_from, full_to):
        self.saver.wait()
        limit = 100 if step == full_from else resource.RLIM_INFINITY
        shutil.disk_usage = (lambda path: usage(10**6, 10**6, 100)) if limit == 100 else real_usage
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if step == full_to:
        seen["then"] = json.loads((self.folder / "metrics.json").read_text())["step"]
    return real(self, step, *args)

Trainer.update = update
cfg = load_config(path, [f"train.out_dir={path}.run", "train.steps=6", "train.save_every=2"])
try:
    result = run(cfg, config_path=path, out=sys.stderr)
    print(json.dumps({"status": result.metrics.status, **seen}))
except TrainError as error:
    print(json.dumps({"error": str(error)}))
"""
"""The kernel refuses to let any file grow beyond 100 bytes, from one step to another; the disk says
that it is full, too."""


def run_in(
    python: Path, folder: Path, full_from: int, full_to: int
) -> tuple[dict[str, object], str]:
    path = folder / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    command = [str(python), "-c", RUN, str(path), str(full_from), str(full_to)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_disk_that_is_full_for_some_steps_costs_their_lines_and_is_said_once(
    nursery: Nursery, tmp_path: Path
) -> None:
    found, said = run_in(nursery.python, tmp_path, 3, 5)
    folder = tmp_path / "tiny.yaml.run"
    assert found == {"status": "finished", "then": 2}, "metrics.json kept its old content"
    assert "Traceback" not in said, "nor of TensorBoard's thread"
    assert re.search(
        r"checkpoint_step4.pt in .*: not written: disk full: need [\d.]+ KiB, have 100 bytes", said
    )
    complaints = [line for line in said.splitlines() if "[telemetry]" in line and "metrics" in line]
    assert len(complaints) == 1 and "File too large" in complaints[0]
    assert read_metrics(folder).step == 6
    assert [row.step for row in read_rows(TrainingRow, folder / TRAINING)] == [1, 2, 5, 6]
    assert (folder / "model.pt").is_file() and not list(folder.glob(".*.tmp"))
    assert sorted(p.name for p in folder.glob("checkpoint_step*.pt")) == [
        "checkpoint_step2.pt",
        "checkpoint_step6.pt",
    ]


def test_a_disk_that_stays_full_ends_with_what_to_do_and_no_half_file(
    nursery: Nursery, tmp_path: Path
) -> None:
    found, said = run_in(nursery.python, tmp_path, 3, 99)
    folder = tmp_path / "tiny.yaml.run"
    assert "model.pt could not be written" in str(found["error"])
    assert "disk full: need" in str(found["error"]) and "have 100 bytes" in str(found["error"])
    assert "checkpoint export" in str(found["error"]) and "Traceback" not in said
    assert sum("[telemetry]" in x and "metrics.json" in x for x in said.splitlines()) == 1
    assert not (folder / "model.pt").exists() and not list(folder.glob(".*.tmp"))
    assert [p.name for p in folder.glob("checkpoint_step*.pt")] == ["checkpoint_step2.pt"]


def test_a_run_that_has_no_room_for_a_checkpoint_is_refused_with_what_it_lacks(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 3 << 10))
    cfg = tiny_config("train.save_every=1")
    text = r"disk full: need 118.2 KiB for a checkpoint, have 3.0 KiB in .*run; free some space"
    with pytest.raises(RunRefused, match=text) as refused:
        run(cfg, config_path="tiny", out=io.StringIO())
    assert refused.value.exit_code == 3
    assert not Path(cfg.train.out_dir).exists()
    run(tiny_config("train.steps=1"), config_path="tiny", out=io.StringIO())  # it writes none


def test_errors_of_the_system_are_sentences(tmp_path: Path) -> None:
    full, denied = OSError(errno.ENOSPC, "No space left"), PermissionError(13, "denied", "/x")
    assert explain(full, tmp_path).startswith("disk full: have ")
    assert explain(OSError("wrapped"), tmp_path, 1 << 60).startswith("disk full: need 1073741824.0")
    assert explain(OSError("wrapped"), tmp_path, 1) == "wrapped"
    assert explain(denied) == "/x: denied"
