"""A Python that has imported everything: processes of the trainer within a tenth of a second.

A new interpreter spends five seconds of CPU on imports before its first step. Here one server does
that once; it forks a process for every request that comes through its socket. `Nursery.python` is
a program that takes the place of the interpreter: it hands its arguments, environment, folder and
standard files to the server, passes signals on, and ends as the forked process does. The death of
one is the death of the other. `Nursery.start` forks ranks without it, under their own pids.

Not the same as a new interpreter: modules are imported already, the parent of a process is the
server, multiprocessing forks where it would spawn, and a run leaves out what quick.py says. Tests
about any of that use sys.executable.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120
FORK = multiprocessing.get_context("fork")
LENGTH = 8
"""Bytes of the number that comes before an order, and carries the standard files."""
STUB = """\
#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
ignored = [n for n in numbers if signal.getsignal(n) == signal.SIG_IGN]
held = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
order = dict(arguments=sys.argv[1:], environ=dict(os.environ), cwd=os.getcwd(), ignored=ignored)
data = json.dumps(order).encode()
files = array.array("i", [0, 1, 2])
server.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.sendall(data)
answers = server.makefile()
pid = int(answers.readline())
for number in numbers:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_SETMASK, held)
code = int(answers.readline() or 70)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Ranks:
    """Ranks that were started, by number."""

    def __init__(self, answers: list[socket.socket], log: Path) -> None:
        self._answers, self._log = answers, log
        self._read = [b""] * len(answers)
        self.pids = [int(self._line(rank)) for rank in range(len(answers))]
        self._codes: dict[int, int] = {}

    def _line(self, rank: int) -> bytes:
        while b"\n" not in self._read[rank]:
            data = self._answers[rank].recv(64)
            assert data, "the nursery is gone"
            self._read[rank] += data
        line, _, self._read[rank] = self._read[rank].partition(b"\n")
        return line

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that has not ended."""
        assert rank not in self.codes(), f"rank {rank} has ended"
        os.kill(self.pids[rank], number)

    def codes(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended, by rank; minus the signal if one did it."""
        for rank, answer in enumerate(self._answers):
            if rank not in self._codes:
                with selectors.DefaultSelector() as ready:
                    ready.register(answer, selectors.EVENT_READ)
                    if ready.select(timeout=0):
                        self._codes[rank] = int(self._line(rank))
                        answer.close()
        return dict(self._codes)

    def finish(self, timeout_s: float = TIMEOUT_S) -> tuple[list[int], str]:
        """Wait for all, and return their exit codes and what they printed."""
        end = time.monotonic() + timeout_s
        while len(codes := self.codes()) < len(self.pids):
            if time.monotonic() > end:
                self.end()
                raise AssertionError(f"ranks hang after {timeout_s} s: {self.printed()}")
            time.sleep(0.02)
        return [codes[rank] for rank in range(len(self.pids))], self.printed()

    def end(self) -> None:
        """Kill what is left."""
        ended = self.codes()
        for rank, pid in enumerate(self.pids):
            if rank not in ended:
                with contextlib.suppress(ProcessLookupError):  # just now
                    os.kill(pid, signal.SIGKILL)

    def printed(self) -> str:
        """What they have printed so far, together."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Until they have printed something."""
        end = time.monotonic() + timeout_s
        while text not in self.printed():
            if time.monotonic() > end or len(self.codes()) == len(self.pids):
                raise AssertionError(f"never printed {text!r}: {self.printed()}")
            time.sleep(0.02)


class Nursery:
    """The server, seen from a test; used as a context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nursery"))
        self.python = self._folder / "python"
        self._path = str(self._folder / "socket")
        self.python.write_text(STUB.format(python=sys.executable, path=self._path))
        self.python.chmod(0o755)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._path, str(self.python)],
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

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
        order: dict[str, object] = {
            "arguments": [
                str(REPOSITORY / "nsa/tests/support/launch.py"),
                trouble,
                *map(str, arguments),
            ],
            "cwd": str(REPOSITORY),
            "ignored": [],
        }
        answers = []
        with open(os.devnull, "rb") as nothing, log.open("ab") as output:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                order["environ"] = dict(os.environ) | usual | environ | own
                answers.append(self._send(order, nothing.fileno(), output.fileno()))
        return Ranks(answers, log)

    def _send(self, order: dict[str, object], stdin: int, output: int) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._path)
        data = json.dumps(order).encode()
        files = array.array("i", [stdin, output, output])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        server.sendmsg([len(data).to_bytes(LENGTH, "big")], rights)
        server.sendall(data)
        return server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """Forks what it is asked for, and tells who asked when it ends."""

    def __init__(self, path: str, python: str) -> None:
        self._python = python
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._events.register(0, selectors.EVENT_READ, self._stop)
        self._children: dict[int, socket.socket] = {}
        self._is_stopped = False

    def serve(self) -> None:
        """Until stdin ends; nobody is left then."""
        while not self._is_stopped:
            for key, _ in self._events.select():
                key.data()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _stop(self) -> None:
        self._is_stopped = True

    def _accept(self) -> None:
        asker, _ = self._listener.accept()
        length, files, _, _ = socket.recv_fds(asker, LENGTH, 3)
        size, data = int.from_bytes(length, "big"), b""
        while len(data) < size:
            data += asker.recv(size - len(data))
        pid = os.fork()
        if pid == 0:
            self._events.close()
            self._listener.close()
            for connection in (asker, *self._children.values()):
                connection.close()
            become(json.loads(data), files, self._python)
        for file in files:
            os.close(file)
        asker.sendall(b"%d\n" % pid)
        self._children[pid] = asker
        ended = os.pidfd_open(pid)
        self._events.register(ended, selectors.EVENT_READ, lambda: self._reap(pid, ended))
        self._events.register(asker, selectors.EVENT_READ, lambda: self._abandon(pid))

    def _reap(self, pid: int, ended: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        asker = self._children.pop(pid)
        self._events.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):  # abandoned before
            self._events.unregister(asker)
        with contextlib.suppress(OSError):  # who asked is gone
            asker.sendall(b"%d\n" % code)
        asker.close()

    def _abandon(self, pid: int) -> None:
        """Who asked has died: so does the process."""
        if pid in self._children:
            self._events.unregister(self._children[pid])
            os.kill(pid, signal.SIGKILL)


def become(order: dict[str, Any], files: list[int], python: str) -> NoReturn:
    """In the forked process: be an interpreter with these arguments."""
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for number in order["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["cwd"])
        sys.path[:0] = filter(None, order["environ"].get("PYTHONPATH", "").split(os.pathsep))
        sys.executable = python
        if order["environ"].get("PYTHONWARNINGS") == "error":
            warnings.simplefilter("error")
        multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
        _execute(order["arguments"])
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:  # noqa: BLE001  as an interpreter does at its end
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _execute(words: list[str]) -> None:
    """What the command line of Python says: [-u] (FILE | -c CODE | -m MODULE) ARGUMENT ..."""
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        # runpy warns of a module that is there already; a package runs its __main__.
        is_package = hasattr(sys.modules.get(words[1]), "__path__")
        sys.modules.pop(f"{words[1]}.__main__" if is_package else words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _import_everything() -> None:
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.run  # noqa: F401

    import nsa.cli.__main__
    import nsa.generate.decode
    import nsa.operate.launch.command
    import nsa.operate.preflight.command
    import nsa.operate.report.command
    import nsa.parallel
    import nsa.tests.support.launch
    import nsa.train.runner  # noqa: F401
    import scripts.train_showcase  # noqa: F401
    from nsa.data.documents import read_works
    from nsa.tests.support import quick

    # What `datasets` imports; not itself, for it reads its settings from the environment then.
    for name in ("pandas", "pyarrow.parquet", "pyarrow.dataset", "fsspec"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name, value in quick.replacements().items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    quick.split_once(read_works().values())  # forked processes have it then


if __name__ == "__main__":
    server = Server(*sys.argv[1:])
    _import_everything()
    print("ready", flush=True)
    server.serve()
