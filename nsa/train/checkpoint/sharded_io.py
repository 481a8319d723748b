"""The list of the parts in a checkpoint folder, `.metadata`, read so that nothing in it can run.

torch.distributed.checkpoint writes it as a pickle, and a pickle can run anything. It is read only
after its sha256 was compared with the manifest's, which finds damage, and by a reader that makes
nothing but the few classes such a list consists of, which is what protects from a folder that
somebody else has made. Then it must fit the files that the manifest names.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nsa.files import open_binary, temporary_name
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.file import BadCheckpoint, Content
from nsa.train.checkpoint.folder import METADATA, STATE, FilePrint
from nsa.train.tensors import map_tensors

KNOWN = {
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "int64", "uint8"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
"""All that a list of parts may be made of, by module."""

MALFORMED = (EOFError, AttributeError, TypeError, KeyError, IndexError, ValueError, ImportError)
"""What a pickle raises that is cut, or is of something else."""


def read_list(path: Path) -> Metadata:
    """The list of parts, by _Unpickler; it names no file but those of the manifest."""
    manifest = checkpoint_folder.read_manifest(path)
    checkpoint_folder.verify_file(path, METADATA, manifest.files[METADATA])
    try:
        with open_binary(path / METADATA) as file:
            metadata = _Unpickler(file).load()
        _check(metadata, manifest.files)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}; use another checkpoint") from None
    except (*MALFORMED, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadCheckpoint(f"{path / METADATA} is no list of parts ({reason})") from None
    return metadata


def check_listed(name: str, x: Tensor, metadata: Metadata) -> None:
    """Raise where the list has another tensor of that name: before its size is allocated."""
    entry = metadata.state_dict_metadata.get(name)
    given = None if not isinstance(entry, TensorStorageMetadata) else list(entry.size)
    if not isinstance(entry, TensorStorageMetadata) or given != list(x.shape):
        raise BadCheckpoint(
            f"{STATE} has {name} as {list(x.shape)}, {METADATA} as {given or 'no tensor'}: they "
            "are not of one checkpoint; use another"
        )


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what KNOWN names."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise BadCheckpoint(f"{METADATA} asks for {module}.{name}, which is not part of a list")
        return getattr(importlib.import_module(module), name)


def _check(metadata: Any, files: dict[str, FilePrint]) -> None:
    """Every tensor is covered by its parts, and every part lies in a file of the manifest."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise BadCheckpoint(f"{METADATA} is no list of parts")
    num_bytes = 0
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise BadCheckpoint(f"{METADATA}: {name} is no tensor")
        size = math.prod(entry.size)
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != size:
            raise BadCheckpoint(f"{METADATA}: the parts of {name} do not make {list(entry.size)}")
        num_bytes += size * entry.properties.dtype.itemsize
    if num_bytes > sum(file.bytes for file in files.values()):
        raise BadCheckpoint(f"{METADATA} lists {num_bytes} bytes, more than its files hold")
    for index, part in metadata.storage_data.items():
        held = files.get(part.relative_path)
        if held is None or part.offset < 0 or not 0 <= part.length <= held.bytes - part.offset:
            raise BadCheckpoint(
                f"{METADATA}: {index.fqn} lies at {part.relative_path!r}, {part.offset} + "
                f"{part.length}, which is in no file of the manifest"
            )
        if getattr(part, "transform_descriptors", None):
            raise BadCheckpoint(f"{METADATA}: {index.fqn} is stored in a way of another program")


# Writing and reading the parts of a checkpoint folder by torch.distributed.checkpoint (DCP).
#
# Each part is a tensor that torch reads with `weights_only=True`; the list is read above.

IN_PARTS = ("state_dict", "optimizer")
"""Keys of a content whose tensors, but for single numbers, lie in the parts."""
Made = TypeVar("Made")


def write(folder: Path, content: Content, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint folder: all ranks of the group together, without one this process alone.

    It appears under its name on all ranks, or OSError says on all of them what went wrong on one.
    """
    path = folder / checkpoint_folder.NAME.format(step=content["step"])
    temporary = temporary_name(path)
    is_first = group is None or dist.get_rank(group) == 0
    rest, tensors = _split(content)

    def prepare() -> str:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            torch.save({"version": checkpoint_file.VERSION, **rest}, temporary / STATE)
        return temporary.name

    def write_parts() -> dict[str, FilePrint]:
        writer = _Writer(temporary)
        if group is not None:
            save(tensors, storage_writer=writer, process_group=group)
        else:
            with _alone():
                save(tensors, storage_writer=writer, no_dist=True)
        names = [*writer.names, *((STATE, METADATA) if is_first else ())]
        return {name: checkpoint_folder.print_of(temporary / name) for name in names}

    def name() -> None:
        if is_first:
            files = {n: FilePrint(*f) for found in prints for n, f in found.items()}
            checkpoint_folder.put_folder_in_place(temporary, path, content["step"], files)

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
    manifest = checkpoint_folder.read_manifest(path)
    checkpoint_folder.verify_file(path, STATE, manifest.files[STATE])
    content: Content = checkpoint_file.load_tensors(path / STATE)
    return checkpoint_file.check_content(content, path)


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
