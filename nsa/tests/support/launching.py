"""Starts `nsa launch` and its scripts for real, at sizes of seconds, in a folder of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nsa.config import load_config
from nsa.records import write_config
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.support import launch

PYTHON = Path(sys.executable)
TIMEOUT_S = 150
LOOSE = [
    f"--limit={name}" for name in ("step_time_ratio=1000", "stable_share=0", "toks_per_s_min=0")
]
"""A shared machine is neither fast nor steady, and no test is about its speed."""
USUAL = {"OMP_NUM_THREADS": "1", "NSA_PG_TIMEOUT_MIN": "1", "NSA_TB_DISABLE": "1"}


def write_tiny(folder: Path, *overrides: str) -> Path:
    """A config of a run of a second, with checkpoints, whose folder is `run` beside it."""
    base = REPOSITORY / "configs" / "base.yaml"
    usual = ("train.steps=12", "train.save_every=4", "train.eval_every=0", "train.lr=0.01")
    config = load_config(base, [*TINY, *usual, "train.out_dir=run", *overrides], environ={})
    folder.mkdir(parents=True, exist_ok=True)
    written = write_config(folder, config, "test")
    return written.rename(folder / "tiny.yaml")


def environment(**environ: str) -> dict[str, str]:
    """That of the test, without what a launch takes from it, and with what is given."""
    own = ("NP", "DATASET", "LOCAL_PATH", "OUT_DIR", "TMUX", "PYTHONPATH")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    return clean | USUAL | {"PYTHON": sys.executable} | environ


def start_script(
    name: str, *arguments: object, cwd: Path, python: Path | None = None, **environ: str
) -> subprocess.Popen[str]:
    """Start a script of the repository, with its own Python or another one."""
    root = REPOSITORY
    if python is not None:
        # A checkout without a .venv, beside that Python: its folder goes when the tests end.
        root, environ = python.parent / "checkout", {"PYTHON": str(python)} | environ
        root.mkdir(exist_ok=True)
        if not (root / "scripts").exists():
            (root / "scripts").symlink_to(REPOSITORY / "scripts")
    return start_process(["bash", root / "scripts" / name, *arguments], cwd, **environ)


def start_launch(
    *arguments: object, cwd: Path, python: Path = PYTHON, **environ: str
) -> subprocess.Popen[str]:
    """Start `nsa launch` on the tiny config of the folder, on the embedded corpus."""
    environ = {"CONFIG": "tiny.yaml", "DATASET": "shakespeare", "NP": "1"} | environ
    command = [python, "-m", "nsa.cli", "launch", *LOOSE, *arguments]
    return start_process(command, cwd, **({"PYTHONPATH": str(REPOSITORY)} | environ))


def start_process(command: list[object], cwd: Path, **environ: str) -> subprocess.Popen[str]:
    """Start a process with its two outputs in one pipe, and nothing to read."""
    return subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a launcher, and all that was printed."""
    return launch.finish(process, TIMEOUT_S)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str] | None, what: str) -> None:
    """Wait for something that a process does; fail with its output if it ends before."""
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended before {what}: {finish(process)[1]}")
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    """Lines of a file; 0 while there is none."""
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
