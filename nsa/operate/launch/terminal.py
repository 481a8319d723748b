"""Where a launch runs: in this terminal, in a tmux session, or in the background.

A running tmux server has its own, older environment. We therefore pass ours through a file with
mode 0600; the first process in the session (`become`) reads and deletes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from nsa.config.env import changed, raw, with_package
from nsa.config.load import REPOSITORY
from nsa.files import open_regular, read_text

AUTO, TMUX, BACKGROUND, FOREGROUND = "auto", "tmux", "background", "foreground"
PLACES = (AUTO, TMUX, BACKGROUND, FOREGROUND)
KEPT = ("TERM", "TMUX", "TMUX_PANE")
"""Variables kept from the tmux session instead of from the launching terminal."""
ENVIRONMENT = ".environment.json"


def choose(place: str, say: Callable[[str], None]) -> str:
    """Where to run; logs what happens when the connection breaks."""
    has_tmux = shutil.which("tmux") is not None
    if place == TMUX and not has_tmux:
        raise ValueError("--where tmux: tmux is not installed; use --where background")
    if place != AUTO:
        return place
    if raw("TMUX"):
        say("inside tmux: the launch survives a lost connection")
        return FOREGROUND
    if not sys.stdout.isatty():
        say("no terminal: running in the foreground")
        return FOREGROUND
    if has_tmux:
        return TMUX
    say("tmux is not installed: running in the foreground, until this terminal closes")
    say("use --where background to keep it running")
    return FOREGROUND


def in_tmux(session: str, command: Sequence[str], folder: Path, say: Callable[[str], None]) -> bool:
    """Run a command in a tmux session and attach to it; True if the session still exists."""
    if _exists(session):
        raise ValueError(
            f"tmux session {session!r} already exists; attach with `tmux attach -t "
            f"{session}`, end it, or choose another name with --session"
        )
    # The tmux server's PYTHONPATH may not contain this package.
    start = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {__name__} as here"
    first = [sys.executable, "-c", f"{start}; here.become(sys.argv[1], sys.argv[2:])"]
    first += [str(_write_environment(folder).resolve()), *command]
    detached = [] if sys.stdout.isatty() else ["-d"]
    say(f"running in the tmux session {session}; to return: tmux attach -t {session}")
    subprocess.run(
        ["tmux", "new-session", *detached, "-s", session, "-c", os.getcwd(), *first],
        env=with_package(),
        check=True,
    )
    return _exists(session)


def in_background(command: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
    """Start a command that outlives this terminal; its output goes to the log."""
    with open(log, "ab", opener=open_regular) as out:
        process = subprocess.Popen(
            command,
            env=with_package(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    say(f"running in the background as process {process.pid}; follow it with: tail -f {log}")


def _exists(session: str) -> bool:
    # "=" matches the exact name; otherwise tmux accepts a prefix.
    command = ["tmux", "has-session", "-t", f"={session}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _write_environment(folder: Path) -> Path:
    path = folder / ENVIRONMENT
    path.unlink(missing_ok=True)
    # O_EXCL and mode 0600 from the start: the environment may contain tokens.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(with_package(), file)
    return path


def become(file: str, command: list[str]) -> NoReturn:
    """Replace this process by a command, with the environment stored in a file."""
    path = Path(file)
    environ: dict[str, str] = json.loads(read_text(path))
    path.unlink()
    here = changed({})
    # TERM and TMUX describe the terminal inside the session.
    environ = {name: value for name, value in environ.items() if name not in KEPT}
    environ |= {name: here[name] for name in KEPT if name in here}
    os.execve(command[0], command, environ)
