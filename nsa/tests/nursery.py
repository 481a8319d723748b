"""Ranks in half a second: a process that has imported everything forks them on request.

Starting two ranks by torchrun takes five seconds or more, nearly all of it imports. What is forked
here are processes like any other, with the variables that torchrun would set; tests that are about
torchrun itself use launch.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


class Ranks:
    """Ranks that were started, by number."""

    def __init__(self, nursery: Nursery, pids: list[int], log: Path) -> None:
        self._nursery, self.pids, self._log = nursery, pids, log
        self._codes: dict[int, int] = {}

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, which cannot be anybody else: its parent has not reaped it."""
        assert self.pids[rank] not in self._codes, f"rank {rank} has ended"
        os.kill(self.pids[rank], number)

    def codes(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended, by rank; minus the signal if one did it."""
        ended = self._nursery.ask({"reap": self.pids})
        self._codes |= {int(pid): code for pid, code in ended.items()}
        return {rank: self._codes[pid] for rank, pid in enumerate(self.pids) if pid in self._codes}

    def finish(self, timeout_s: float = TIMEOUT_S) -> tuple[list[int], str]:
        """Wait for all, and return their exit codes and what they printed."""
        end = time.monotonic() + timeout_s
        while len(codes := self.codes()) < len(self.pids):
            if time.monotonic() > end:
                self.end()
                raise AssertionError(f"ranks hang after {timeout_s} s: {self.printed()}")
            time.sleep(0.05)
        return [codes[rank] for rank in range(len(self.pids))], self.printed()

    def end(self) -> None:
        """Kill what is left."""
        alive = self.codes()
        for rank, pid in enumerate(self.pids):
            if rank not in alive:
                os.kill(pid, signal.SIGKILL)

    def printed(self) -> str:
        """What they have printed so far, together."""
        if not self._log.exists():
            return ""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Until they have printed something."""
        end = time.monotonic() + timeout_s
        while text not in self.printed():
            if time.monotonic() > end or len(self.codes()) == len(self.pids):
                raise AssertionError(f"never printed {text!r}: {self.printed()}")
            time.sleep(0.02)


class Nursery:
    """The process that forks; used as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started: list[Ranks] = []

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ranks in self._started:
            ranks.end()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def start(
        self,
        log: Path,
        *arguments: object,
        trouble: str = "",
        ranks: int = 2,
        port: int | None = None,
        **environ: str,
    ) -> Ranks:
        """Start ranks of the trainer over gloo, with a trouble of launch.py on rank 1."""
        usual = {"NSA_PG_TIMEOUT_MIN": "1", "NSA_TB_DISABLE": "1", "MASTER_ADDR": "127.0.0.1"}
        usual |= {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port or free_port())}
        order = {
            "log": str(log),
            "trouble": trouble,
            "arguments": [str(argument) for argument in arguments],
            "environ": [
                usual | environ | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)
            ],
        }
        self._started.append(Ranks(self, self.ask(order)["pids"], log))
        return self._started[-1]

    def ask(self, order: object) -> dict[str, Any]:
        """Send an order, and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve() -> None:
    """Obey orders from stdin until it ends."""
    import matplotlib.pyplot  # noqa: F401  everything that a rank needs, once

    import nsa.tests.launch  # noqa: F401
    import scripts.train_showcase  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            print(json.dumps(_reap(order["reap"])), flush=True)
        else:
            pids = [_fork(order, environ) for environ in order["environ"]]
            print(json.dumps({"pids": pids}), flush=True)


def _fork(order: dict[str, object], environ: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environ)
        from nsa.tests.launch import train

        arguments = order["arguments"]
        assert isinstance(arguments, list)
        code = train(str(order["trouble"]), arguments)
    except BaseException:  # noqa: BLE001  as an interpreter does at its end
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(pids: Sequence[int]) -> dict[int, int]:
    ended = {}
    for pid in pids:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # reaped before
            continue
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


if __name__ == "__main__":
    _serve()
