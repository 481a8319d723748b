"""One short real run in a process of its own, with a time limit, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nsa.config import BAD_INPUT, Config, ConfigError, load_config
from nsa.config.env import changed
from nsa.config.load import REPOSITORY
from nsa.files import open_binary, open_regular
from nsa.operate.text import printable
from nsa.operate.triage_toggles import Toggle
from nsa.telemetry import last_beat, read_metrics, write_config
from nsa.telemetry.atomic import write_text

TRAINER = REPOSITORY / "scripts" / "train_showcase.py"
END_S = 15.0
"""Seconds that a run has to end by itself after SIGTERM."""
DUMP_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What every run of a triage shares."""

    config_path: str
    overrides: tuple[str, ...]
    folder: Path
    steps: int
    timeout_s: float
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended."""

    name: str
    setting: str
    meaning: str
    fault: str
    """What went wrong, in a line; empty when all steps were done with finite losses."""
    kind: str
    """ok, timeout, or `exit N`: runs with the same kind have the same fault, as far as one sees."""
    exit_code: int | None
    """None where the run had to be killed."""
    steps_done: int
    loss_last: float | None
    seconds: float
    log: str
    """Name of the file with what it printed."""

    @property
    def is_ok(self) -> bool:
        """Whether the fault did not show."""
        return not self.fault


def config_of(trial: Trial, toggle: Toggle) -> Config:
    """The settings of a run; every step is logged, so that what happens there happens often."""
    fixed = ("train.log_every=1",)
    return load_config(trial.config_path, [*trial.overrides, *fixed, *toggle.overrides])


def run_trial(trial: Trial, toggle: Toggle, name: str) -> Outcome:
    """Run the trainer with a toggle; what it prints is in <folder>/<name>.log."""
    out, log = trial.folder / name, trial.folder / f"{name}.log"
    try:
        config = config_of(trial, toggle)
    except ConfigError as error:  # of the toggle: without it, the config has been read before
        write_text(log, f"{error}\n")
        return _judge(trial, toggle, name, BAD_INPUT, 0.0, out, log)
    out.mkdir(parents=True, exist_ok=True)
    config_file = write_config(out, config, trial.config_path)
    config_file = config_file.rename(trial.folder / f"{name}.yaml")
    command = _command(trial, toggle, config_file, out)
    start = time.perf_counter()
    with open(log, "wb", opener=open_regular) as output:
        process = subprocess.Popen(
            command,
            env=changed({"NSA_HEARTBEAT_EVERY": "1", **toggle.environ}),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its ranks can be ended with it
        )
        try:
            code: int | None = process.wait(trial.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, out)
    return _judge(trial, toggle, name, code, time.perf_counter() - start, out, log)


def _command(trial: Trial, toggle: Toggle, config_file: Path, out: Path) -> list[str]:
    ranks = toggle.ranks or trial.ranks
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    ddp = "1" if ranks > 1 else "0"
    command = [*launcher, str(TRAINER), "--config", str(config_file), "--ddp", ddp]
    command += ["--steps", str(trial.steps), "--out-dir", str(out), "--resume", "none"]
    return [*command, "--allow-long-run"]


def _judge(
    trial: Trial,
    toggle: Toggle,
    name: str,
    code: int | None,
    seconds: float,
    out: Path,
    log: Path,
) -> Outcome:
    steps_done, loss = 0, None
    with suppress(OSError, ValueError, TypeError):  # it may end before it writes any: 0 steps
        metrics = read_metrics(out)
        steps_done, loss = metrics.step, metrics.loss_last
    if code is None:
        kind, fault = "timeout", f"no end within {trial.timeout_s:g} s, at step {steps_done}"
    elif code != 0:
        kind, fault = f"exit {code}", f"exit code {code}: {_last_line(log)}"
    elif steps_done < trial.steps or loss is None:
        kind, fault = "stopped", f"ended after {steps_done} of {trial.steps} steps"
    else:
        kind, fault = "ok", ""
    return Outcome(
        name=toggle.name,
        setting=toggle.setting,
        meaning=toggle.meaning,
        fault=fault,
        kind=kind,
        exit_code=code,
        steps_done=steps_done,
        loss_last=loss,
        seconds=round(seconds, 1),
        log=f"{name}.log",
    )


def _end(process: subprocess.Popen[bytes], out: Path) -> None:
    """End what is left of a run: a stack dump first, then SIGTERM, then SIGKILL, to its session."""
    if process.poll() is None:
        _dump(process, out)
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # SIGKILL is next
            process.wait(END_S)
    with suppress(ProcessLookupError):  # nothing is left, as it should be
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dump(process: subprocess.Popen[bytes], out: Path) -> None:
    """Ask the rank that the heartbeat names for its stacks, if it is one of this session."""
    beat = last_beat(out / "heartbeat_rank0.jsonl") if out.is_dir() else None
    if beat is None or beat.pid is None:
        return
    with suppress(ProcessLookupError):  # it has just ended
        if os.getsid(beat.pid) == process.pid:
            os.kill(beat.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)


def _last_line(log: Path) -> str:
    with open_binary(log) as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    words = [line for line in lines if line.strip()]
    return printable(words[-1])[:200] if words else "it printed nothing"
