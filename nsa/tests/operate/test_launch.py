"""`nsa launch` for real: phases, signals, crashes, nodes, tmux; every process is a real one.

They come from the nursery, except where torchrun itself gets a signal.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nsa.operate.launch.phases import Child, Transcript
from nsa.records import read_metrics
from nsa.records.launch import RunInfo, read_run_info, read_verdict
from nsa.tests.support.launching import (
    USUAL,
    environment,
    finish,
    num_lines,
    start_launch,
    wait_until,
    write_tiny,
)
from nsa.tests.support.nursery import Nursery

LONG = ("train.steps=4000", "train.save_every=0")


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Start:
    """Start `nsa launch` in the folder of the test, in processes of the nursery."""
    return partial(start_launch, cwd=tmp_path, python=nursery.python)


def records(folder: Path) -> Path:
    """The newest records of a launch."""
    return sorted((folder / "artifacts" / "train_runs").iterdir())[-1]


def info(folder: Path) -> RunInfo:
    return read_run_info(records(folder))


def trainers(folder: Path) -> list[int]:
    """The processes that `pgrep -f scripts/train_showcase.py` finds, of one test alone."""
    pattern = f"scripts/train_showcase.py .*{re.escape(str(folder))}"
    found = subprocess.run(["pgrep", "-f", "--", pattern], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_phases_follow_each_other_and_a_verdict_is_not_asked_for_twice(
    start: Start, tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    arguments = ("--profile", "production", "--phases", "0,3", "--phase-steps", "1,,,")
    code, printed = finish(start(*arguments))
    assert code == 0, printed
    found = re.findall(r"^\[launch\] phase (\w): (GO|NO-GO)", printed, re.MULTILINE)
    assert found == [("0", "GO"), ("3", "GO")]
    for line in ("Config: tiny.yaml", "Dataset: shakespeare", "NP: 1"):
        assert f"\n{line}\n" in printed
    steps = [read_metrics(tmp_path / "run" / name).step for name in ("phase0", ".")]
    assert steps == [1, 12]
    logs = [tmp_path / "run" / "production.log", tmp_path / "artifacts/production_50k_FINAL.log"]
    logs.append(records(tmp_path) / "train.log")
    for log in logs:
        assert "step 0012 | loss" in log.read_text(encoding="utf-8"), log
    launched = info(tmp_path)
    assert (launched.exit_code, launched.ranks, launched.config) == (0, 1, "tiny.yaml")
    assert launched.notes[-1].startswith("[done]")
    verdict = read_verdict(tmp_path / "run" / "phase0")
    assert verdict is not None and verdict.go and verdict.judged == "launch"

    code, printed = finish(start(*arguments))
    assert code == 0, printed
    assert printed.count("GO already; skipped") == 2
    assert "step 0001" not in printed


def test_a_phase_that_fails_ends_the_launch(start: Start, tmp_path: Path) -> None:
    """The rate is so high that the loss is not finite in the second step."""
    write_tiny(tmp_path, "train.lr=1e30", "train.grad_clip=0")
    process = start("--phases", "1,3", "--phase-steps", ",4,,")
    code, printed = finish(process)
    assert code == 10, printed
    assert "[launch] phase 1: NO-GO: the trainer exited with 10" in printed
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert read_verdict(tmp_path / "run" / "phase1") is None
    assert info(tmp_path).exit_code == 10


def test_a_verdict_of_no_go_ends_the_launch_unless_told_to_go_on(
    start: Start, tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    arguments = ("--limit=toks_per_s_min=1e12", "--phases", "1,3", "--phase-steps", ",8,,")
    code, printed = finish(start(*arguments))
    assert code == 1, printed
    assert re.search(r"phase 1: NO-GO at phase1: .*failed: throughput", printed)
    assert not (tmp_path / "run" / "metrics.json").exists()
    verdict = read_verdict(tmp_path / "run" / "phase1")
    assert verdict is not None and not verdict.go
    assert info(tmp_path).exit_code == 1
    assert (records(tmp_path) / "report_1" / "report.json").exists()

    code, printed = finish(start(*arguments, "--go-anyway"))
    assert code == 0, printed
    assert printed.count("NO-GO, continuing because of --go-anyway") == 2
    assert read_metrics(tmp_path / "run").status == "finished"


@pytest.mark.dist
def test_usr1_to_all_that_pgrep_finds_leaves_the_job_running(tmp_path: Path) -> None:
    """torchrun has the same words on its command line, and would die of the signal."""
    write_tiny(tmp_path, *LONG)
    folder = tmp_path / "run"
    process = start_launch("--phases", "3", "--out-dir", folder, cwd=tmp_path, NP="2")
    csv = folder / "training.csv"
    wait_until(lambda: num_lines(csv) > 3, process, "the first steps")
    pids = trainers(tmp_path)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids]
    assert len(pids) == 3 and sum(b"torch.distributed.run" in c for c in commands) == 1

    subprocess.run(["kill", "-USR1", *map(str, pids)], check=True)
    wait_until(lambda: len([*folder.glob("stackdump_*.txt")]) >= 2, process, "two dumps")
    before = num_lines(csv)
    wait_until(lambda: num_lines(csv) > before + 3, process, "more steps")
    assert trainers(tmp_path) == pids
    (folder / ".HALT").touch()
    code, printed = finish(process)
    assert code == 0, printed
    dumps = [path.read_text(encoding="utf-8") for path in folder.glob("stackdump_*.txt")]
    ranks = sorted(re.findall(r"^pid \d+ rank (\d)", "\n".join(dumps), re.MULTILINE))
    assert ranks == ["0", "1"]
    assert "phase 3: stopped at step" in printed


@pytest.mark.parametrize("ranks", ["1", "2"], ids=["python", "torchrun"])
def test_a_signal_to_the_launcher_ends_the_run_with_a_checkpoint(
    ranks: str, start: Start, tmp_path: Path
) -> None:
    write_tiny(tmp_path, *LONG)
    folder, arguments = tmp_path / "run", ("--phases", "3")
    process = start(*arguments, NP=ranks)
    wait_until(lambda: num_lines(folder / "training.csv") > 3, process, "the first steps")
    process.send_signal(signal.SIGTERM)
    code, printed = finish(process)
    assert code == 0, printed
    step = read_metrics(folder).step
    assert read_metrics(folder).status == "halted"
    assert (folder / f"checkpoint_step{step}.pt").exists()
    assert not (folder / ".HALT").exists()
    assert f"phase 3: stopped at step {step} (SIGTERM); the same command resumes it" in printed

    (folder / ".HALT.done").unlink()
    process = start(*arguments, "--stop-old", NP=ranks)
    wait_until(lambda: read_metrics(folder).step > step + 3, process, "steps after the resume")
    process.send_signal(signal.SIGTERM)
    code, printed = finish(process)
    assert code == 0 and f"{step} of 4000 steps are done" in printed, printed


def test_a_run_that_crashes_is_started_again(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path, "train.steps=80", "train.save_every=10", "train.keep_last=0")
    folder = tmp_path / "run"
    process = start("--phases", "3", "--out-dir", folder)
    wait_until(lambda: bool([*folder.glob("checkpoint_step*.json")]), process, "a checkpoint")
    (pid,) = trainers(tmp_path)
    os.kill(pid, signal.SIGKILL)
    code, printed = finish(process)
    assert code == 0, printed
    assert printed.count("[launch] exit code -9; restarting, 2 restarts left") == 1
    assert printed.count(" of 80 steps are done") == 1
    assert printed.count("[resume] restart: resuming from the newest checkpoint") == 1
    assert (read_metrics(folder).status, read_metrics(folder).step) == ("finished", 80)


def test_a_folder_in_which_a_run_is_at_work_is_not_used_again(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path, *LONG)
    folder = tmp_path / "run"
    first = start("--phases", "3")
    wait_until(lambda: num_lines(folder / "training.csv") > 2, first, "the first steps")
    code, printed = finish(start("--phases", "3"))
    assert code == 3 and "a run is at work in run (process" in printed, printed
    (folder / ".HALT").touch()
    assert finish(first)[0] == 0


@pytest.mark.dist
def test_two_nodes_train_as_one(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ("--phases", "1,3", "--phase-steps", ",8,,", "--where", "foreground")
    nodes = [
        start(
            *(*arguments, "--nnodes", 2, "--node-rank", rank),
            *("--rdzv-endpoint", f"127.0.0.1:{port}"),
        )
        for rank in range(2)
    ]
    ended = [finish(node) for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    printed = ended[0][1] + ended[1][1]
    assert printed.count("process group ready | backend=gloo world_size=2") == 2
    for name in ("phase1", "."):
        metrics = read_metrics(tmp_path / "run" / name)
        assert (metrics.world_size, metrics.status) == (2, "finished")
    assert all(text.count("[launch] phase 3: GO") == 1 for _, text in ended)
    folders = [path.name for path in (tmp_path / "artifacts" / "train_runs").iterdir()]
    assert sorted(name.endswith("_node1") for name in folders) == [False, True]


def test_a_launch_in_tmux_has_the_environment_it_was_started_with(
    start: Start, tmp_path: Path
) -> None:
    """The server is older than the launch, and knows nothing of its variables."""
    write_tiny(tmp_path)
    socket_folder = {"TMUX_TMPDIR": str(tmp_path)}
    old = environment(**socket_folder)
    subprocess.run(["tmux", "new-session", "-d", "-s", "other", "sleep 600"], env=old, check=True)
    try:
        process = start(
            *("--phases", "1", "--phase-steps", ",8,,", "--where", "tmux", "--session", "mine"),
            NSA_LR="0.005",
            **socket_folder,
        )
        code, printed = finish(process)
        assert code == 0 and "tmux attach -t mine" in printed, printed
        wait_until(lambda: (records(tmp_path) / "run.info").exists(), None, "run.info")
        wait_until(lambda: info(tmp_path).exit_code is not None, None, "the end")
        assert info(tmp_path).exit_code == 0, (records(tmp_path) / "phase1.log").read_text()
        assert read_metrics(tmp_path / "run" / "phase1").lr == 0.005
        assert not [*records(tmp_path).glob(".environment*")]
    finally:
        subprocess.run(["tmux", "kill-server"], env=old, check=True)


def test_a_launch_in_the_background_outlives_its_start(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    arguments = ("--phases", "1", "--phase-steps", ",8,,", "--where", "background")
    code, printed = finish(start(*arguments))
    assert code == 0 and "in the background as process" in printed, printed
    wait_until(lambda: (records(tmp_path) / "run.info").exists(), None, "run.info")
    wait_until(lambda: info(tmp_path).exit_code is not None, None, "the end")
    log = (records(tmp_path) / "launcher.log").read_text(encoding="utf-8")
    assert info(tmp_path).exit_code == 0 and "[launch] phase 1: GO" in log


def child(folder: Path, code: str, **options: object) -> tuple[Child, list[str]]:
    """A process whose request to halt becomes a file `halt`, and who asked."""
    asked: list[str] = []

    def halt(who: str) -> None:
        asked.append(who)
        (folder / "halt").touch()

    made = Child(
        [sys.executable, "-c", code],
        environment() | {"HALT": str(folder / "halt")},
        Transcript([folder / "logs" / "log", folder / "other.log"]),
        halt=halt,
        kill_last=True,
        **options,  # type: ignore[arg-type]
    )
    return made, asked


WAITS = """
import os, time
print("started", flush=True)
while not os.path.exists(os.environ["HALT"]):
    time.sleep(0.05)
print("obeyed", flush=True)
"""


def test_a_phase_that_takes_too_long_is_asked_to_halt(tmp_path: Path) -> None:
    process, asked = child(tmp_path, WAITS, timeout_s=0.5)
    ended = process.run()
    assert (ended.code, ended.stopped, asked) == (0, "timeout", ["timeout"])
    for log in (tmp_path / "logs" / "log", tmp_path / "other.log"):
        lines = log.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "started" and lines[-1] == "obeyed"


def test_what_does_not_obey_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.HALT, then SIGTERM, then SIGKILL."""
    monkeypatch.setattr("nsa.operate.launch.phases.PATIENCE_S", 0.5)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True)"
    process, asked = child(tmp_path, f"{deaf}; time.sleep(600)", timeout_s=3.0)
    ended = process.run()
    assert (ended.code, ended.stopped, asked) == (-signal.SIGKILL, "timeout", ["timeout"])
    log = (tmp_path / "other.log").read_text(encoding="utf-8")
    assert "timeout again: SIGTERM to the run" in log


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_launcher(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '30']); print('gone', flush=True)"
    process, _ = child(tmp_path, code)
    assert process.run().code == 0
    assert (tmp_path / "other.log").read_text(encoding="utf-8") == "gone\n"


def test_usual_settings_are_those_of_the_table() -> None:
    from nsa.config.env import check_environment

    check_environment(USUAL)
