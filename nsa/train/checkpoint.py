"""checkpoint_step{N}.pt and checkpoint_step{N}.json: all that a run needs to go on unchanged.

Schema of the .pt, version 1, a dict that loads with `torch.load(..., weights_only=True)`:

    version      1
    step         optimizer updates done
    state_dict   the weights, on the CPU
    cfg          the resolved config as plain dicts
    identity     what decides the numbers of the run (identity.py)
    batch        `world_size`: ranks that wrote it; `rows_of_rank`: rows of an update that the
                 config asked for on each, before accumulation was changed; absent in older files
    optimizer    its state_dict
    scaler       that of the loss scaling; empty where there is none
    rng          states of torch's generators: `cpu`, and `cuda` for every device
    spikes       recent losses, and the data that was jumped over; absent in older files
    data         `position`: rows consumed; `source`: what its source needs to go on from there
    tokens_seen  tokens trained on
    metrics      the counters of metrics.json that go on

The .json beside it is the manifest: version, file, step, bytes, sha256. It is written after the
file, so a checkpoint without one is not finished and does not count. The same content in parts,
as ranks write it that share a model out, is in sharded.py; shelf.py has both forms.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from nsa.telemetry.atomic import replacing, write_text

VERSION = 1
NAME = "checkpoint_step{step}.pt"
PATTERN = re.compile(r"checkpoint_step(\d+)\.pt")
CHUNK = 1 << 22
KEYS = (
    *("state_dict", "cfg", "identity", "optimizer", "scaler", "rng", "data"),
    *("tokens_seen", "metrics"),
)

Content = dict[str, Any]


class Manifest(NamedTuple):
    """What a checkpoint must be, bit by bit."""

    file: str
    step: int
    bytes: int
    sha256: str


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


def write(folder: Path, content: Content) -> Path:
    """Write a checkpoint and its manifest; neither name ever holds half a file."""
    import torch  # to verify a checkpoint takes none of it

    path = folder / NAME.format(step=content["step"])
    with replacing(path) as temporary:
        torch.save({"version": VERSION, **content}, temporary)
        size, digest = temporary.stat().st_size, file_sha256(temporary)
    manifest = Manifest(path.name, content["step"], size, digest)
    write_text(manifest_path(path), json.dumps({"version": VERSION, **manifest._asdict()}) + "\n")
    return path


def read(path: Path) -> Content:
    """Read a checkpoint that has been verified."""
    import torch

    verify(path)
    return check_content(torch.load(path, map_location="cpu", weights_only=True), path)


def check_content(content: Content, path: Path) -> Content:
    """Raise BadCheckpoint where what was read from `path` is not what this program resumes from."""
    version = content.get("version") if isinstance(content, dict) else None
    missing = [key for key in KEYS if version == VERSION and key not in content]
    if version != VERSION or missing:
        lack = f"lacks {', '.join(missing)}" if missing else f"has version {version!r}"
        raise BadCheckpoint(
            f"{path} {lack}; this program resumes from version {VERSION}, whole; "
            "resume with the program that wrote it, or start anew with --resume none"
        )
    return content


def verify(path: Path) -> Manifest:
    """Hold a checkpoint to its manifest; raise BadCheckpoint where they differ."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} does not exist; name a checkpoint_step{{N}}.pt that does")
    manifest = read_manifest(path)
    size = path.stat().st_size
    if size != manifest.bytes:
        raise BadCheckpoint(
            f"{path} has {size} bytes, its manifest says {manifest.bytes}: it was cut or replaced; "
            "use an older checkpoint"
        )
    if file_sha256(path) != manifest.sha256:
        raise BadCheckpoint(
            f"{path} does not have the sha256 of its manifest: its bytes have changed; "
            "use an older checkpoint"
        )
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    beside = manifest_path(path)
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
        version, fields = content.pop("version"), Manifest(**content)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{path} has no manifest {beside.name}: it was not finished; use an older checkpoint"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{beside} is not a manifest ({error}); use an older one") from None
    if version != VERSION or fields.file != path.name:
        raise BadCheckpoint(
            f"{beside} is of version {version!r} for {fields.file!r}, not of version {VERSION} "
            f"for {path.name!r}; use an older checkpoint"
        )
    return fields


def manifest_path(path: Path) -> Path:
    """Where the manifest of a checkpoint lies."""
    return path.with_suffix(".json")


def steps_of(folder: Path) -> list[int]:
    """Steps of the checkpoint files in a folder, newest first, finished or not."""
    names = (PATTERN.fullmatch(file.name) for file in folder.glob("checkpoint_step*.pt"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


def is_complete(path: Path) -> bool:
    """Whether the file has the size of its manifest; its hash takes seconds."""
    try:
        return read_manifest(path).bytes == path.stat().st_size
    except (BadCheckpoint, FileNotFoundError):
        return False


def file_sha256(path: Path) -> str:
    """Hash a file without reading it whole."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
