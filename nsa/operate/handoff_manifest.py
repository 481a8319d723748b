"""manifest.json of a handoff archive: what it holds, with checksums, and what is missing.

Schema, version 1: the fields of Manifest, as one JSON object; `files` and `missing` are lists of
objects with the fields of Entry and Missing. It holds no time of its own, so that the same run
folder gives the same archive.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from nsa.operate.typed import require_types

VERSION = 1
SCHEMA = "nsa-handoff"
NAME = "manifest.json"
PREFIX = "handoff/"
"""Of every name in the archive."""
ITEMS = {
    "run_info": "run.info: config, GPUs and their memory, how it was launched",
    "train_log": "train.log: what the run printed",
    "training_csv": "training.csv: loss, rate and speed",
    "checkpoint": "the newest checkpoint that matches its manifest",
    "machine": "GPU model and launch details, as the run recorded them",
    "success": "the report: success criteria met, or deviations with their times",
    "altered": "the resolved config, and files that differ from the commit",
}
"""The checklist: what whoever takes over a run has to get."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file of the archive."""

    item: str
    """One of ITEMS."""
    path: str
    """In the archive, below PREFIX."""
    source: str
    """Where it lay, from the folder above the run folder, or by its name alone."""
    bytes: int
    """Of the file in the archive."""
    sha256: str
    redacted: int = 0
    """Secrets that were replaced by ***."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Something of the checklist that was not there."""

    item: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an archive holds."""

    schema: str = SCHEMA
    version: int = VERSION
    run: str
    """Name of the run folder."""
    status: str | None = None
    """As metrics.json says."""
    step: int | None = None
    files: list[Entry] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file, always the same for the same content."""
    return (json.dumps(dataclasses.asdict(manifest), indent=2, sort_keys=True) + "\n").encode()


def read_manifest(content: bytes) -> Manifest:
    """Read the file; whatever is not such a manifest is a ValueError that says why."""
    try:
        found: dict[str, Any] = json.loads(content)
        if (found.get("schema"), found.get("version")) != (SCHEMA, VERSION):
            raise ValueError(
                f"{NAME} is of {found.get('schema')!r:.40} version {found.get('version')!r:.20}; "
                f"this program reads {SCHEMA} version {VERSION}; use the program that wrote it"
            )
        files = [Entry(**entry) for entry in found.pop("files")]
        missing = [Missing(**entry) for entry in found.pop("missing")]
        manifest = Manifest(**found, files=files, missing=missing)
        for record in (manifest, *manifest.files, *manifest.missing):
            require_types(record, NAME)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{NAME} is not a manifest of a handoff ({error!s:.200})") from None
    for entry in manifest.files:
        if not is_safe(entry.path):
            raise ValueError(f"{NAME} names {entry.path!r:.80}, which is no plain relative path")
    return manifest


def is_safe(name: str) -> bool:
    """Whether a name stays below the folder that it would be extracted to."""
    parts = name.split("/")
    return bool(re.fullmatch(r"[\w. @+=/-]+", name)) and not {"", ".", ".."} & set(parts)
