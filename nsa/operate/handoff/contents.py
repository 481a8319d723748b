"""Contents of a handoff archive: the manifest (writer and reader) and the search for its files.

Schema of manifest.json, version 1: the fields of Manifest; `files` and `missing` are lists of
Entry and Missing. It stores no timestamp, so that the archive is reproducible.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from nsa.config.load import REPOSITORY
from nsa.files import open_binary
from nsa.operate.handoff.redact import hide
from nsa.operate.run_files import find_run_info, require_types
from nsa.operate.run_folder import read_run
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint, manifest_path

VERSION = 1
SCHEMA = "nsa-handoff"
MANIFEST_FILE = "manifest.json"
PREFIX = "handoff/"
"""Prefix of every name in the archive."""
ITEMS = {
    # The keys are stored in manifests: renaming one changes the schema.
    "run_info": "run.info: config, GPUs and their memory, how it was launched",
    "train_log": "train.log: what the run printed",
    "training_csv": "training.csv: loss, rate and speed",
    "checkpoint": "the newest checkpoint that matches its manifest",
    "machine": "GPU model and launch details, as the run recorded them",
    "success": "the report: success criteria met, or deviations with their times",
    "altered": "the resolved config, and files that differ from the commit",
}
"""The checklist: items that the next operator needs."""


# --- manifest.json ---


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file of the archive."""

    item: str
    """One of ITEMS."""
    path: str
    """Path in the archive, below PREFIX."""
    source: str
    """Original path, relative to the parent of the run folder, or only the file name."""
    bytes: int
    """Size in the archive, after redaction."""
    sha256: str
    redacted: int = 0
    """Number of secrets replaced by ***."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A checklist item that was not found."""

    item: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of an archive."""

    schema: str = SCHEMA
    version: int = VERSION
    run: str
    """Name of the run folder."""
    status: str | None = None
    """Status in metrics.json; `died` if that is `running` and the processes are gone."""
    step: int | None = None
    files: list[Entry] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Deterministic JSON: sorted keys, fixed indentation."""
    return (json.dumps(dataclasses.asdict(manifest), indent=2, sort_keys=True) + "\n").encode()


def read_manifest(content: bytes) -> Manifest:
    """Parse manifest.json; raises ValueError with the reason for anything else."""
    try:
        found: dict[str, Any] = json.loads(content)
        if (found.get("schema"), found.get("version")) != (SCHEMA, VERSION):
            raise ValueError(
                f"{MANIFEST_FILE} is of {found.get('schema')!r:.40} "
                f"version {found.get('version')!r:.20}; "
                f"this program reads {SCHEMA} version {VERSION}; use the program that wrote it"
            )
        files = [Entry(**entry) for entry in found.pop("files")]
        missing = [Missing(**entry) for entry in found.pop("missing")]
        manifest = Manifest(**found, files=files, missing=missing)
        for record in (manifest, *manifest.files, *manifest.missing):
            require_types(record, MANIFEST_FILE)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{MANIFEST_FILE} is not a manifest of a handoff ({error!s:.200})"
        ) from None
    for entry in manifest.files:
        if not is_safe(entry.path):
            raise ValueError(
                f"{MANIFEST_FILE} names {entry.path!r:.80}, which is not a plain relative path"
            )
    return manifest


def is_safe(name: str) -> bool:
    """Whether a path stays below its extraction folder."""
    parts = name.split("/")
    return bool(re.fullmatch(r"[\w. @+=/-]+", name)) and not {"", ".", ".."} & set(parts)


# --- collecting files from the run folder and the launch records ---

LOGS = ("train.log", "production.log")
REPORTS = ("report.md", "report.json")


class Source(NamedTuple):
    """A file to pack; already open, so that it cannot be swapped after the checks."""

    item: str
    path: str
    origin: Path
    file: IO[bytes]
    is_text: bool


class Collection:
    """The checklist items that were found and opened, and those that are missing."""

    def __init__(self, folder: Path, open_files: ExitStack) -> None:
        self.folder, self.open_files = folder, open_files
        self.sources: list[Source] = []
        self.missing: list[Missing] = []
        self.run = read_run(folder)

    def collect(self, run_info: Path | None, report: Path | None) -> None:
        """Look for every item, in checklist order."""
        info = run_info or find_run_info(self.folder)
        text = self._run_info(info)
        logs = [info.parent / LOGS[0]] if info else []
        self._first("train_log", [*logs, *(self.folder / name for name in LOGS)])
        self._first("training_csv", [self.folder / "training.csv"])
        self._checkpoint()
        self._first("machine", [self.folder / "env.json"])
        places = [report] if report else [self.folder, *([info.parent] if info else [])]
        self._success(places)
        self._altered(text)
        order = list(ITEMS)
        self.sources.sort(key=lambda source: (order.index(source.item), source.path))

    def _run_info(self, info: Path | None) -> str:
        if info is None:
            self._miss("run_info", f"no run.info names {self.folder}; name it with --run-info")
            return ""
        source = self._add("run_info", info, "run.info")
        if source is None:
            return ""
        text = source.file.read(1 << 20).decode("utf-8", "replace")
        source.file.seek(0)
        return text

    def _first(self, item: str, paths: list[Path]) -> None:
        for path in paths:
            # A dangling symlink counts as found, so that `_add` reports why it cannot be opened.
            if path.is_symlink() or path.exists():
                self._add(item, path, "train.log" if item == "train_log" else path.name)
                return
        self._miss(item, f"none of {', '.join(map(str, paths))} exists")

    def _checkpoint(self) -> None:
        reasons = []
        # Newest first; fall back to older checkpoints until one is intact and free of secrets.
        for path in find.paths_of(self.folder):
            try:
                if path.is_symlink():
                    raise BadCheckpoint(f"{path} is a symlink, and symlinks are not followed")
                find.verify(path)
                files = sorted(path.iterdir()) if path.is_dir() else [path, manifest_path(path)]
                for file in files:
                    if where := secret_in(file):
                        raise BadCheckpoint(f"{file} contains what looks like a secret ({where})")
            except (BadCheckpoint, OSError) as error:
                reasons.append(str(error))
                continue
            for file in files:
                name = str(file.relative_to(self.folder))
                self._add("checkpoint", file, name, is_text=False)
            break
        else:
            reasons.append(f"{self.folder} has no intact checkpoint without secrets")
        if reasons:
            self._miss("checkpoint", "; ".join(reasons))

    def _success(self, places: list[Path]) -> None:
        for place in places:
            there = [name for name in REPORTS if (place / name).exists()]
            for name in there:
                self._add("success", place / name, name)
            if there:
                return
        looked = " or ".join(map(str, places))
        self._miss("success", f"no report in {looked}; nsa report --out DIR, then --report DIR")

    def _altered(self, run_info: str) -> None:
        self._first("altered", [self.folder / "config.yaml"])
        for name in altered_files(run_info):
            path = REPOSITORY / name
            # run.info is input: a name in it must not pull in files outside the repository.
            if not is_safe(name) or not path.resolve().is_relative_to(REPOSITORY):
                self._miss("altered", f"{name!r} is not a path inside the repository")
            elif not path.exists():
                self._miss("altered", f"{name}, which run.info names, is gone")
            else:
                self._add("altered", path, f"altered/{name}")

    def _add(self, item: str, origin: Path, path: str, *, is_text: bool = True) -> Source | None:
        try:
            file = self.open_files.enter_context(open_binary(origin))
        except OSError as error:
            self._miss(item, f"{origin}: {error.strerror or error}")
            return None
        self.sources.append(Source(item, path, origin, file, is_text))
        return self.sources[-1]

    def _miss(self, item: str, reason: str) -> None:
        clean = "".join(hide(line)[0] for line in reason.splitlines())
        self.missing.append(Missing(item=item, reason=clean))


def altered_files(run_info: str) -> list[str]:
    """Repository files that run.info lists as modified."""
    # `git status --porcelain` format: up to two status letters, a space, the path.
    found = re.findall(r"^altered:\s+(?:[ MADRCTU?!]{1,2} )?(\S.*?)\s*$", run_info, re.MULTILINE)
    return sorted(set(found))


def secret_in(path: Path) -> str:
    """Text in a checkpoint file that looks like a secret; tensor data is not scanned."""
    if path.suffix == ".distcp":
        return ""
    if path.suffix == ".pt":
        with open_binary(path) as file, zipfile.ZipFile(file) as archive:
            # torch's zip format: data.pkl holds the objects, the other members are raw tensors.
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            contents = [archive.read(name) for name in names]
    else:
        with open_binary(path) as file:
            contents = [file.read()]
    for text in (t for content in contents for t in re.findall(rb"[\x20-\x7e]{8,}", content)):
        shown, count = hide(text.decode())
        if count:
            return shown[:80]
    return ""
