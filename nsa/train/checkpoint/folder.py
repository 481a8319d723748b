"""checkpoint_step{N}/: the sharded form of a checkpoint, written by all ranks in parallel.

    __{r}_0.distcp   the tensor shards of rank r, written by torch.distributed.checkpoint (DCP)
    .metadata        DCP's index of the shards, a pickle (sharded_io.py reads it safely)
    state.pt         the content of the single-file form (file.py), with meta tensors in place of
                     those in the shards
    manifest.json    version, step, bytes, and bytes and sha256 of every other file

The folder is written under a temporary name, flushed and renamed, so a folder with this name is
complete. Schema: docs/schemas/checkpoint.md.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from nsa.files import is_regular, put_in_place, read_text, temporary_name, write_text
from nsa.train.checkpoint.file import BadCheckpoint, file_sha256, require_file

VERSION = 1
NAME = "checkpoint_step{step}"
PATTERN = re.compile(r"checkpoint_step(\d+)")
MANIFEST = "manifest.json"
STATE = "state.pt"
METADATA = ".metadata"
SHARD = re.compile(r"__\d+_\d+\.distcp")


class FilePrint(NamedTuple):
    """Expected size and hash of a file."""

    bytes: int
    sha256: str


class FolderManifest(NamedTuple):
    """Expected files of a checkpoint folder."""

    step: int
    bytes: int
    files: dict[str, FilePrint]


def print_of(path: Path) -> FilePrint:
    """Size and hash of a file."""
    return FilePrint(path.stat().st_size, file_sha256(path))


def put_folder_in_place(
    temporary: Path, path: Path, step: int, files: dict[str, FilePrint]
) -> None:
    """Write the manifest and rename the folder to `path`, replacing an existing one."""
    size = sum(file.bytes for file in files.values())
    listed = {name: file._asdict() for name, file in sorted(files.items())}
    content = {"version": VERSION, "step": step, "bytes": size, "files": listed}
    write_text(temporary / MANIFEST, json.dumps(content, indent=1) + "\n")
    if path.exists():
        remove(path)
    put_in_place(temporary, path)


def copy(path: Path, to: Path) -> None:
    """Copy a folder atomically: `to` appears only when it is complete."""
    temporary = temporary_name(to)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary)
    if to.exists():
        remove(to)
    put_in_place(temporary, to)


# A crash between rename and delete leaves a temporary name, which nsa.files.sweep removes.
def remove(path: Path) -> None:
    """Delete a folder; rename it first, so that a partial folder never counts as a checkpoint."""
    doomed = temporary_name(path.with_name(f"{path.name}.old"))
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def verify(path: Path) -> FolderManifest:
    """Compare every file of a folder with the manifest; raise BadCheckpoint if they differ."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        verify_file(path, name, expected)
    return manifest


def verify_file(path: Path, name: str, expected: FilePrint) -> None:
    """Compare one file with the manifest; raise BadCheckpoint if they differ."""
    file = path / name
    if not file.exists() and not file.is_symlink():
        raise BadCheckpoint(f"{file} is missing: the folder is incomplete; use an older checkpoint")
    require_file(file)
    size = file.stat().st_size
    if size != expected.bytes:
        raise BadCheckpoint(
            f"{file} has {size} bytes, its manifest says {expected.bytes}: it was truncated or "
            "replaced; use an older checkpoint"
        )
    if file_sha256(file) != expected.sha256:
        raise BadCheckpoint(
            f"{file} does not have the sha256 of its manifest: its bytes have changed; "
            "use an older checkpoint"
        )


def read_manifest(path: Path) -> FolderManifest:
    """Read the manifest of a checkpoint folder."""
    if path.is_symlink():
        raise BadCheckpoint(
            f"{path} is a symlink, and symlinks are not followed; copy the folder there"
        )
    if not path.is_dir():
        raise BadCheckpoint(f"{path} does not exist; use a checkpoint_step{{N}} that does")
    file = path / MANIFEST
    try:
        content = json.loads(read_text(file))
        version = content["version"]
        prints = {name: FilePrint(**entry) for name, entry in content["files"].items()}
        manifest = FolderManifest(int(content["step"]), int(content["bytes"]), prints)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{path} has no {MANIFEST}: it is unfinished; use an older checkpoint"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{file} is not a manifest ({error}); use an older one") from None
    named = PATTERN.fullmatch(path.name)
    if version != VERSION or named is None or int(named[1]) != manifest.step:
        raise BadCheckpoint(
            f"{file} is of version {version!r} for step {manifest.step}, not of version {VERSION} "
            f"for {path.name}; use an older checkpoint"
        )
    # Names from the manifest are opened later, so only known patterns are allowed (no "../").
    unknown = [n for n in prints if n not in (STATE, METADATA) and not SHARD.fullmatch(n)]
    missing = [n for n in (STATE, METADATA) if n not in prints]
    if unknown or missing:
        what = f"lists {unknown[0]!r}" if unknown else f"lacks {missing[0]}"
        raise BadCheckpoint(f"{file} {what}: not written by this program; use another")
    return manifest


def is_complete(path: Path) -> bool:
    """Whether all files exist with the right size; hashes would take seconds."""
    try:
        files = read_manifest(path).files
    except BadCheckpoint:
        return False
    found = {name: path / name for name in files}
    return all(is_regular(p) and p.stat().st_size == files[n].bytes for n, p in found.items())
