"""One run in a folder: the lock, its holder, who waits for whom, and file systems without locks."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.config import Config
from nsa.records import folder as folders
from nsa.records.folder import (
    ENDED,
    LAUNCH,
    RUN,
    STOPPING,
    FolderHeld,
    Holder,
    held_by,
    read_holder,
    take_lock,
)
from nsa.train import RunRefused, run

BuildConfig = Callable[..., Config]

CHILD = """
import os, sys, time
from pathlib import Path
from nsa.records.folder import take_lock
lock = take_lock(Path(sys.argv[1]), say=print)
if sys.argv[2] == "exec":
    print(os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ), flush=True)
elif os.fork() == 0:
    print(os.getpid(), flush=True)  # by the child: it runs, so it has closed its copy
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "GRACE_S", 0.1)


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with take_lock(folder, say=pytest.fail) as lock:
        with pytest.raises(FolderHeld, match=rf"in use by process {os.getpid()} on .*, since 20"):
            take_lock(folder, say=pytest.fail)
        with take_lock(folder, LAUNCH, say=pytest.fail):
            assert isinstance(held_by(folder), Holder) and held_by(folder, LAUNCH)
        holder = read_holder(folder)
        assert holder is not None and holder.command and not holder.is_ending
        assert lock.is_there()
    assert held_by(folder) == "" and (folder / RUN).stat().st_size == folders.SIZE
    assert read_holder(folder) == dataclasses.replace(holder, state=ENDED)
    take_lock(folder, say=pytest.fail).release()


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_child_of_the_holder_does_not_keep_the_lock(tmp_path: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), how], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert isinstance(held_by(tmp_path), Holder)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives on
            assert held_by(tmp_path) == ""
            last = read_holder(tmp_path)
            assert last is not None and last.pid == process.pid and last.is_ending, "it is gone"
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("why", ["marked", "halt", "restarted"])
def test_a_holder_that_is_stopping_is_waited_for(tmp_path: Path, why: str) -> None:
    lock, said = take_lock(tmp_path, say=pytest.fail), list[str]()
    if why == "marked":
        lock.mark(STOPPING)
    elif why == "halt":
        (tmp_path / ".HALT").touch()
    with pytest.raises(FolderHeld):
        take_lock(tmp_path, say=said.append, patience_s=0.6, waits=why == "restarted")
    assert len(said) == 1 and "waiting up to 1 s for it to end" in said[0]
    timer = threading.Timer(0.4, lock.release)
    timer.start()
    take_lock(tmp_path, say=said.append, waits=why == "restarted").release()
    timer.join()


def test_a_lock_that_is_a_link_or_a_pipe_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("mine")
    folder.mkdir()
    (folder / RUN).symlink_to(target)
    (folder / LAUNCH).symlink_to(tmp_path / "missing")
    for name in (RUN, LAUNCH):
        with pytest.raises(OSError, match=r"lock"):
            take_lock(folder, name, say=pytest.fail)
        assert read_holder(folder, name) is None and held_by(folder, name) == ""
    assert target.read_text() == "mine" and not (tmp_path / "missing").exists()
    (folder / RUN).unlink()
    os.mkfifo(folder / RUN)
    with pytest.raises(OSError, match=r"regular"):
        take_lock(folder, say=pytest.fail)


@pytest.mark.parametrize("number", folders.WITHOUT_LOCKS)
def test_without_locks_the_run_goes_on_after_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with take_lock(tmp_path, say=said.append) as lock:
        assert lock.is_there() and not lock.locks and held_by(tmp_path) == ""
    assert len(said) == 1 and "WARNING: no locks on the file system" in said[0]


def test_a_lock_shows_that_its_folder_is_gone_and_a_waiter_gets_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = take_lock(folder, say=pytest.fail)
    folder.rename(tmp_path / "moved")
    assert not lock.is_there()
    take_lock(folder, say=pytest.fail).remove()
    assert not lock.is_there() and not (folder / RUN).exists()
    lock.release()


def test_a_lock_with_any_content_has_a_holder_without_a_name(tmp_path: Path) -> None:
    with take_lock(tmp_path, say=pytest.fail):
        for content in ("", "{", "[]", '{"schema": 2}', '{"pid": "x"}', "[" * 9000, "\xff"):
            (tmp_path / RUN).write_text(content, encoding="latin-1")
            assert read_holder(tmp_path) is None
        with pytest.raises(FolderHeld, match="a process that left no name"):
            take_lock(tmp_path, say=pytest.fail)


def test_a_run_does_not_touch_a_folder_that_is_held(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    cfg = tiny_config()
    folder = Path(cfg.train.out_dir)
    with take_lock(folder, say=pytest.fail):
        (folder / "training.csv").write_text("theirs")
        with pytest.raises(RunRefused, match=rf"in use by process {os.getpid()} .*\.HALT") as found:
            run(cfg, config_path="tiny.yaml")
    assert found.value.exit_code == 3
    assert sorted(os.listdir(folder)) == [RUN, "training.csv"]


def test_the_lock_ends_with_the_run_and_is_not_moved_aside(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=2")
    folder = Path(cfg.train.out_dir)
    run(cfg, config_path="tiny.yaml")
    inode, holder = (folder / RUN).stat().st_ino, read_holder(folder)
    assert holder is not None and (holder.pid, holder.state) == (os.getpid(), ENDED)
    assert held_by(folder) == ""
    run(cfg, config_path="tiny.yaml", resume="none")
    (previous,) = (folder / "previous").iterdir()
    assert (folder / RUN).stat().st_ino == inode and not (previous / RUN).exists()


def test_a_run_that_does_not_start_leaves_no_folder_and_no_lock(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("data.local_path=/nowhere", "data.dataset=fineweb_edu_local")
    with pytest.raises(ValueError, match="nowhere"):
        run(cfg, config_path="tiny.yaml")
    assert not Path(cfg.train.out_dir).exists()
