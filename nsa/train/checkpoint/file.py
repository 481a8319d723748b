"""checkpoint_step{N}.pt and its manifest checkpoint_step{N}.json: everything needed for an exact
resume, in a single file. folder.py has the sharded form; find.py handles both.

Schema of the .pt, version 1, a dict that loads with `torch.load(..., weights_only=True)`:

    version      1
    step         optimizer updates done
    state_dict   the weights, on the CPU
    cfg          the resolved config as plain dicts
    identity     settings and data that determine the losses (identity.py)
    batch        `world_size`: data parallel ranks that wrote it; `rows_of_rank`: configured rows
                 per update and rank, before accumulation was adjusted; absent in older files
    optimizer    state_dict of the optimizer
    scaler       state_dict of the GradScaler; empty without loss scaling
    rng          states of torch's generators: `cpu`, and `cuda` for every device
    spikes       recent losses, and the amount of data skipped; absent in older files
    data         `position`: rows consumed; `source`: what the source needs to resume there
    tokens_seen  tokens trained on
    metrics      the counters of metrics.json that a resumed run continues

The manifest holds version, file, step, bytes and sha256. It is written after the .pt, so a
checkpoint without a manifest is unfinished and ignored.
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

from nsa.files import is_regular, open_binary, read_text, replacing, staying_in, write_text

VERSION = 1
NAME = "checkpoint_step{step}.pt"
PATTERN = re.compile(r"checkpoint_step(\d+)\.pt")
CHUNK = 1 << 22
KEYS: dict[str, type] = {
    **dict.fromkeys(("step", "tokens_seen"), int),
    **dict.fromkeys(("state_dict", "cfg", "identity", "optimizer", "scaler"), dict),
    **dict.fromkeys(("rng", "data", "metrics"), dict),
}
"""Required keys and their types."""
UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(AssertionError, ArithmeticError, ImportError, MemoryError, struct.error),
    *(pickle.UnpicklingError, zipfile.BadZipFile),
)
"""Exceptions that torch.load raises on damaged, foreign or malicious files."""

Content = dict[str, Any]


class Manifest(NamedTuple):
    """Expected size and hash of a checkpoint file."""

    file: str
    step: int
    bytes: int
    sha256: str


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


class Unreadable(BadCheckpoint):
    """A file that torch.save did not write, or that holds more than tensors."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read ({reason}); use another file")
        self.reason = reason


def write(folder: Path, content: Content) -> Path:
    """Write a checkpoint, then its manifest, each atomically.

    If the folder is moved meanwhile, both go with it: the new one may belong to another run.
    """
    import torch  # imported here because `verify` must not need it

    name = NAME.format(step=content["step"])
    with staying_in(folder) as same:
        with replacing(same / name) as temporary:
            # Hash before the rename: if it fails, no file appears under the final name.
            torch.save({"version": VERSION, **content}, temporary)
            size, digest = temporary.stat().st_size, file_sha256(temporary)
        manifest = {"version": VERSION, **Manifest(name, content["step"], size, digest)._asdict()}
        write_text(manifest_path(same / name), json.dumps(manifest) + "\n")
    return folder / name


def read(path: Path) -> Content:
    """Verify a checkpoint and read it."""

    verify(path)
    return check_content(load_tensors(path), path)


def load_tensors(path: Path, *, sums: bool = False) -> Any:
    """Read a torch.save file that holds only tensors and plain containers; raise Unreadable.

    No code in the file can run. The message never suggests `weights_only=False`, as torch's does.
    `sums`: check the CRCs of the zip archive first, for files without a manifest.
    """
    import torch

    try:
        with open_binary(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about foreign pickles
            if sums:
                _check_sums(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise Unreadable(path, _why_unreadable(error)) from None


def _check_sums(file: IO[bytes]) -> None:
    """Check the CRCs of the archive members: torch writes them but does not check them."""
    if zipfile.is_zipfile(file):  # torch.load reports anything else
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the bytes of {damaged} have changed")
    file.seek(0)


def _why_unreadable(error: BaseException) -> str:
    """One line of our own: torch's message recommends weights_only=False for unsafe files."""
    text = str(error)
    # torch names the class or function that it refused to load.
    if asked := re.search(r"(?:GLOBAL|class|function) ([\w.]+)", text):
        return f"it contains {asked[1]}, which is not a tensor and could run code when loaded"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    told = isinstance(error, OSError | RuntimeError | ValueError | zipfile.BadZipFile)
    if not told or "weights_only" in text:
        return "it contains more than tensors, or is damaged"
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def check_content(content: Content, path: Path) -> Content:
    """Raise BadCheckpoint if the version is unknown or required keys are missing."""
    version = content.get("version") if isinstance(content, dict) else None
    missing = [
        key
        for key, kind in KEYS.items()
        if version == VERSION and not isinstance(content.get(key), kind)
    ]
    # Check now: load_state_dict would fail later with a worse message.
    if version == VERSION and not missing:
        missing = [f"state_dict.{n}" for n, x in content["state_dict"].items() if not _is_tensor(x)]
    if version != VERSION or missing:
        lack = f"lacks {', '.join(missing[:5])}" if missing else f"has version {version!r:.40}"
        raise BadCheckpoint(
            f"{path} {lack}; this program resumes from complete checkpoints of version {VERSION}; "
            "resume with the program that wrote it, or start over with --resume none"
        )
    return content


def verify(path: Path) -> Manifest:
    """Compare a checkpoint with its manifest; raise BadCheckpoint if they differ."""
    require_file(path)
    manifest = read_manifest(path)
    size = path.stat().st_size
    if size != manifest.bytes:  # cheap, and a clearer message for truncated files
        raise BadCheckpoint(
            f"{path} has {size} bytes, its manifest says {manifest.bytes}: it was truncated or "
            "replaced; use an older checkpoint"
        )
    if file_sha256(path) != manifest.sha256:
        raise BadCheckpoint(
            f"{path} does not have the sha256 of its manifest: its bytes have changed; "
            "use an older checkpoint"
        )
    return manifest


def require_file(path: Path) -> None:
    """Raise BadCheckpoint unless `path` is a readable regular file; symlinks are refused."""
    if path.is_symlink():
        raise BadCheckpoint(
            f"{path} is a symlink, and symlinks are not followed; copy the file there"
        )
    if not is_regular(path):
        there = "is not a regular file" if path.exists() else "does not exist"
        raise BadCheckpoint(f"{path} {there}; use a checkpoint that exists")
    try:
        open_binary(path).close()
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({error.strerror}); read it as its owner, or copy it"
        ) from None


def named_by_user(path: Path) -> Path:
    """Resolve a path that a user gave: unlike names found in a folder, it may be a symlink."""
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
            f"{path} has no manifest {beside.name}: it is unfinished; use an older checkpoint"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{beside} is not a manifest ({error}); use an older one") from None
    # The manifest names its file, so that a manifest of another checkpoint is detected.
    if version != VERSION or fields.file != path.name:
        raise BadCheckpoint(
            f"{beside} is of version {version!r} for {fields.file!r}, not of version {VERSION} "
            f"for {path.name!r}; use an older checkpoint"
        )
    return fields


def manifest_path(path: Path) -> Path:
    """The path of a checkpoint's manifest."""
    return path.with_suffix(".json")


def steps_of(folder: Path) -> list[int]:
    """Steps of the checkpoint files in a folder, newest first, finished or not."""
    names = (PATTERN.fullmatch(file.name) for file in folder.glob("checkpoint_step*.pt"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


def is_complete(path: Path) -> bool:
    """Whether the file has the size in its manifest; a hash would take seconds."""
    try:
        return read_manifest(path).bytes == path.lstat().st_size
    except (BadCheckpoint, FileNotFoundError):
        return False


def file_sha256(path: Path) -> str:
    """Hash a file in chunks of CHUNK bytes."""
    digest = hashlib.sha256()
    with open_binary(path) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
