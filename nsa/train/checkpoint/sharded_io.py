"""Write and read the shards of a checkpoint folder with torch.distributed.checkpoint (DCP), and
read DCP's index `.metadata` safely.

The index is a pickle, which can run arbitrary code. Three checks: its sha256 must match the
manifest (finds damage); a restricted unpickler creates only the few classes that an index needs
(protects from malicious folders); and it must be consistent with the files in the manifest.
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
"""Names that the index may refer to, by module."""

MALFORMED = (EOFError, AttributeError, TypeError, KeyError, IndexError, ValueError, ImportError)
"""Exceptions of unpickling a truncated or foreign pickle."""


# --- the index of the shards ---


def read_list(path: Path) -> Metadata:
    """Read the index safely; it refers only to files in the manifest."""
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
        raise BadCheckpoint(f"{path / METADATA} is not an index of shards ({reason})") from None
    return metadata


def check_listed(name: str, x: Tensor, metadata: Metadata) -> None:
    """Raise BadCheckpoint if the index has another shape, before the tensor is allocated."""
    entry = metadata.state_dict_metadata.get(name)
    given = None if not isinstance(entry, TensorStorageMetadata) else list(entry.size)
    if not isinstance(entry, TensorStorageMetadata) or given != list(x.shape):
        raise BadCheckpoint(
            f"{STATE} has {name} as {list(x.shape)}, {METADATA} as {given or 'no tensor'}: they "
            "belong to different checkpoints; use another"
        )


class _Unpickler(pickle.Unpickler):
    """Creates only the names in KNOWN."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise BadCheckpoint(
                f"{METADATA} contains {module}.{name}, which an index of shards never has"
            )
        return getattr(importlib.import_module(module), name)


def _check(metadata: Any, files: dict[str, FilePrint]) -> None:
    """Raise unless the shards cover every tensor and lie in files of the manifest."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise BadCheckpoint(f"{METADATA} is not an index of shards")
    num_bytes = 0
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise BadCheckpoint(f"{METADATA}: {name} is no tensor")
        size = math.prod(entry.size)
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != size:
            raise BadCheckpoint(f"{METADATA}: the shards of {name} do not cover {list(entry.size)}")
        num_bytes += size * entry.properties.dtype.itemsize
    # Limits what a small malicious index can make the reader allocate.
    if num_bytes > sum(file.bytes for file in files.values()):
        raise BadCheckpoint(f"{METADATA} lists {num_bytes} bytes, more than its files have")
    for index, part in metadata.storage_data.items():
        held = files.get(part.relative_path)
        if held is None or part.offset < 0 or not 0 <= part.length <= held.bytes - part.offset:
            raise BadCheckpoint(
                f"{METADATA}: {index.fqn} lies at {part.relative_path!r}, {part.offset} + "
                f"{part.length}, which is in no file of the manifest"
            )
        if getattr(part, "transform_descriptors", None):
            raise BadCheckpoint(f"{METADATA}: {index.fqn} is stored in an unknown format")


# --- writing and reading the shards ---
# DCP loads each shard with `weights_only=True`.

IN_PARTS = ("state_dict", "optimizer")
"""Keys of a content whose tensors, except scalars, are stored in the shards."""
Made = TypeVar("Made")


def write(folder: Path, content: Content, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint folder, collectively over the group; without a group, by this process.

    Either the folder is complete on return, or every rank raises OSError with the reason.
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
            with _no_dist_warning():
                save(tensors, storage_writer=writer, no_dist=True)
        names = [*writer.names, *((STATE, METADATA) if is_first else ())]
        return {name: checkpoint_folder.print_of(temporary / name) for name in names}

    def name() -> None:
        if is_first:
            files = {n: FilePrint(*f) for found in prints for n, f in found.items()}
            checkpoint_folder.put_folder_in_place(temporary, path, content["step"], files)

    try:
        # After each phase all ranks know whether it failed on one of them.
        temporary = path.with_name(_on_all_ranks(prepare, group)[0])  # the name that rank 0 chose
        prints = _on_all_ranks(write_parts, group)
        _on_all_ranks(name, group)
    except OSError:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def read_state(path: Path) -> Content:
    """The content of a folder with meta tensors in place of those in the shards."""
    manifest = checkpoint_folder.read_manifest(path)
    checkpoint_folder.verify_file(path, STATE, manifest.files[STATE])
    content: Content = checkpoint_file.load_tensors(path / STATE)
    return checkpoint_file.check_content(content, path)


def fill(path: Path, content: Content, make: Callable[[str, Tensor], Tensor]) -> Content:
    """Read the tensors of a folder into the content from `read_state`.

    `make` gets a name and a meta tensor, and allocates the destination: a full tensor, or this
    rank's shard.
    """
    metadata, tensors = read_list(path), dict[str, Tensor]()

    def place(name: str, x: Tensor) -> Tensor:
        if not x.is_meta:
            return x
        check_listed(name, x, metadata)
        tensors[name] = make(name, x)
        return tensors[name]

    filled = content | {key: map_tensors(content[key], place, key) for key in IN_PARTS}
    try:
        with _no_dist_warning():
            # no_dist: each rank reads its shards on its own.
            load(dict(tensors), storage_reader=_Reader(path, metadata), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {_reason(error)}; use an older checkpoint"
        ) from None
    return filled


class _Writer(FileSystemWriter):
    """Records the files it wrote, and keeps local paths out of the index."""

    names: tuple[str, ...] = ()

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        self.names = tuple({result.storage_data.relative_path: 0 for result in done.value()})
        return done

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)


class _Reader(FileSystemReader):
    """Uses an index that has been read and checked already, instead of unpickling it."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _split(content: Content) -> tuple[Content, dict[str, Tensor]]:
    """The content of state.pt, and the tensors for the shards by name."""
    tensors: dict[str, Tensor] = {}

    def take(name: str, x: Tensor) -> Tensor:
        # Scalars, such as the step counts of AdamW, stay in state.pt.
        if x.ndim == 0:
            return x
        tensors[name] = x
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    rest = content | {key: map_tensors(content[key], take, key) for key in IN_PARTS}
    return rest, tensors


def _on_all_ranks(work: Callable[[], Made], group: dist.ProcessGroup | None) -> list[Made]:
    """Run `work` and gather the results of all ranks; if it fails on one, raise OSError on all."""
    made: tuple[Made | None, str]
    try:
        made = work(), ""
    except CheckpointException as error:  # DCP raises it on all ranks, with the rank's name
        made = None, _reason(error)
    except (OSError, RuntimeError) as error:
        who = "" if group is None else f"rank {dist.get_rank(group)}: "
        made = None, f"{who}{_reason(error)}"
    gathered: list[Any] = [made]
    if group is not None:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, made, group=group)
    for _, problem in gathered:
        if problem:
            raise OSError(problem)
    return [one for one, _ in gathered]


def _reason(error: BaseException) -> str:
    """One line; a DCP error wraps the errors of the ranks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(inner)}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _no_dist_warning() -> Iterator[None]:
    """Silence DCP's warning about no_dist=True, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
