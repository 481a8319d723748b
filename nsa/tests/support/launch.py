"""Starts real ranks by torchrun, for tests; as a script, it is a rank with trouble of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts" / "train_showcase.py"
TIMEOUT_S = 120


def start(
    *arguments: object,
    script: Path = SCRIPT,
    ranks: int = 2,
    restarts: int = 0,
    python: Path | str = sys.executable,
    **environ: str,
) -> subprocess.Popen[str]:
    """Start ranks of the trainer over gloo; --standalone meets on a free port of its own."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    command += [str(script), *map(str, arguments)]
    usual = {"OMP_NUM_THREADS": "1", "NSA_PG_TIMEOUT_MIN": "1", "NSA_TB_DISABLE": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | usual | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """The exit code of a process, and all that it and its ranks printed."""
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, printed


def launch(*arguments: object, **options: Any) -> tuple[int, str]:
    """Start ranks, and wait for their end."""
    return finish(start(*arguments, **options))


def train(trouble: str, arguments: list[str]) -> int:
    """Train, with `trouble` on rank 1 or on all, mostly in the third update; empty is none.

    One with `=` is a setting that rank 1 alone has.
    """
    sys.path.insert(0, str(REPOSITORY))
    if "=" in trouble:
        arguments = [*arguments, trouble] if os.environ["RANK"] == "1" else arguments
    elif trouble in EVERYWHERE or (trouble and os.environ["RANK"] == "1"):
        _TROUBLES[trouble]()
    from scripts import train_showcase

    # A sample takes longer than all updates of such a run.
    with mock.patch("nsa.generate.sample_text", None):
        return train_showcase.main(arguments)


def _multiply_loss(call: int, factor: float) -> None:
    from nsa.train.loss import next_token_loss

    calls = iter(range(1000))

    def changed(*given: Any, **options: Any) -> Any:
        loss = next_token_loss(*given, **options)
        return loss * factor if next(calls) == call else loss

    mock.patch("nsa.train.step.next_token_loss", changed).start()


def _nan() -> None:
    _multiply_loss(3, float("nan"))  # the first call warms up


def _spike() -> None:
    """In the update after the window of losses is full."""
    _multiply_loss(9, 100.0)


def _before(step: int, what: Callable[[], object]) -> None:
    """Do something when the data of an update is asked for."""
    from nsa.train.trainer import Trainer

    real = Trainer.fetch

    def fetch(self: Trainer, position: int) -> Any:
        if position >= self.position(step):
            what()
        return real(self, position)

    Trainer.fetch = fetch  # type: ignore[method-assign]


def _in_source(step: int, what: Callable[[], object]) -> None:
    """Do something in the thread that reads ahead, where it reads the batch of an update."""
    from nsa.train import runner
    from nsa.train.batches import read_ahead

    def troubled(rows: Any, cfg: Any, *rest: Any) -> Any:
        first = (step - 1) * 2 * cfg.train.batch_size
        real = rows.batch

        def batch(position: int, size: int) -> Any:
            if position >= first:
                what()
            return real(position, size)

        rows.batch = batch
        return read_ahead(rows, cfg, *rest)

    mock.patch.object(runner, "read_ahead", troubled).start()


def _lose() -> None:
    from nsa.data import SourceLost

    raise SourceLost("the cable was pulled")


def _spoil() -> None:
    from nsa.data import DataError

    raise DataError("a row is not text")


def _hold_lock() -> None:
    """Keep the interpreter lock in C, so that no Python runs in this process any more."""
    ctypes.PyDLL(None).usleep(30_000_000)


def _slow() -> None:
    """Evaluations, checkpoints and the first update take two seconds more."""
    from nsa.train.loss import evaluate
    from nsa.train.step import EagerStep
    from nsa.train.trainer import Trainer

    def delayed(real: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            time.sleep(2.0)
            return real(*given, **options)

        return call

    mock.patch("nsa.train.trainer.evaluate", delayed(evaluate)).start()
    mock.patch.object(Trainer, "state_dict", delayed(Trainer.state_dict)).start()
    mock.patch.object(EagerStep, "_backward", delayed(EagerStep._backward)).start()


def _die_in_save() -> None:
    """Rank 0, which writes the checkpoints, is killed in the middle of that of the sixth update."""
    import torch

    real = torch.save

    def save(content: Any, file: Any) -> None:
        if isinstance(content, dict) and content.get("step") == 6:
            Path(file).write_bytes(bytes(100_000))
            os.kill(os.getpid(), signal.SIGKILL)
        real(content, file)

    mock.patch.object(torch, "save", save).start()


def _clock() -> None:
    """The clock of this rank is an hour slow."""
    real = time.time
    mock.patch("time.time", lambda: real() - 3600).start()


def _code() -> None:
    mock.patch("nsa.train.distributed.strategy.source_hash", lambda: "0123456789abcdef").start()


def _other_config() -> None:
    os.environ["NSA_LR"] = "0.5"


def _full() -> None:
    """No file of this rank may grow beyond 100 bytes: to it, the disk is full."""
    import resource

    limits = (100, resource.RLIM_INFINITY)
    _before(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


_TROUBLES: dict[str, Callable[[], object]] = {
    "nan": _nan,
    "spike": _spike,
    "term": lambda: _before(3, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "lost": lambda: _in_source(3, _lose),
    "spoilt": lambda: _in_source(3, _spoil),
    "stall": lambda: _in_source(6, lambda: time.sleep(600)),
    "slow": _slow,
    "steady": lambda: _before(1, lambda: time.sleep(0.3)),
    "locked": lambda: _before(6, _hold_lock),
    "config": _other_config,
    "full": _full,
    "code": _code,
    "clock": _clock,
    "die in save": _die_in_save,
}
EVERYWHERE = ("slow", "die in save")
"""Troubles of all ranks."""


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], sys.argv[2:]))
