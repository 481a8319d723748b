"""The commands of one lane, one after the other, each in a session of its own, and verdicts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from nsa.cli.__main__ import subcommands
from nsa.config.env import recorded
from scripts.rehearsal_report import FAIL, MISSING, PASS, Row
from scripts.surface import Command, parts_of

PRELUDE = """\
set -eo pipefail
has() {
  for _ in $(seq 900); do compgen -G "$1" > /dev/null && return; sleep 0.1; done
  echo "no $1"; false
}
ended() { for _ in $(seq 900); do kill -0 "$1" 2> /dev/null || return 0; sleep 0.1; done; false; }
"""
"""What a rehearsal may use beside the command: waiting for a file, and for the end of a process."""
KEPT = ("LANG", "TMPDIR", "PATH")
END_S = 20.0


class Lane:
    """A copy of the tree, and the environment of what runs in it."""

    def __init__(self, tree: Path, logs: Path, environ: dict[str, str]) -> None:
        self.tree, self.logs = tree, logs
        here = recorded(KEPT, ())
        path = (
            f"{tree / 'home' / 'bin'}:{tree / '.venv' / 'bin'}:{here.get('PATH', '/usr/bin:/bin')}"
        )
        self.environ = {
            **here,
            **environ,
            "PATH": path,
            "HOME": str(tree / "home"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PET_MASTER_PORT": str(_free_port()),  # of torchrun: two lanes must not meet
            "HF_DATASETS_CACHE": str(tree / "home" / "datasets"),
        }
        self._sessions: list[int] = []

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what the commands left running."""
        for session in self._sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    def run(self, command: Command) -> Row:
        """Run a command to its end, or until it has printed what it must, and judge it."""
        if missing := self._missing(command):
            return Row.of(command, verdict=MISSING, reason=f"{', '.join(missing)} does not exist")
        log = self.logs / f"{command.id}.log"
        start, began = time.perf_counter(), time.time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", PRELUDE + command.rehearsed],
                cwd=self.tree,
                env={**self.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._sessions.append(process.pid)
            code = self._wait(process, command, log)
        seconds = time.perf_counter() - start
        artifact, problems = self._problems(command, code, log, began)
        return Row.of(
            command,
            verdict=FAIL if problems else PASS,
            reason="; ".join(problems) or "as it should",
            exit_code=code,
            artifact=artifact,
            seconds=seconds,
            log=f"{self.logs.name}/{log.name}",
        )

    def _missing(self, command: Command) -> list[str]:
        known = {f"nsa {name}" for name in subcommands()}
        parts = dict.fromkeys([*parts_of(command.run), *parts_of(command.rehearsed)])
        return [p for p in parts if p not in known and not (self.tree / p).is_file()]

    def _wait(self, process: subprocess.Popen[bytes], command: Command, log: Path) -> int | None:
        """The exit code; None where the command was ended, as one that does not end must be."""
        limit_s = command.until_s or command.limit_s
        end = time.perf_counter() + limit_s
        while (code := process.poll()) is None and time.perf_counter() < end:
            if command.until_s and not _unprinted(command, log):
                break
            time.sleep(0.1)
        if code is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code

    def _problems(
        self, command: Command, code: int | None, log: Path, began: float
    ) -> tuple[str, list[str]]:
        problems = []
        if code is None and not command.until_s:
            problems.append(f"not done in {command.limit_s:g} s")
        elif code is not None and code != command.exit:
            problems.append(f"exit code {code}, not {command.exit}: {_last_line(log)}")
        problems += [f"it did not print {text!r}" for text in _unprinted(command, log)]
        found = sorted(self.tree.glob(command.artifact)) if command.artifact else []
        new = [path for path in found if path.stat().st_mtime >= began - 1]
        if command.artifact and not new:
            problems.append(f"{command.artifact} is {'old' if found else 'not there'}")
        return str(new[-1].relative_to(self.tree)) if new else "", problems


def _unprinted(command: Command, log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [wanted for wanted in command.prints if wanted not in text]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
