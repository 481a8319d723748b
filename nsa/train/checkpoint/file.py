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
as ranks write it that share a model out, is in folder.py; find.py has both forms.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from nsa.files import is_regular, open_binary, read_text, replacing, write_text

VERSION = 1
NAME = "checkpoint_step{step}.pt"
PATTERN = re.compile(r"checkpoint_step(\d+)\.pt")
CHUNK = 1 << 22
KEYS: dict[str, type] = {
    **dict.fromkeys(("step", "tokens_seen"), int),
    **dict.fromkeys(("state_dict", "cfg", "identity", "optimizer", "scaler"), dict),
    **dict.fromkeys(("rng", "data", "metrics"), dict),
}
"""What every checkpoint has, and its type."""
UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(AssertionError, ArithmeticError, ImportError, MemoryError, struct.error),
    *(pickle.UnpicklingError, zipfile.BadZipFile),
)
"""Whatever torch raises on a file that is damaged, foreign or made to do harm."""

Content = dict[str, Any]


class Manifest(NamedTuple):
    """What a checkpoint must be, bit by bit."""

    file: str
    step: int
    bytes: int
    sha256: str


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


class Unreadable(BadCheckpoint):
    """A file that torch.save has not written, or that holds more than tensors."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read ({reason}); use another file")
        self.reason = reason


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

    verify(path)
    return check_content(load_tensors(path), path)


def load_tensors(path: Path, *, sums: bool = False) -> Any:
    """Read what torch.save has written, if it is made of tensors and plain containers alone.

    Nothing in it can run. BadCheckpoint says what is wrong, and never how to read it all the same.
    `sums`: hold the archive to its own sums first, where there is no manifest to hold it to.
    """
    import torch

    try:
        with open_binary(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickles that are not its own
            if sums:
                _check_sums(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise Unreadable(path, _why_unreadable(error)) from None


def _check_sums(file: IO[bytes]) -> None:
    """Hold the parts of the archive to their sums, which torch writes and does not read."""
    if zipfile.is_zipfile(file):  # of anything else torch knows what to say
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the bytes of {damaged} have changed")
    file.seek(0)


def _why_unreadable(error: BaseException) -> str:
    """In a line of our own: torch advises to read unsafe files by weights_only=False."""
    text = str(error)
    if asked := re.search(r"(?:GLOBAL|class|function) ([\w.]+)", text):
        return f"it asks for {asked[1]}: more than tensors, and it could run a program when read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    told = isinstance(error, OSError | RuntimeError | ValueError | zipfile.BadZipFile)
    if not told or "weights_only" in text:
        return "it holds more than tensors, or is damaged"
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def check_content(content: Content, path: Path) -> Content:
    """Raise BadCheckpoint where what was read from `path` is not what this program resumes from."""
    version = content.get("version") if isinstance(content, dict) else None
    missing = [
        key
        for key, kind in KEYS.items()
        if version == VERSION and not isinstance(content.get(key), kind)
    ]
    if version == VERSION and not missing:
        missing = [f"state_dict.{n}" for n, x in content["state_dict"].items() if not _is_tensor(x)]
    if version != VERSION or missing:
        lack = f"lacks {', '.join(missing[:5])}" if missing else f"has version {version!r:.40}"
        raise BadCheckpoint(
            f"{path} {lack}; this program resumes from version {VERSION}, whole; "
            "resume with the program that wrote it, or start anew with --resume none"
        )
    return content


def verify(path: Path) -> Manifest:
    """Hold a checkpoint to its manifest; raise BadCheckpoint where they differ."""
    require_file(path)
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


def require_file(path: Path) -> None:
    """Raise BadCheckpoint unless a regular file is there: a link could lead anywhere."""
    if path.is_symlink():
        raise BadCheckpoint(f"{path} is a link, and links are not followed; copy the file there")
    if not is_regular(path):
        there = "is not a regular file" if path.exists() else "does not exist"
        raise BadCheckpoint(f"{path} {there}; name a checkpoint that is there")
    try:
        open_binary(path).close()
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({error.strerror}); read it as its owner, or copy it"
        ) from None


def named_by_user(path: Path) -> Path:
    """A path that a user gave may be a link; what it leads to is the checkpoint."""
    return path.resolve() if path.is_symlink() else path


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    beside = manifest_path(path)
    try:
        content = json.loads(read_text(beside))
        version, fields = content.pop("version"), Manifest(**content)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{path} has no manifest {beside.name}: it was not finished; use an older checkpoint"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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
        return read_manifest(path).bytes == path.lstat().st_size
    except (BadCheckpoint, FileNotFoundError):
        return False


def file_sha256(path: Path) -> str:
    """Hash a file without reading it whole."""
    digest = hashlib.sha256()
    with open_binary(path) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
