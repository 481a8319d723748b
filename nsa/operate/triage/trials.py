"""The triage toggles, and running the trainer once with one of them.

Toggle order: logging first, as it costs nothing, then data, kernels, gradient exchange and memory.
Toggles that change the run most come last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nsa.config import BAD_INPUT, Config, ConfigError, load_config
from nsa.config.describe import printable
from nsa.config.env import changed
from nsa.files import open_binary, open_regular, write_text
from nsa.operate.process import trainer
from nsa.operate.run_files import RunFiles
from nsa.records import last_beat, write_config

# --- the toggles ---

SHORT_ROW = 1024
"""Tokens per row for the memory toggle; rows that are already this short are halved."""


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """One change to the run under test."""

    name: str
    meaning: str
    """Where the fault is, if this toggle clears it."""
    environ: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    """Number of processes, if the toggle changes it."""

    @property
    def setting(self) -> str:
        """The toggle as a user would type it."""
        words = [f"{name}={value}" for name, value in self.environ.items()]
        words += self.overrides
        return " ".join(words + ([f"--np {self.ranks}"] if self.ranks else [])) or "as it is"


BASELINE = Toggle(name="baseline", meaning="the run as it is")


def matrix(config: Config, ranks: int, *, on_cuda: bool) -> list[Toggle]:
    """All toggles that change something for this run, in the order of the runbooks."""
    toggles = [*_telemetry(config), *_kernels(config)]
    # NSA_DDP_* variables do nothing under FSDP.
    is_ddp = ranks > 1 and config.runtime.strategy != "fsdp" and config.runtime.tp == 1
    if is_ddp:
        toggles += EXCHANGE
    toggles += [SELECTION, *_memory(config, ranks)]
    if on_cuda:
        toggles.append(BLOCKING)
    if ranks > 1:
        toggles.append(ONE_PROCESS)
    return [*toggles, FSDP] if is_ddp else toggles


def _telemetry(config: Config) -> list[Toggle]:
    found = [
        Toggle(
            name="stats_off",
            meaning="the statistics of gates and selection at logged steps",
            environ={"NSA_DISABLE_AUX_STATS": "1"},
        ),
        Toggle(
            name="logs_off",
            meaning="TensorBoard, the CSV files, a tracker, or the disk they are on",
            environ={"NSA_TB_DISABLE": "1", "NSA_DISABLE_CSV_LOGS": "1"},
            overrides=("train.tracker=none",),
        ),
    ]
    if config.data.dataset != "synthetic":
        found.append(
            Toggle(
                name="synthetic_data",
                meaning="the data: its source, its content, or the network",
                overrides=("data.dataset=synthetic", "data.local_path="),
            )
        )
    return found


def _kernels(config: Config) -> list[Toggle]:
    found = [
        Toggle(
            name="no_flash",
            meaning="flash kernels of scaled_dot_product_attention",
            environ={"NSA_SDPA_NO_FLASH": "1", "NSA_SDPA_FLASH_ONLY": "0"},
        ),
        Toggle(
            name="fa2_off",
            meaning="the FlashAttention-2 route of the window and compressed branches",
            environ=dict.fromkeys(("NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_USE_FA2_CMP"), "0"),
        ),
    ]
    if config.runtime.compile or config.runtime.cuda_graph:
        found.append(
            Toggle(
                name="as_written",
                meaning="torch.compile, or the capture as a CUDA graph",
                overrides=("runtime.compile=false", "runtime.cuda_graph=false"),
            )
        )
    return found


OFF = {"NSA_DDP_COMPRESS": "off"}
EXCHANGE = [
    Toggle(
        name="compress_off",
        meaning="compressed gradients, or many small buckets",
        environ={**OFF, "NSA_DDP_BUCKET_MB": "100"},
    ),
    Toggle(
        name="static_graph_off",
        meaning="static_graph: some step has another autograd graph",
        environ={**OFF, "NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "0"},
    ),
    Toggle(
        name="find_unused",
        meaning="parameters that get no gradient in some steps",
        environ={**OFF, "NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_FIND_UNUSED": "1"},
    ),
    *(
        Toggle(
            name=f"bucket_{size}",
            meaning="the size of the buckets",
            environ={"NSA_DDP_BUCKET_MB": str(size)},
        )
        for size in (25, 50)
    ),
    Toggle(
        name="safe_mode",
        meaning="DDP settings or kernels; the rows above do not tell which",
        environ={"NSA_DDP_SAFE_MODE": "1"},
    ),
]
SELECTION = Toggle(
    name="selection_v1",
    meaning="the fast selection of blocks",
    environ={"NSA_SEL_RANGES_V2": "0"},
)
BLOCKING = Toggle(
    name="launch_blocking",
    meaning="asynchronous launches; the log may now name the failing kernel",
    environ={"CUDA_LAUNCH_BLOCKING": "1"},
)
ONE_PROCESS = Toggle(
    name="one_process",
    meaning="multiple ranks: the network between them, or DDP",
    # One process accepts nothing else.
    overrides=("runtime.strategy=auto", "runtime.cp=1", "runtime.tp=1"),
    ranks=1,
)
FSDP = Toggle(
    name="fsdp",
    meaning="DDP, not multiple ranks as such",
    overrides=("runtime.strategy=fsdp",),
)


def _memory(config: Config, ranks: int) -> list[Toggle]:
    row = config.train.seq_len
    shorter = str(SHORT_ROW if row > SHORT_ROW else max(row // 2, 1))
    found = []
    if not config.runtime.gradient_checkpointing:
        found.append(
            Toggle(
                name="gradient_checkpointing",
                meaning="memory of activations",
                environ={"NSA_NO_GC": "0"} | ({"NSA_DDP_DISABLE_GC": "0"} if ranks > 1 else {}),
                overrides=("runtime.gradient_checkpointing=true",),
            )
        )
    found.append(
        Toggle(
            name="shorter_rows",
            meaning="memory, or a fault that only long rows trigger",
            environ={"NSA_SEQ_LEN": shorter},
        )
    )
    return found


# --- one trial: a short run in its own process, with a time limit ---

END_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""
DUMP_S = 3.0
# Seconds for a rank to write its stack dump after SIGUSR1.


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings shared by all runs of a triage."""

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
    """The fault in one line; empty if all steps were done with finite losses."""
    kind: str
    """ok, timeout, stopped or `exit N`; runs with the same kind probably have the same fault."""
    exit_code: int | None
    """None if the run was killed."""
    steps_done: int
    loss_last: float | None
    seconds: float
    log: str
    """File name of its output."""

    @property
    def is_ok(self) -> bool:
        """Whether the fault did not occur."""
        return not self.fault


def config_of(trial: Trial, toggle: Toggle) -> Config:
    """The config of a trial; every step is logged, so that faults in logging show up."""
    fixed = ("train.log_every=1",)
    return load_config(trial.config_path, [*trial.overrides, *fixed, *toggle.overrides])


def run_trial(trial: Trial, toggle: Toggle, name: str) -> Outcome:
    """Run the trainer with a toggle; its output goes to <folder>/<name>.log."""
    out, log = trial.folder / name, trial.folder / f"{name}.log"
    try:
        config = config_of(trial, toggle)
    except ConfigError as error:  # caused by the toggle: the baseline config was valid
        write_text(log, f"{error}\n")
        return _judge(trial, toggle, name, BAD_INPUT, 0.0, out, log)
    out.mkdir(parents=True, exist_ok=True)
    config_file = write_config(out, config, trial.config_path)
    # Out of the run folder: with --resume none the trainer moves the files it finds there.
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
            start_new_session=True,  # own process group, so that its ranks can be killed with it
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
    command = [*launcher, *trainer(), "--config", str(config_file), "--ddp", ddp]
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
    metrics = RunFiles(out).metrics()
    steps_done, loss = (metrics.step, metrics.loss_last) if metrics else (0, None)
    if code is None:
        kind, fault = "timeout", f"timed out after {trial.timeout_s:g} s, at step {steps_done}"
    elif code != 0:
        kind, fault = f"exit {code}", f"exit code {code}: {_last_line(log)}"
    # Exit code 0 is not enough: a run may stop early or log no loss.
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
    """Stop the whole process group: stack dump, then SIGTERM, then SIGKILL."""
    if process.poll() is None:
        _dump(process, out)
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # still alive: SIGKILL below
            process.wait(END_S)
    with suppress(ProcessLookupError):  # the normal case: the group is already empty
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dump(process: subprocess.Popen[bytes], out: Path) -> None:
    """Send SIGUSR1 to rank 0 for a stack dump, if its pid belongs to this session."""
    beat = last_beat(out / "heartbeat_rank0.jsonl") if out.is_dir() else None
    if beat is None or beat.pid is None:
        return
    with suppress(ProcessLookupError):  # it ended meanwhile
        if os.getsid(beat.pid) == process.pid:
            os.kill(beat.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)


def _last_line(log: Path) -> str:
    with open_binary(log) as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    words = [line for line in lines if line.strip()]
    return printable(words[-1])[:200] if words else "it printed nothing"
