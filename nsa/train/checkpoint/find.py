"""Find, verify, read, copy and remove checkpoints in either form: the single file (file.py) or the
folder of shards (folder.py). All other modules go through this one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa.files import replacing
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.file import BadCheckpoint, Content

if TYPE_CHECKING:
    from torch import Tensor  # at run time, finding and verifying checkpoints needs no torch


class Verified(NamedTuple):
    """A checkpoint that matches its manifest."""

    step: int
    bytes: int


def paths_of(folder: Path) -> list[Path]:
    """All checkpoints in a folder, newest first, finished or not; at equal steps the file first."""
    files = [
        folder / checkpoint_file.NAME.format(step=step) for step in checkpoint_file.steps_of(folder)
    ]
    folders = [
        path
        for path in folder.glob("checkpoint_step*")
        if checkpoint_folder.PATTERN.fullmatch(path.name) and path.is_dir()
    ]
    return sorted([*files, *folders], key=step_of, reverse=True)  # stable: files stay first


def is_checkpoint(path: Path) -> bool:
    """Whether the name is that of a checkpoint, in either form."""
    return bool(
        checkpoint_file.PATTERN.fullmatch(path.name)
        or checkpoint_folder.PATTERN.fullmatch(path.name)
    )


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    name = checkpoint_file.PATTERN.fullmatch(path.name) or checkpoint_folder.PATTERN.fullmatch(
        path.name
    )
    if name is None:
        raise BadCheckpoint(
            f"{path} is not the name of a checkpoint; it must be checkpoint_step{{N}}.pt or "
            "checkpoint_step{N}"
        )
    return int(name[1])


def verify(path: Path) -> Verified:
    """Compare a checkpoint with its manifest; raise BadCheckpoint if they differ."""
    manifest = checkpoint_folder.verify(path) if _is_folder(path) else checkpoint_file.verify(path)
    return Verified(manifest.step, manifest.bytes)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has the sizes in its manifest; a hash would take seconds."""
    return (checkpoint_folder.is_complete if _is_folder(path) else checkpoint_file.is_complete)(
        path
    )


def peek(path: Path, *, verified: bool = False) -> Content:
    """Read a checkpoint; of a folder, large tensors are left on the meta device (see `fill`).

    `verified`: the shards have been compared with the manifest already.
    """
    if not _is_folder(path):
        return checkpoint_file.read(path)
    from nsa.train.checkpoint import sharded_io  # takes a second to import

    if not verified:
        checkpoint_folder.verify(path)
    return sharded_io.read_state(path)


def fill(path: Path, content: Content) -> Content:
    """Complete the result of `peek`: all tensors on the CPU."""
    if not _is_folder(path):
        return content
    from nsa.train.checkpoint import sharded_io

    return sharded_io.fill(path, content, _on_host)


def read(path: Path) -> Content:
    """Verify a checkpoint and read all of it."""
    return fill(path, peek(path))


def back_up(path: Path, folder: Path) -> Path:
    """Copy a checkpoint and its manifest to another folder, and verify the copy."""
    # Verify the source too: a damaged checkpoint must not replace a good backup.
    verify(path)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / path.name
    if path.is_dir():
        checkpoint_folder.copy(path, copy)
    else:
        with replacing(copy) as temporary:
            shutil.copyfile(path, temporary)
        with replacing(checkpoint_file.manifest_path(copy)) as temporary:
            shutil.copyfile(checkpoint_file.manifest_path(path), temporary)
    verify(copy)
    return copy


def remove_old(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all.

    Incomplete ones are neither counted nor deleted: a person should look at them.
    """
    removed: list[Path] = []
    good = 0
    for path in paths_of(folder) if keep else []:
        # Sizes only: a hash takes seconds, and it was computed when the file was written.
        if not is_complete(path):
            continue
        good += 1
        if good > keep:
            remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a checkpoint so that an interruption leaves nothing that counts as one."""
    if _is_folder(path):
        checkpoint_folder.remove(path)
    else:
        # The manifest first: without it the file does not count as a checkpoint.
        checkpoint_file.manifest_path(path).unlink(missing_ok=True)
        path.unlink()


def _is_folder(path: Path) -> bool:
    return bool(checkpoint_folder.PATTERN.fullmatch(path.name))


def _on_host(name: str, x: Tensor) -> Tensor:
    return x.new_zeros(x.shape, device="cpu")
