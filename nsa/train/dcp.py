"""Writing and reading the parts of a checkpoint folder by torch.distributed.checkpoint (DCP).

Each part is a tensor that torch reads with `weights_only=True`; part_list.py reads their list.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nsa.leftovers import temporary_name
from nsa.train import checkpoint, sharded
from nsa.train.checkpoint import BadCheckpoint, Content
from nsa.train.nested import map_tensors
from nsa.train.part_list import check_listed, read_list
from nsa.train.sharded import METADATA, STATE, FilePrint

IN_PARTS = ("state_dict", "optimizer")
"""Keys of a content whose tensors, but for single numbers, lie in the parts."""
Made = TypeVar("Made")


def write(folder: Path, content: Content, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint folder: all ranks of the group together, without one this process alone.

    It appears under its name on all ranks, or OSError says on all of them what went wrong on one.
    """
    path = folder / sharded.NAME.format(step=content["step"])
    temporary = temporary_name(path)
    is_first = group is None or dist.get_rank(group) == 0
    rest, tensors = _split(content)

    def prepare() -> str:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            torch.save({"version": checkpoint.VERSION, **rest}, temporary / STATE)
        return temporary.name

    def write_parts() -> dict[str, FilePrint]:
        writer = _Writer(temporary)
        if group is not None:
            save(tensors, storage_writer=writer, process_group=group)
        else:
            with _alone():
                save(tensors, storage_writer=writer, no_dist=True)
        names = [*writer.names, *((STATE, METADATA) if is_first else ())]
        return {name: sharded.print_of(temporary / name) for name in names}

    def name() -> None:
        if is_first:
            files = {n: FilePrint(*f) for found in prints for n, f in found.items()}
            sharded.put_folder_in_place(temporary, path, content["step"], files)

    try:
        temporary = path.with_name(_together(prepare, group)[0])  # all write into that of the first
        prints = _together(write_parts, group)
        _together(name, group)
    except OSError:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def read_state(path: Path) -> Content:
    """The content of a folder, whose large tensors are still empty."""
    manifest = sharded.read_manifest(path)
    sharded.verify_file(path, STATE, manifest.files[STATE])
    content: Content = checkpoint.load_tensors(path / STATE)
    return checkpoint.check_content(content, path)


def fill(path: Path, content: Content, make: Callable[[Tensor], Tensor]) -> Content:
    """Put the tensors of a folder into what `read_state` gave.

    `make` gets an empty one and makes one that is read into: a whole one, or a part of this rank.
    """
    metadata, tensors = read_list(path), dict[str, Tensor]()

    def place(name: str, x: Tensor) -> Tensor:
        if not x.is_meta:
            return x
        check_listed(name, x, metadata)
        tensors[name] = make(x)
        return tensors[name]

    filled = content | {key: map_tensors(content[key], place, key) for key in IN_PARTS}
    try:
        with _alone():
            load(dict(tensors), storage_reader=_Reader(path, metadata), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {_reason(error)}; use an older checkpoint"
        ) from None
    return filled


class _Writer(FileSystemWriter):
    """Remembers the files it wrote, and keeps the paths of this machine out of the list."""

    names: tuple[str, ...] = ()

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        self.names = tuple({result.storage_data.relative_path: 0 for result in done.value()})
        return done

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)


class _Reader(FileSystemReader):
    """Reads the parts of a list that was read and checked before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _split(content: Content) -> tuple[Content, dict[str, Tensor]]:
    """What goes into state.pt, and the tensors of the parts by name."""
    tensors: dict[str, Tensor] = {}

    def take(name: str, x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x
        tensors[name] = x
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    rest = content | {key: map_tensors(content[key], take, key) for key in IN_PARTS}
    return rest, tensors


def _together(work: Callable[[], Made], group: dist.ProcessGroup | None) -> list[Made]:
    """Do it, and hear what it gave on all ranks; raise OSError on all where it failed on one."""
    made: tuple[Made | None, str]
    try:
        made = work(), ""
    except CheckpointException as error:  # DCP has told all ranks already
        made = None, _reason(error)
    except (OSError, RuntimeError) as error:
        who = "" if group is None else f"rank {dist.get_rank(group)}: "
        made = None, f"{who}{_reason(error)}"
    heard: list[Any] = [made]
    if group is not None:
        heard = [None] * dist.get_world_size(group)
        dist.all_gather_object(heard, made, group=group)
    for _, problem in heard:
        if problem:
            raise OSError(problem)
    return [one for one, _ in heard]


def _reason(error: BaseException) -> str:
    """One line; an error of DCP holds those of the ranks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(inner)}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """DCP warns where it is told to work without other ranks, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
