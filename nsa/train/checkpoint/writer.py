"""Background writer of checkpoints: a step waits for the copy of the state to pinned host memory,
not for the disk.

The pinned memory is kept from one checkpoint to the next: allocating and freeing it takes ten times
as long as the transfer from the GPU.
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
    """Reusable host buffers for one copy of a state; the next copy overwrites it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, state: Any) -> Any:
        """The same containers with CPU copies of the tensors; of DTensors, the local shard.

        Later steps do not affect the copies, but the next call overwrites them.
        """
        copied = map_tensors(state, self._copy)
        if self._kept:
            # The copies are asynchronous: they must finish before the caller reads them.
            torch.cuda.current_stream().synchronize()
        return copied

    def reserve(self, state: Any) -> None:
        """Allocate the buffers in advance, so that the first checkpoint does not stall a step."""
        map_tensors(state, self._place)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        place = self._place(name, tensor)
        if place is tensor:
            return tensor.detach().to("cpu", copy=True)
        return place.copy_(tensor.detach(), non_blocking=True)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer for a tensor; the tensor itself if none is kept for it."""
        if not _is_kept(tensor):
            return tensor
        place = self._kept.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = self._kept[name] = _pinned_like(tensor)
        return place


def _is_kept(tensor: Tensor) -> bool:
    """Whether a pinned buffer is kept: for plain CUDA tensors, not for CPU tensors or DTensors."""
    return tensor.is_cuda and type(tensor.detach()) is Tensor


def _pinned_like(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory can be pinned: pageable memory is slower but correct
        return torch.empty_like(tensor, device="cpu")


# --- the writer thread ---

OUR_ENDS = re.compile(r"\.(old|json)$")
"""Suffixes of temporary names of ours: a folder being removed, a manifest being written."""


class Saver:
    """Writes one checkpoint at a time in a thread; a second one waits for the first.

    Under FSDP all ranks write, in the same order. Rank 0 also backs up and removes old ones.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        backup: Path | None,
        say: Callable[[str], None],
        ranks: Strategy | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_ours`: whether the folder still belongs to this run; meaningful on rank 0."""
        self.folder, self.written = folder, list[Path]()
        self.memory = HostMemory()
        """Buffers of the state being written: call `wait` before reusing them."""
        self._ranks, self._is_ours = ranks or Strategy(), is_ours
        self._keep, self._backup, self._say = keep, backup, say
        self._thread: threading.Thread | None = None
        self._problems: list[str] = []
        self._failed = False

    def save(self, content: Content) -> None:
        """Start writing a state, `Trainer.state_dict()`."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(content,), name="checkpoint")
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the write in flight; False if the last checkpoint could not be written.

        A full disk does not end the run: the previous checkpoint is intact, and the next one may
        fit. Errors are logged here, not in the thread.
        """
        if self._thread is not None:
            with span(SAVE):
                self._thread.join()
            self._thread = None
        problems, self._problems = self._problems, []
        for problem in problems:
            self._say(f"[checkpoint] {problem}; the run continues without it")
        return not self._failed

    def _write(self, content: Content) -> None:
        name = self._ranks.checkpoint_name.format(step=content["step"])
        # True until the checkpoint is complete, whatever raises in between.
        self._failed = True
        try:
            # Under FSDP the write is collective: one rank must not leave before it.
            if not self._ranks.saves_together:
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
        """Raise OSError if the folder may belong to another run by now."""
        if not self._is_ours():
            raise OSError("the folder was removed or moved during the run")

    def _tidy(self, path: Path) -> None:
        """Remove the other form of the same step, and checkpoints beyond keep_last."""
        self.written.append(path)
        # DDP writes files, FSDP folders: a step must not exist in both forms.
        replaced = [p for p in find.paths_of(self.folder) if p != path]
        for twin in (p for p in replaced if find.step_of(p) == find.step_of(path)):
            find.remove(twin)
        removed = find.remove_old(self.folder, self._keep)
        self.written = [p for p in self.written if p not in removed]


def new_saver(
    folder: Path,
    train: TrainConfig,
    say: Callable[[str], None],
    ranks: Strategy | None = None,
    is_ours: Callable[[], bool] = lambda: True,
) -> Saver:
    """The saver for a config; rank 0 first removes abandoned temporary files."""
    backup = Path(train.backup_dir) if train.backup_dir else None
    if ranks is None or ranks.is_first:
        for swept in (sweep(folder, ours=_is_of_a_run), sweep(backup) if backup else None):
            if swept and swept.names:
                say(f"[boot] {swept}")
    return Saver(folder, keep=train.keep_last, backup=backup, say=say, ranks=ranks, is_ours=is_ours)


def _is_of_a_run(name: str) -> bool:
    """Whether only the run itself writes this name. Not valid for a backup folder, which several
    runs may share."""
    return name == MODEL or find.is_checkpoint(Path(OUR_ENDS.sub("", name)))


def why_not_written(error: BaseException, folder: Path, need_bytes: int) -> str:
    """The reason in one line; torch hides a full disk behind a RuntimeError."""
    wrapped = error if isinstance(error, OSError) else OSError(str(error))
    return explain(wrapped, folder, need_bytes)


def num_tensor_bytes(content: Any) -> int:
    """Bytes of all tensors: a lower bound of the size of a checkpoint."""
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
