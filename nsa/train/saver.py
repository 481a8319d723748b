"""Checkpoints in the background: a step waits for the copy of the state, not for the disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from nsa.config import TrainConfig
from nsa.telemetry.atomic import replacing
from nsa.telemetry.spans import SAVE, span
from nsa.train import checkpoint
from nsa.train.checkpoint import BadCheckpoint, Content


class Saver:
    """Writes one checkpoint at a time; a second one waits for the first."""

    def __init__(
        self, folder: Path, *, keep: int, backup: Path | None, say: Callable[[str], None]
    ) -> None:
        self.folder, self.written = folder, list[Path]()
        self._keep, self._backup, self._say = keep, backup, say
        self._thread: threading.Thread | None = None
        self._problems: list[str] = []
        self._failed = False

    def save(self, content: Content) -> None:
        """Start to write a captured state."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(content,), name="checkpoint")
        self._thread.start()

    def wait(self) -> bool:
        """Wait for what is being written; False where no checkpoint came of it.

        A full disk does not end a run: the checkpoint before is untouched, and the next may fit.
        What went wrong is said here, not in the thread.
        """
        if self._thread is not None:
            with span(SAVE):
                self._thread.join()
            self._thread = None
        problems, self._problems = self._problems, []
        for problem in problems:
            self._say(f"[checkpoint] {problem}; the run goes on without it")
        return not self._failed

    def _write(self, content: Content) -> None:
        name = checkpoint.NAME.format(step=content["step"])
        self._failed = True
        try:
            path = checkpoint.write(self.folder, content)
            self._failed = False
            self.written.append(path)
            for old in checkpoint.remove_old(self.folder, self._keep):
                if old in self.written:
                    self.written.remove(old)
        except (OSError, RuntimeError) as error:  # torch wraps the errors of its file writer
            self._problems.append(f"{name} in {self.folder}: not written: {_first_line(error)}")
        if self._backup is None or self._failed:
            return
        try:
            back_up(path, self._backup)
        except (OSError, BadCheckpoint) as error:
            self._problems.append(f"{name}: no copy in {self._backup}: {_first_line(error)}")


def new_saver(folder: Path, train: TrainConfig, say: Callable[[str], None]) -> Saver:
    """The saver that a config asks for."""
    backup = Path(train.backup_dir) if train.backup_dir else None
    return Saver(folder, keep=train.keep_last, backup=backup, say=say)


def back_up(path: Path, folder: Path) -> Path:
    """Copy a checkpoint and its manifest elsewhere, and hold the copy to the manifest."""
    checkpoint.verify(path)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / path.name
    with replacing(copy) as temporary:
        shutil.copyfile(path, temporary)
    with replacing(checkpoint.manifest_path(copy)) as temporary:
        shutil.copyfile(checkpoint.manifest_path(path), temporary)
    checkpoint.verify(copy)
    return copy


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
