"""Signals to a run that trains, in real processes: what is said at once, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from nsa.records import read_metrics
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.effects import TINY

RUNS = """
import ctypes, json, os, sys, threading, time
from nsa.cli.__main__ import main
from nsa.train import stop
from nsa.train.trainer import Trainer

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def hang(seconds):
    "Wait in a library, where Python calls no handler."
    libc.pthread_mutex_lock(mutex)
    threading.Timer(seconds, libc.pthread_mutex_unlock, [mutex]).start()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_unlock(mutex)

def train(folder, wait, seconds):
    real = Trainer.update

    def update(self, step, *args):
        if step == 2:
            (self.folder / "in_step_2").touch()
            {"sleep": time.sleep, "hang": hang}[wait](seconds)
        return real(self, step, *args)

    Trainer.update = update
    os.dup2(os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    words = [f"train.out_dir={folder}", "train.steps=3", "train.save_every=1"]
    os._exit(main(["train", "--config", sys.argv[1], *words]))

stop.LEAVE_S = 1.0
pids = {}
for name, (wait, seconds) in json.loads(sys.argv[2]).items():
    pids[name] = os.fork() or train(f"{sys.argv[3]}/{name}", wait, seconds)
print(json.dumps(pids), flush=True)
for pid in pids.values():
    print(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
"""
"""Imports once, and forks a run for each case."""


class Case(NamedTuple):
    """Signals that reach a run in its second step, and what comes of it."""

    wait: tuple[str, float]
    """How the step takes long, and for how many seconds."""
    signals: list[tuple[signal.Signals, float]]
    """Each with the seconds that follow it."""
    says: list[str]
    status: str
    checkpoints: list[int]


TERM, INT = signal.SIGTERM, signal.SIGINT
FIRST = "[stop] {} received: finishing step 2, then a checkpoint; repeat it to stop at once"
AGAIN = "[stop] {} again: stopping at once; the last checkpoint stays"
CASES = {
    "once": Case(("hang", 4.0), [(TERM, 2.0)], [FIRST.format("SIGTERM")], "halted", [1, 2]),
    # pkill -f reaches the rank and its launcher, which passes the signal on.
    "twice as one": Case(
        ("sleep", 3.0), [(TERM, 0.2), (TERM, 0.0)], [FIRST.format("SIGTERM")], "halted", [1, 2]
    ),
    "twice": Case(
        ("sleep", 100.0),
        [(TERM, 2.5), (TERM, 0.0)],
        [FIRST.format("SIGTERM"), AGAIN.format("SIGTERM"), "nsa: interrupted after step 1"],
        "interrupted",
        [1],
    ),
    "Ctrl-C twice": Case(
        ("sleep", 100.0),
        [(INT, 0.3), (INT, 0.0)],
        [FIRST.format("SIGINT"), AGAIN.format("SIGINT"), "nsa: interrupted after step 1"],
        "interrupted",
        [1],
    ),
    "twice in a hang": Case(
        ("hang", 100.0),
        [(TERM, 2.5), (TERM, 0.0)],
        [FIRST.format("SIGTERM"), AGAIN.format("SIGTERM"), "the step does not end: exiting"],
        "running",
        [1],
    ),
}


def test_signals_are_acknowledged_at_once_and_end_runs_as_documented(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    waits = json.dumps({name: case.wait for name, case in CASES.items()})
    command = [sys.executable, "-c", RUNS, str(tmp_path / "tiny.yaml"), waits, str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        try:
            for name in CASES:
                wait_for(tmp_path / name / "in_step_2")
            begun = time.monotonic()
            due = sorted(events(pids), key=lambda event: event[0])
            for at, pid, number, _ in due:
                time.sleep(max(0.0, begun + at - time.monotonic()))
                os.kill(pid, number)
            time.sleep(max(0.0, begun + 2.0 - time.monotonic()))
            said = (tmp_path / "once.log").read_text()
            assert FIRST.format("SIGTERM") in said, "while the step still hangs"
            assert "stopped by" not in said
            codes = dict(json.loads(line) for line in process.stdout)
        finally:
            for pid in pids.values():
                kill(pid)
    for name, case in CASES.items():
        said = (tmp_path / f"{name}.log").read_text()
        assert codes[pids[name]] == 0, f"{name}: {said}"
        assert "Traceback" not in said, said
        missing = [text for text in case.says if said.count(text) != 1]
        assert not missing, f"{name}: {said}"
        assert read_metrics(tmp_path / name).status == case.status, f"{name}: {said}"
        steps = [int(p.stem[15:]) for p in (tmp_path / name).glob("checkpoint_step*.pt")]
        assert sorted(steps) == case.checkpoints, name


def events(pids: dict[str, int]) -> list[tuple[float, int, signal.Signals, str]]:
    found = []
    for name, case in CASES.items():
        at = 0.0
        for number, then in case.signals:
            found.append((at, pids[name], number, name))
            at += then
    return found


def wait_for(path: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        log = path.parent.with_name(f"{path.parent.name}.log")
        assert time.monotonic() < end, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.05)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_ctrl_c_in_any_command_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa.cli import settings
    from nsa.cli.__main__ import main

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(settings, "_keys", interrupted)
    assert main(["keys"]) == 130
    assert capsys.readouterr().err == "nsa: interrupted\n"
