"""Host memory for copies of a training state, pinned and kept from one checkpoint to the next.

Of what a copy from a GPU costs, the transfer is the small part: getting pages from the system, and
giving them back while the interpreter waits, take ten times as long.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.files import explain, sweep
from nsa.records import MODEL
from nsa.records.spans import SAVE, span
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint, Content
from nsa.train.distributed.strategy import Strategy
from nsa.train.tensors import map_tensors


class HostMemory:
    """Holds one copy of a state at a time: the next one is written over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, state: Any) -> Any:
        """The same containers with copies of their tensors on the CPU; of those in parts, the part.

        Later steps leave the copies alone; the next call does not.
        """
        copied = map_tensors(state, self._copy)
        if self._kept:
            torch.cuda.current_stream().synchronize()
        return copied

    def reserve(self, state: Any) -> None:
        """Get the memory that a copy will need, at a moment when that disturbs nobody."""
        map_tensors(state, self._place)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        place = self._place(name, tensor)
        if place is tensor:
            return tensor.detach().to("cpu", copy=True)
        return place.copy_(tensor.detach(), non_blocking=True)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Where the copy of a tensor goes; itself where no memory is kept for it."""
        if not _is_kept(tensor):
            return tensor
        place = self._kept.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = self._kept[name] = _pinned_like(tensor)
        return place


def _is_kept(tensor: Tensor) -> bool:
    """Those of a CPU are copied anew, as ever; so are parts of a tensor that ranks share."""
    return tensor.is_cuda and type(tensor.detach()) is Tensor


def _pinned_like(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system pins no more: a copy to other memory is slower, and right
        return torch.empty_like(tensor, device="cpu")


# Checkpoints in the background: a step waits for the copy of the state, not for the disk.

OUR_ENDS = re.compile(r"\.(old|json)$")
"""After the name of a checkpoint: a folder that is being removed, a manifest."""


class Saver:
    """Writes one checkpoint at a time; a second one waits for the first.

    All ranks that take part do so in the same order; the first one also copies and removes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        backup: Path | None,
        say: Callable[[str], None],
        ranks: Strategy | None = None,
    ) -> None:
        self.folder, self.written = folder, list[Path]()
        self.memory = HostMemory()
        """Of the state that is being written: `wait` before it is used again."""
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the folder is still that of this run; asked on the first rank."""
        self._ranks = ranks or Strategy()
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
        name = self._ranks.checkpoint_name.format(step=content["step"])
        self._failed = True
        try:
            if not self._ranks.gathers:  # else all ranks write, and none can stay away alone
                self._require_folder()
            path = self._ranks.write_checkpoint(self.folder, content)
            self._require_folder()
            self._failed = False
            if self._ranks.is_first:
                self._tidy(path)
        except (OSError, RuntimeError) as error:  # torch wraps the errors of its file writer
            why = why_not_written(error, self.folder, num_tensor_bytes(content))
            self._problems.append(f"{name} in {self.folder}: not written: {why}")
        if self._backup is None or self._failed or not self._ranks.is_first:
            return
        try:
            find.back_up(path, self._backup)
        except (OSError, BadCheckpoint) as error:
            why = why_not_written(error, self._backup, num_tensor_bytes(content))
            self._problems.append(f"{path.name}: no copy in {self._backup}: {why}")

    def _require_folder(self) -> None:
        """Raise where files of another run could be replaced or removed."""
        if not self.is_ours():
            raise OSError("the folder was removed, or moved away, under the run")

    def _tidy(self, path: Path) -> None:
        """Remove what the new checkpoint replaces, and those that are too old."""
        self.written.append(path)
        replaced = [p for p in find.paths_of(self.folder) if p != path]
        for twin in (p for p in replaced if find.step_of(p) == find.step_of(path)):
            find.remove(twin)
        removed = find.remove_old(self.folder, self._keep)
        self.written = [p for p in self.written if p not in removed]


def new_saver(
    folder: Path, train: TrainConfig, say: Callable[[str], None], ranks: Strategy | None = None
) -> Saver:
    """The saver that a config asks for."""
    backup = Path(train.backup_dir) if train.backup_dir else None
    if ranks is None or ranks.is_first:
        for swept in (sweep(folder, ours=_is_of_a_run), sweep(backup) if backup else None):
            if swept and swept.names:
                say(f"[boot] {swept}")
    return Saver(folder, keep=train.keep_last, backup=backup, say=say, ranks=ranks)


def _is_of_a_run(name: str) -> bool:
    """What nobody but its run writes into a run folder; a backup folder may have many writers."""
    return name == MODEL or find.is_checkpoint(Path(OUR_ENDS.sub("", name)))


def why_not_written(error: BaseException, folder: Path, need_bytes: int) -> str:
    """In a line; torch hides a full disk behind errors of its own."""
    wrapped = error if isinstance(error, OSError) else OSError(str(error))
    return explain(wrapped, folder, need_bytes)


def num_tensor_bytes(content: Any) -> int:
    """Bytes of all tensors: a file of a checkpoint is a little larger, never smaller."""
    total, todo = 0, [content]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return total
