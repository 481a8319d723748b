"""What test_rehearsal.py runs commands in: a copy of the repository in which everything is small.

The commands of a lane share a copy and run one after the other, each in a session of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from nsa.cli.__main__ import subcommands
from nsa.config.env import recorded
from nsa.tests.data.test_tokenizers import write_gpt2
from nsa.tests.support.hub import Hub, parquet_bytes
from nsa.tests.support.surface import REPOSITORY, Command, load, parts_of

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
DOCUMENT_LINES = 40


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

    def run(self, command: Command) -> list[str]:
        """Run a command to its end, or until it has printed what it must; what is wrong with it."""
        if missing := self._missing(command):
            return [f"{', '.join(missing)} does not exist"]
        log = self.logs / f"{command.id}.log"
        began = time.time()
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
        return self._problems(command, code, log, began)

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

    def _problems(self, command: Command, code: int | None, log: Path, began: float) -> list[str]:
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
        return problems


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


# --- the copy of the tree, and a dataset on this machine ---


def make_tree(tree: Path) -> None:
    """Copy what git knows and what is new, make the configs small, and link the environment."""
    for name in _files():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target)
    (tree / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    (tree / "artifacts").mkdir()
    (tree / "home").mkdir()
    (tree / "gpt2").mkdir()
    write_gpt2(tree / "gpt2", "vocab.json", "merges.txt")
    for path in sorted((tree / "configs").glob("*.yaml")):
        path.write_text(yaml.safe_dump(_smaller(path, tree), sort_keys=False), encoding="utf-8")
    for name, numbers in load()["rehearsal"]["constants"].items():
        (tree / name).write_text(_with_numbers(tree / name, numbers), encoding="utf-8")
    shims = tree / "home" / "bin"
    shims.mkdir()
    command = f'#!/bin/sh\nPYTHONPATH="{tree}" exec python -m nsa.cli "$@"\n'
    (shims / "nsa").write_text(command, encoding="utf-8")
    (shims / "nsa").chmod(0o755)


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [name for name in listed if name and (REPOSITORY / name).is_file()]


def _smaller(path: Path, tree: Path) -> dict[str, Any]:
    """The config with the sizes of a rehearsal, where it sets them; base.yaml sets them all."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group, values in load()["rehearsal"]["keys"].items():
        given = content.setdefault(group, {}) if path.name == "base.yaml" else content.get(group)
        for key, value in values.items():
            if given is None or (key not in given and path.name != "base.yaml"):
                continue
            given[key] = min(given.get(key, value), value)  # what is off stays off
    if content.get("data", {}).get("tokenizer") == "gpt2":
        content["data"]["tokenizer_path"] = str(tree / "gpt2")  # it would come from the network
        # A CPU without bf16 needs minutes for one step with this vocabulary.
        content.setdefault("runtime", {})["precision"] = "fp32"
    return content


def _with_numbers(path: Path, numbers: dict[str, int]) -> str:
    """The code with other values of constants; each must be there once."""
    text = path.read_text(encoding="utf-8")
    for name, value in numbers.items():
        text, found = re.subn(rf"(?m)^{name} = \d+$", f"{name} = {value}", text)
        assert found == 1, f"{path} has {found} lines `{name} = NUMBER`"
    return text


@contextmanager
def dataset() -> Iterator[Hub]:
    """FineWeb-Edu's place on the hub, on loopback, with documents of the embedded corpus."""
    texts: list[str] = []
    for path in sorted((REPOSITORY / "nsa" / "data" / "corpus").glob("*.txt"))[:4]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        starts = range(0, len(lines), DOCUMENT_LINES)
        texts += ["".join(lines[start : start + DOCUMENT_LINES]) for start in starts]
    halves = {"00000": texts[::2], "00001": texts[1::2]}
    files = {f"data/CC-MAIN-2013-20/train-{n}.parquet": parquet_bytes(t) for n, t in halves.items()}
    with Hub(files) as hub:
        yield hub
