"""Starts real ranks by torchrun, for tests; as a script, it is a rank with trouble of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "train_showcase.py"
TIMEOUT_S = 120


def start(
    *arguments: object, script: Path = SCRIPT, ranks: int = 2, **environ: str
) -> subprocess.Popen[str]:
    """Start ranks of the trainer over gloo; --standalone meets on a free port of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(script), *map(str, arguments)]
    usual = {"OMP_NUM_THREADS": "1", "NSA_PG_TIMEOUT_MIN": "1", "NSA_TB_DISABLE": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | usual | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of torchrun, and all that it and its ranks printed."""
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, printed


def launch(*arguments: object, **options: Any) -> tuple[int, str]:
    """Start ranks, and wait for their end."""
    return finish(start(*arguments, **options))


def _main(trouble: str, arguments: list[str]) -> int:
    """Train, with `trouble` on rank 1, mostly in its third update."""
    sys.path.insert(0, str(REPOSITORY))
    if os.environ["RANK"] == "1":
        _TROUBLES[trouble]()
    from scripts.train_showcase import main

    return main(arguments)


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


def _before_third(what: Any) -> None:
    from nsa.train.loop import Trainer

    real = Trainer.fetch

    def fetch(self: Trainer, position: int) -> Any:
        if self.log.vitals.heartbeat.rank == 1 and position >= self.position(3):
            what()
        return real(self, position)

    Trainer.fetch = fetch  # type: ignore[method-assign]


def _term() -> None:
    _before_third(lambda: os.kill(os.getpid(), signal.SIGTERM))


def _lost() -> None:
    from nsa.data import SourceLost

    def lose() -> None:
        raise SourceLost("the cable was pulled")

    _before_third(lose)


def _other_config() -> None:
    os.environ["NSA_LR"] = "0.5"


def _full() -> None:
    """No file of this rank may grow beyond 100 bytes: to it, the disk is full."""
    import resource

    limits = (100, resource.RLIM_INFINITY)
    _before_third(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


_TROUBLES = {
    "nan": _nan,
    "spike": _spike,
    "term": _term,
    "lost": _lost,
    "config": _other_config,
    "full": _full,
}


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
