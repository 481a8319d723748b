"""Files of a run folder are regular files: no command follows a link in it, or waits for a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsa.cli.__main__ import main
from nsa.files import APPEND, LineFile, NotRegular, open_regular, read_text, write_text
from nsa.operate.watch.watchdog import Watch
from nsa.tests.conftest import REPOSITORY
from nsa.tests.conftest import TINY as OVERRIDES
from nsa.tests.support.recording import dead_pid
from nsa.web.source import Sources

SECRET = "hunter2-of-somebody-else"
SECONDS = 60
"""A command that takes longer waits for something that does not come."""


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "inside").write_text(SECRET)


def unix_socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": link,
    "pipe": pipe,
    "folder": folder,
    "socket": unix_socket,
}


@contextlib.contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    def over(number: int, frame: object) -> None:
        raise AssertionError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened_read_or_appended_to(tmp_path: Path, kind: str) -> None:
    outside, path = tmp_path / "outside", tmp_path / "file"
    outside.write_text(SECRET)
    KINDS[kind](path, outside)
    with in_time(5):
        for flags in (os.O_RDONLY, APPEND, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
            with pytest.raises(NotRegular, match=rf"^{path} is (a|not)"):
                open_regular(path, flags)
        lines = LineFile(path)
        lines.append("a line")
    assert lines.num_dropped == 1
    assert outside.read_text() == SECRET


def test_a_regular_file_is_read_to_its_limit_with_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\r\nb\xff")
    assert read_text(tmp_path / "x", 5) == "a\r\nb\ufffd"
    with pytest.raises(OSError, match="at most 4 are read"):
        read_text(tmp_path / "x", 4)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "y")


def test_a_link_under_the_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("theirs")
    (tmp_path / f".x.json.{os.getpid()}.tmp").symlink_to(tmp_path / "outside")
    write_text(tmp_path / "x.json", "ours")
    assert (tmp_path / "outside").read_text() == "theirs"
    assert (tmp_path / "x.json").read_text() == "ours"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with every file that commands look at."""
    path = tmp_path_factory.mktemp("run") / "run"
    config = str(REPOSITORY / "configs" / "base.yaml")
    extra = ("train.save_every=2", "train.steps=2", f"train.out_dir={path}")
    assert main(["train", "--config", config, *OVERRIDES, *extra]) == 0
    (path / "run.info").write_text("version: 1\n")
    (path / "train.log").write_text("[boot] loading config\n")
    (path / "alarms.jsonl").write_text("")
    (path / "report.json").write_text("{}")
    (path / "report.md").write_text("# report\n")
    return path


READ = (
    *("metrics.json", "env.json", "config.yaml", "training.csv", "val.csv", "alarms.jsonl"),
    *("heartbeat_rank0.jsonl", "train.log", "run.info", "report.json", "report.md", "model.pt"),
    *("checkpoint_step2.pt", "checkpoint_step2.json", ".HALT", ".anomaly_type", "selection.jsonl"),
)
"""Files of a run that some command reads."""


def dashboard(path: Path) -> int:
    sources = Sources([path])
    source = sources.get(0)
    while source.refresh():
        pass
    texts = [sources.runs(), sources.settings(), source.series(0, 1e9, 100), source.selection(10)]
    print(json.dumps([*texts, source.layers(0, 1e9, 100), source.timeline(1e9, 50)]))
    return 0


def commands(path: Path, out: Path) -> dict[str, Callable[[], int]]:
    texts = {
        "monitor": ["monitor", str(path), "--once"],
        "watch": ["watch", str(path), "--once"],
        "report": ["report", str(path)],
        "handoff": ["handoff", str(path), "--out", str(out / "handoff.tar.gz")],
        "verify": ["checkpoint", "verify", str(path)],
        "show": ["checkpoint", "show", str(path)],
        "export": ["checkpoint", "export", str(path), "--to", str(out / "x.safetensors")],
        "backup": ["checkpoint", "backup", str(path), "--to", str(out / "copies")],
        "generate": ["generate", "A", "--model", str(path), "--max-new-tokens", "1"],
    }
    found: dict[str, Callable[[], int]] = {
        name: lambda words=words: main(words)  # type: ignore[misc]
        for name, words in texts.items()
    }
    return found | {"dashboard": lambda: dashboard(path)}


SAYS = {
    "monitor": ("metrics.json", "env.json", "training.csv", "heartbeat_rank0.jsonl", ".HALT"),
    "watch": ("metrics.json", "env.json", "training.csv", "heartbeat_rank0.jsonl", ".HALT"),
    "report": ("metrics.json", "env.json", "training.csv", "val.csv", "config.yaml", "train.log"),
    "handoff": ("run.info", "train.log", "training.csv", "checkpoint_step2.pt", "env.json"),
    "dashboard": ("metrics.json", "env.json", "training.csv", "config.yaml", "selection.jsonl"),
    "verify": ("checkpoint_step2.pt",),
    "show": ("checkpoint_step2.pt",),
    "export": ("checkpoint_step2.pt",),
    "backup": ("checkpoint_step2.pt",),
    "generate": ("checkpoint_step2.pt",),
}
"""Files that each command must name where they are no regular files."""


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_no_command_follows_waits_for_or_trips_over_what_is_no_regular_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(finished, path)
    outside.write_text(f"{SECRET}\n")
    for name in READ:
        (path / name).unlink(missing_ok=True)
        KINDS[kind](path / name, outside)
    for name, command in commands(path, tmp_path).items():
        with in_time():
            code = command()
        told = "".join(capsys.readouterr())
        assert code in (0, 1, 2, 3), name
        assert SECRET not in told and "Traceback" not in told, name
        silent = [file for file in SAYS[name] if file not in told]
        assert not silent, f"{name} says nothing of {silent}:\n{told}"
    assert outside.read_text() == f"{SECRET}\n"
    assert not (tmp_path / "copies" / "checkpoint_step2.pt").exists()


def test_a_watchdog_writes_through_no_link(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(finished, path)
    content = json.loads((path / "metrics.json").read_text()) | {"status": "running"}
    (path / "metrics.json").write_text(json.dumps(content))
    beats = path / "heartbeat_rank0.jsonl"
    beats.write_text(beats.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    (path / "alarms.jsonl").unlink()
    (path / "alarms.jsonl").symlink_to(outside)
    assert Watch(path).look(now=time.time() + 60).new, "its process is gone: an alarm"
    assert not outside.exists()
    assert "links are not followed" in "".join(capsys.readouterr())


def test_what_a_user_names_may_be_a_link(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").symlink_to(finished)
    (tmp_path / "newest").symlink_to(finished / "checkpoint_step2.pt")
    (tmp_path / "model").symlink_to(finished / "model.pt")
    assert main(["monitor", str(tmp_path / "run"), "--once"]) == 0
    assert main(["checkpoint", "show", str(tmp_path / "newest")]) == 0
    words = ["--max-new-tokens", "1"]
    assert main(["generate", "A", "--model", str(tmp_path / "model"), *words]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())
