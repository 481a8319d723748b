"""The list of the parts in a checkpoint folder, `.metadata`, read so that nothing in it can run.

torch.distributed.checkpoint writes it as a pickle, and a pickle can run anything. It is read only
after its sha256 was compared with the manifest's, which finds damage, and by a reader that makes
nothing but the few classes such a list consists of, which is what protects from a folder that
somebody else has made. Then it must fit the files that the manifest names.
"""

from __future__ import annotations

import importlib
import math
import pickle
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nsa.files import open_binary
from nsa.train import sharded
from nsa.train.checkpoint import BadCheckpoint
from nsa.train.sharded import METADATA, STATE, FilePrint

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
    manifest = sharded.read_manifest(path)
    sharded.verify_file(path, METADATA, manifest.files[METADATA])
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
