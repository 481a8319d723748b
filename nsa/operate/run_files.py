"""Open the files of a run folder: one function per file, for every command that reads runs.

Nothing is written or locked. A missing file is None or empty. What is torn, foreign or of a newer
version is listed in `problems`, and the rest is still read. Of growing files the end or a sample is
read; `followed_run.py` reads them line by line as they grow.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import stat
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from nsa.config import Config
from nsa.files import is_regular, open_binary, read_text
from nsa.records import (
    TRAINING,
    VAL,
    Beat,
    Metrics,
    RunEnvironment,
    TrainingRow,
    ValRow,
    last_rows,
    read_config,
    read_env,
    read_metrics,
)
from nsa.records.alarms import ALARMS_FILE, Alarm, last_alarms
from nsa.records.env import ENV_FILE
from nsa.records.folder import LAUNCH, Holder, read_holder
from nsa.records.heartbeat import sample_beats, tail_beats
from nsa.records.launch import RUN_INFO_FILE
from nsa.records.metrics import CONFIG_FILE, METRICS_FILE
from nsa.records.results import SAMPLE_FILE, SAMPLES_FILE, Sample, last_samples, read_sample
from nsa.records.sentinels import ANOMALY, HALT, Halt, read_anomaly, read_halt
from nsa.records.sinks import LOG as TRACKER_LOG
from nsa.records.spans import Place, read_span
from nsa.records.tables import Row, sample_rows
from nsa.tail import Line, lines_from_end

HEARTBEAT = re.compile(r"heartbeat_rank(\d+)\.jsonl")
CHECKPOINT = re.compile(r"checkpoint_step(\d+)(\.pt)?")
"""One file, or a folder of shards."""
PLAIN_BYTES = 1 << 20
"""Largest config.yaml and env.json that are read as plain data."""
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint on disk; not verified here (`nsa checkpoint verify` does that)."""

    step: int
    num_bytes: int
    written: float
    """Unix time."""


class RunFiles:
    """The files of one run folder, and what could not be read of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    # --- files that are replaced as a whole ---

    def metrics(self) -> Metrics | None:
        """metrics.json, with every field of its declared type."""
        return self._read(
            METRICS_FILE, lambda: _typed(read_metrics(self.folder), self.folder / METRICS_FILE)
        )

    def env(self) -> RunEnvironment | None:
        """env.json, with every field of its declared type."""
        return self._read(ENV_FILE, lambda: _typed(read_env(self.folder), self.folder / ENV_FILE))

    def config(self) -> Config | None:
        """config.yaml."""
        return self._read(CONFIG_FILE, lambda: read_config(self.folder))

    def plain_config(self) -> Any:
        """config.yaml as plain data, so that one of another version can be shown."""
        return self._read(
            CONFIG_FILE, lambda: _plain_yaml(read_text(self.folder / CONFIG_FILE, PLAIN_BYTES))
        )

    def plain_env(self) -> Any:
        """env.json as plain data, so that one of another version can be shown."""
        return self._read(
            ENV_FILE, lambda: json.loads(read_text(self.folder / ENV_FILE, PLAIN_BYTES))
        )

    def span(self, rank: int) -> Place | None:
        """span_rank{r}.json."""
        return read_span(self.folder, rank)

    def launch(self) -> Holder | None:
        """.launch.lock: the launcher that has the folder, or had it last."""
        return read_holder(self.folder, LAUNCH)

    def halt(self) -> Halt | None:
        """.HALT, which counts even when its content is unreadable; that is a problem too."""
        self._read(HALT, lambda: read_text(self.folder / HALT))
        return self._read(HALT, lambda: read_halt(self.folder))

    def anomaly(self) -> str | None:
        """.anomaly_type."""
        return self._read(ANOMALY, lambda: read_anomaly(self.folder))

    # --- files that grow: their end, or all of them as far as `most_bytes` go ---

    def heartbeats(self) -> list[tuple[int, Path]]:
        """Heartbeat files as (rank, path), in rank order."""
        return self._read("", lambda: heartbeat_files(self.folder)) or []

    def last_beats(self, path: Path, most_bytes: int) -> list[Beat]:
        """The end of a heartbeat, oldest line first."""
        beats, bad = self._read(path.name, lambda: tail_beats(path, most_bytes)) or ([], [])
        if bad:
            self.problems.append(f"{len(bad)} lines cannot be read, the last: {bad[-1]}")
        return beats

    def sampled_beats(self, path: Path, most_bytes: int) -> list[Beat]:
        """A whole heartbeat, or its start, its end and samples in between."""
        # Bad lines are reported when the end is read, which every reader does first.
        return (self._read(path.name, lambda: sample_beats(path, most_bytes)) or ([], []))[0]

    def last_training(self, most_rows: int) -> list[TrainingRow]:
        """The end of training.csv."""
        path = self.folder / TRAINING
        return self._read(TRAINING, lambda: last_rows(TrainingRow, path, most_rows)) or []

    def sampled_training(self, most_bytes: int) -> list[TrainingRow]:
        """All of training.csv, or its start, its end and samples in between."""
        return self._sampled(TrainingRow, TRAINING, most_bytes)

    def sampled_val(self, most_bytes: int) -> list[ValRow]:
        """All of val.csv, or its start, its end and samples in between."""
        return self._sampled(ValRow, VAL, most_bytes)

    def alarms(self, most: int) -> list[Alarm]:
        """The end of alarms.jsonl."""
        return self._read(ALARMS_FILE, lambda: last_alarms(self.folder, most)) or []

    def samples(self, most: int) -> list[Sample]:
        """The end of samples.jsonl, oldest first."""
        return self._read(SAMPLES_FILE, lambda: last_samples(self.folder, most)) or []

    def sample_text(self) -> str | None:
        """sample.txt, which runs of older versions have alone."""
        return self._read(SAMPLE_FILE, lambda: read_sample(self.folder))

    def log_ends(self, most_bytes: int) -> Iterator[tuple[Path, list[Line]]]:
        """The end of every log, its newest line first."""
        for path in sorted(self.folder.glob("*.log")):
            yield path, self._read(path.name, partial(_end_of, path, most_bytes)) or []

    def log_tail(self, path: Path, most_lines: int, most_bytes: int) -> list[Line]:
        """The last lines of a log that `find_log` found, oldest first."""
        lines = islice(lines_from_end(path, most_bytes), most_lines)
        return (self._read(path.name, lambda: [*lines]) or [])[::-1]

    # --- the folder itself ---

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints by step."""
        return self._read("", lambda: _checkpoints(self.folder)) or []

    def free_bytes(self) -> int | None:
        """Free space on its disk."""
        return self._read("", lambda: shutil.disk_usage(self.folder).free)

    def _sampled(self, kind: type[Row], name: str, most_bytes: int) -> list[Row]:
        path = self.folder / name
        rows, bad = self._read(name, lambda: sample_rows(kind, path, most_bytes)) or ([], [])
        if bad:
            self.problems.append(f"{name}: {len(bad)} lines cannot be read, the first: {bad[0]}")
        return rows

    def _read(self, name: str, load: Callable[[], T]) -> T | None:
        """Call a reader; None if the file is missing, None plus a problem if it is malformed."""
        try:
            return load()
        except FileNotFoundError:
            return None
        # Anything a hostile or foreign JSON file can cause in a parser or in the type checks.
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            path, text = self.folder / name, str(error)
            self.problems.append(text if path.name in text else f"{path}: {text}")
            return None


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever a file is replaced or written; None if it is missing or unreachable."""
    try:
        status = path.lstat()
    except OSError:
        return None
    # The inode detects a file replaced by rename within the resolution of mtime.
    return status.st_ino, status.st_size, status.st_mtime_ns


def _plain_yaml(text: str) -> Any:
    import yaml  # imported here because most commands do not need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _end_of(path: Path, most_bytes: int) -> list[Line]:
    return [*lines_from_end(path, most_bytes)]


def heartbeat_files(folder: Path) -> list[tuple[int, Path]]:
    """Heartbeat files of a folder as (rank, path), in rank order."""
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := HEARTBEAT.fullmatch(p.name)))


def _checkpoints(folder: Path) -> list[Checkpoint]:
    found = []
    for path in folder.glob("checkpoint_step*"):
        if match := CHECKPOINT.fullmatch(path.name):
            with suppress(FileNotFoundError):  # the trainer may delete an old checkpoint meanwhile
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    continue
                files = list(path.iterdir()) if stat.S_ISDIR(status.st_mode) else [path]
                size = sum(file.lstat().st_size for file in files)
                found.append(Checkpoint(int(match[1]), size, status.st_mtime))
    return sorted(found)


def _typed(record: T, path: Path) -> T:
    require_types(record, str(path))
    return record


# --- what a run printed, and the records of its launch ---

LAUNCHES = "train_runs"
"""Folder with launch records, next to the run folders."""
LAUNCH_LOG = "train.log"
"""The output of a run, beside run.info."""


def find_log(folder: Path) -> Path | None:
    """The log of a run: the *.log in its folder that was written last, else that of its launch.

    A symlink, pipe or folder is returned only if there is no regular file: opening it says why not.
    """
    own = [path for path in folder.glob("*.log") if path.name != TRACKER_LOG]
    if not own:
        info = find_run_info(folder)
        launched = info.parent / LAUNCH_LOG if info else None
        return launched if launched is not None and is_regular(launched) else None
    return max(own, key=lambda path: (is_regular(path), _written(path), path.name))


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def find_run_info(folder: Path) -> Path | None:
    """run.info in the folder, else the newest launch record beside it that names the folder."""
    if (folder / RUN_INFO_FILE).exists():
        return folder / RUN_INFO_FILE
    records = folder.resolve().parent.glob(f"{LAUNCHES}/*/{RUN_INFO_FILE}")
    for path in sorted(records, key=lambda p: p.parent.name, reverse=True):
        try:
            with open_binary(path) as file:
                text = file.read(1 << 20).decode("utf-8", "replace")
        except OSError:
            continue  # another user's record; a later one may be ours
        if any(_is_folder(value, folder) for value in _values(text)):
            return path
    return None


def _values(run_info: str) -> Iterator[str]:
    for line in run_info.splitlines():
        yield line.partition(":")[2].strip()


def _is_folder(value: str, folder: Path) -> bool:
    """Whether a run.info value is this folder: as given, or relative to the launch directory."""
    if not value or "\0" in value:
        return False
    whole, given = folder.resolve(), Path(value)
    return Path(value).resolve() == whole or (
        not given.is_absolute()
        and len(given.parts) > 1
        and whole.parts[-len(given.parts) :] == given.parts
    )


# --- type checks for records read from disk ---


def require_types(record: Any, where: str) -> None:
    """Raise ValueError where a field of a dataclass does not have its declared type."""
    for name, kind in get_type_hints(type(record)).items():
        if dataclasses.is_dataclass(record) and not _fits(getattr(record, name), kind):
            raise ValueError(
                f"{where}: {name}={getattr(record, name)!r:.60} is not of type {kind}; the file is "
                "damaged, or written by another program"
            )


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    # JSON writes 1.0 as 1, so an int is a valid float. A bool is an int in Python, but not here.
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)
