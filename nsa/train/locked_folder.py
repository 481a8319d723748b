"""The locked folder of a run, and what happens if it is removed during the run.

Rank 0 holds the lock (records/folder.py) from before it reads anything until all ranks have left.
Before each update it checks that the folder still exists. If it was removed or moved, the run
creates it again, rewrites its files, and saves a checkpoint at once. If another run has locked the
new folder, all ranks end and write nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nsa.config.env import read
from nsa.files import LineFile, complain
from nsa.records.alarms import Alarm, append_alarm
from nsa.records.folder import (
    RUN,
    STOPPING,
    STOPPING_S,
    FolderHeld,
    FolderLock,
    Say,
    not_made,
    take_lock,
)
from nsa.train.distributed.strategy import Strategy, mark_shared
from nsa.train.errors import RunRefused

RENEWED, TAKEN = 1, 2
"""What rank 0 found: the folder was removed and created again; or another run has it now."""
SETTLE_S = 1.0
"""Delay between noticing the removal and creating the folder: an `rm -r` may still be running."""
ALARM = "folder_removed"


class LockedFolder:
    """The run folder as seen by one rank; only rank 0 has the lock and checks the folder."""

    def __init__(self, path: Path, say: Say) -> None:
        self.path = path
        self.watched: Sequence[LineFile] = ()
        """Open files of the run; one that loses its name reveals a removed folder."""
        self.renewals: Sequence[Callable[[int], object]] = ()
        """Called on every rank with the update number after the folder was created again."""
        self.unsaved = False
        """Whether the checkpoints were lost with the old folder; the same on every rank."""
        self._lock: FolderLock | None = None
        self._say, self._is_new, self._failed = say, False, False
        self._lost_at: float | None = None
        self._taken: FolderHeld | None = None

    def lock(self, ranks: Strategy) -> None:
        """Lock the folder on rank 0; raise RunRefused if another run has it."""
        self._is_new = not self.path.exists()
        # torchrun restarts ranks while the previous ones may still be exiting.
        again = read("TORCHELASTIC_RESTART_COUNT") > 0
        patience_s = ranks.patience_s(STOPPING_S)
        try:
            self._lock = take_lock(self.path, say=self._say, patience_s=patience_s, waits=again)
        except FolderHeld as held:
            raise RunRefused(
                f"{held}; two runs in one folder would overwrite each other: wait until it ends, "
                f"stop it with `touch {self.path}/.HALT`, or name another folder with train.out_dir"
            ) from None
        except OSError as error:
            lock = self.path / RUN
            # Distinguish a bad lock file from a folder that cannot be created.
            if error.filename != str(lock) or not os.path.lexists(lock):
                raise not_made(self.path, error) from None
            raise RunRefused(
                f"{error.filename}, the lock of the run folder, cannot be opened "
                f"({error.strerror}); remove it if no run uses the folder, or choose another one "
                "with train.out_dir"
            ) from None

    def unlock(self) -> None:
        """Release the lock; remove a folder that was created for a run that did not start."""
        if self._lock is None:
            return
        if self._is_new and self.is_ours() and os.listdir(self.path) == [RUN]:
            self._lock.remove()
            with suppress(OSError):  # another process has put a file into it
                self.path.rmdir()
        self._lock.release()

    def is_ours(self) -> bool:
        """Whether this rank may write to the folder; ranks above 0 follow rank 0."""
        return self._lock is None or (self._taken is None and self._lock.is_there())

    def mark_stopping(self) -> None:
        """Mark the lock as stopping, so that a waiting run waits longer."""
        if self._lock is not None:
            self._lock.mark(STOPPING)

    def check(self, *, at_once: bool = False) -> int:
        """Check the folder on rank 0: 0, RENEWED or TAKEN. Costs a few lstat calls."""
        if self._lock is None or self._taken is not None:
            return TAKEN if self._taken else 0
        if self._lock.is_there() and all(file.is_there() for file in self.watched):
            self._lost_at = None
            return 0
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if now - self._lost_at < SETTLE_S and not at_once:
            return 0
        return self._renew()

    def react_to(self, seen: int, step: int) -> None:
        """React on every rank, in update `step`, to what rank 0 has seen."""
        if seen == TAKEN:
            raise self._refusal(step)
        if seen == RENEWED:
            self.unsaved = True
            for renew in self.renewals:
                renew(step)
            if self._lock is not None:
                append_alarm(self.path, self._alarm(step))

    def recreate_if_removed(self, step: int) -> None:
        """On rank 0, before the last checkpoint: if removed, create the folder without delay."""
        if self.check(at_once=True) == RENEWED:
            self.react_to(RENEWED, step + 1)

    def require_ours(self, step: int) -> None:
        """On rank 0, before the last files are written: raise if another run has the folder."""
        self.react_to(self.check(at_once=True), step + 1)

    def _renew(self) -> int:
        assert self._lock is not None
        try:
            if not self._lock.is_there():
                # No waiting: training must not stall, and a run that has the folder will keep it.
                before, self._lock = self._lock, take_lock(self.path, say=self._say, patience_s=0)
                before.release()
        except FolderHeld as held:
            self._taken = held
            return TAKEN
        except OSError as error:
            if not self._failed:
                complain(self.path, error, "was removed and cannot be created again")
            self._failed = True
            return 0
        self._lost_at, self._failed = None, False
        return RENEWED

    def _alarm(self, step: int) -> Alarm:
        text = f"{self.path} was removed or moved during the run, before update {step}"
        then = "it was created again, with full logs, new heartbeats and a checkpoint now"
        self._say(f"[folder] ALARM: {text}; {then}; the older checkpoints are gone")
        return Alarm(
            type=ALARM,
            step=step,
            text=f"{text}; {then}",
            advice="find out what removed it; older checkpoints are only in train.backup_dir, if "
            "set",
        )

    def _refusal(self, step: int) -> RunRefused:
        who = f" ({self._taken})" if self._taken else ""
        refusal = RunRefused(
            f"{self.path} was removed or moved during this run, and another run uses it "
            f"now{who}: stopped before update {step} without a checkpoint, and nothing was written "
            "there; start it again with another train.out_dir"
        )
        mark_shared(refusal)
        return refusal


@contextmanager
def locked(path: Path, say: Say) -> Iterator[Callable[[Strategy], LockedFolder]]:
    """Yield a function that locks the folder for the ranks of a run; the block's end unlocks it.

    The process group opens and closes inside the block, so the lock lasts until all ranks left.
    """
    with ExitStack() as stack:

        def enter(ranks: Strategy) -> LockedFolder:
            held = LockedFolder(path, say)
            ranks.from_rank_0(lambda: held.lock(ranks))
            stack.callback(held.unlock)
            return held

        yield enter
