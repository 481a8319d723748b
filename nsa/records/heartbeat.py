"""heartbeat_rank{r}.jsonl: what each rank is doing, one JSON line per event; writer and reader.

Schema, version 1 (docs/schemas/heartbeat.md). Every line has `schema`, `ts` (Unix time, s), `iso`
(the same, UTC), `pid`, `rank`, `step` (the update it is about; 0 before the first) and `msg`, the
kind of line. JSON has no NaN: a non-finite number becomes null, and `non_finite` says what it was.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa.files import LineFile
from nsa.records.numbers import ATTENTION, FALLBACK_PREFIX, NUMBERS
from nsa.tail import Line, complete_lines, lines_from_end, sampled_lines

NON_FINITE = "non_finite"
"""Field that lists which numbers were NaN or infinite."""


def strict(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to strict JSON values: tensors to numbers, non-finite numbers to null.

    Each replaced number is listed under NON_FINITE.
    """
    lost: dict[str, str] = {}
    line = {str(key): _plain(value, str(key), lost) for key, value in extra.items()}
    return line | {NON_FINITE: lost} if lost else line


def _plain(value: Any, key: str, lost: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost[key] = str(value)
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}", lost) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{i}]", lost) for i, inner in enumerate(value)]
    if hasattr(value, "tolist"):  # tensors and numpy numbers
        return _plain(value.tolist(), key, lost)
    return str(value)


# --- writer ---

SCHEMA = 1
HEARTBEAT_FILE = "heartbeat_rank{rank}.jsonl"
BASE_FIELDS = ("schema", "ts", "iso", "pid", "rank", "step", "msg")

BOOT, BEAT, PROGRESS, STEP_END = "boot", "beat", "progress", "step_end"
LOADER_READY = "fineweb_loader_ready"
LOADER_ERROR = "fineweb_loader_error"
LOADER_WARMUP = "fineweb_loader_warmup"
WATCHDOG_DUMP = "watchdog_dump"

SEARCH_BYTES = 4 * 1024 * 1024
"""How far back from the end of the file `last_beat` searches."""


class Heartbeat:
    """Writes the lines of one rank: about 20 microseconds each; write errors never raise."""

    def __init__(
        self,
        out_dir: Path | str,
        rank: int = 0,
        *,
        every: int = 1,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`every`: write a `beat` line every so many steps. `clock`: replaces time.time() when
        generating example records.
        """
        self.rank, self._every = rank, every
        self._clock = clock or (lambda: time.time())
        self.path = Path(out_dir) / HEARTBEAT_FILE.format(rank=rank)
        self.file = LineFile(self.path)

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written."""
        return self.file.num_dropped

    def write(self, step: int, msg: str, extra: Mapping[str, Any] | None = None) -> None:
        """Append a line; `extra` may hold tensors and NaN, but no key of BASE_FIELDS."""
        now = self._clock()
        line: dict[str, Any] = {
            "schema": SCHEMA,
            "ts": round(now, 6),
            "iso": iso(now),
            "pid": os.getpid(),
            "rank": self.rank,
            "step": step,
            "msg": msg,
        }
        if extra:
            if clash := line.keys() & extra.keys():
                raise ValueError(
                    f"heartbeat {msg!r}: {', '.join(sorted(clash))} is a field of every line; "
                    "give the extra field another name"
                )
            line |= strict(extra)
        self.file.append(json.dumps(line, allow_nan=False, separators=(", ", ": ")))

    def boot(self, step: int = 0) -> None:
        """The process is up; `step` is the update that it resumes after."""
        self.write(step, BOOT, {"phase": "start"})

    def beat(self, step: int, phase: str = "step_start") -> None:
        """An update begins, or enters a named phase."""
        if self._every > 0 and step % self._every == 0:
            self.write(step, BEAT, {"phase": phase})

    def progress(
        self,
        step: int,
        *,
        attention: Mapping[str, Any] | None = None,
        layers: Sequence[Mapping[str, float | None]] | None = None,
        fallbacks: Mapping[str, int] | None = None,
        **measured: float | None,
    ) -> None:
        """The NUMBERS of a logged update, those of MEASURED by name; unknown values are null.

        `attention` is AttentionStats.summary(), `layers` is AttentionStats.per_layer(), and
        `fallbacks` is tables.fallback_counts().
        """
        given: dict[str, Any] = {**measured}
        given |= {number.name: (attention or {}).get(number.stat) for number in ATTENTION}
        given |= {f"{FALLBACK_PREFIX}{name}": count for name, count in (fallbacks or {}).items()}
        if unknown := given.keys() - {number.name for number in NUMBERS}:
            raise ValueError(
                f"heartbeat: {', '.join(sorted(unknown))} is not a number of a logged step; "
                "add it to NUMBERS in nsa/records/numbers.py"
            )
        line = {number.name: given.get(number.name) for number in NUMBERS}
        self.write(step, PROGRESS, line | {"layers": None if layers is None else _by_field(layers)})

    def step_end(self, step: int) -> None:
        """A logged update ended."""
        self.write(step, STEP_END, {"phase": "end"})

    def loader_ready(self, dt_s: float, step: int = 0) -> None:
        """The first batch arrived after `dt_s` seconds."""
        self.write(step, LOADER_READY, {"dt": dt_s})

    def loader_error(self, error: BaseException | str, step: int = 0) -> None:
        """The data source failed."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.write(step, LOADER_ERROR, {"error": text})

    def loader_warmup(self, requested: int, filled: int, wait_ms: float, step: int = 0) -> None:
        """Batches were prefetched before the first update."""
        extra = {"requested": requested, "filled": filled, "wait_ms": wait_ms}
        self.write(step, LOADER_WARMUP, extra)

    def watchdog_dump(self, path: Path | str, step: int = 0) -> None:
        """A watchdog wrote the stacks. Readers do not count this line as a sign of life."""
        self.write(step, WATCHDOG_DUMP, {"path": str(path)})

    def close(self) -> None:
        """Close the file; a later line reopens it, creating the folder if needed."""
        self.file.close()


def _by_field(layers: Sequence[Mapping[str, float | None]]) -> dict[str, list[Any]]:
    """Each field as a list over layers, so that its name is written once per line."""
    fields: dict[str, list[Any]] = {}
    for number in ATTENTION:
        if number.by_layer:
            fields[number.name] = [layer[number.stat] for layer in layers]
        elif number.parts:
            fields[number.name] = [[layer[part.name] for part in number.parts] for layer in layers]
    return fields


def iso(ts: float) -> str:
    """Unix time as ISO 8601 in UTC, to the millisecond, with a Z."""
    moment = datetime.fromtimestamp(ts, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- reader ---


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One line, parsed."""

    ts: float
    step: int = 0
    msg: str = ""
    rank: int = 0
    pid: int | None = None
    iso: str = ""
    schema: int = SCHEMA
    extra: dict[str, Any] = field(default_factory=dict)
    """All fields that are not in BASE_FIELDS."""

    @property
    def is_pause(self) -> bool:
        """Whether it begins an evaluation or a save, which have no typical duration."""
        return self.msg == BEAT and self.extra.get("phase") != "step_start"

    def layers(self) -> list[dict[str, Any]]:
        """Statistics per layer of a progress line, in order; empty if not collected."""
        fields = self.extra.get("layers") or {}
        rows = zip(*fields.values(), strict=True)
        return [dict(zip(fields, row, strict=True)) for row in rows]


class BrokenHeartbeat(ValueError):
    """A complete line is not valid."""


def read_heartbeat(path: Path | str) -> list[Beat]:
    """All complete lines; a truncated last line is skipped."""
    return [parse_beat(Path(path), line) for line in complete_lines(Path(path))]


def last_beat(path: Path | str, msg: str | None = None) -> Beat | None:
    """The last line, or the last one of kind `msg`, within SEARCH_BYTES of the end; else None."""
    beats = _beats_from_end(Path(path))
    return next((beat for beat in beats if msg is None or beat.msg == msg), None)


def tail_beats(path: Path | str, most_bytes: int) -> tuple[list[Beat], list[str]]:
    """The lines within the last `most_bytes`, oldest first, and an error text per invalid line.

    For displays: an invalid line is skipped instead of raised.
    """
    beats, problems = _readable(Path(path), lines_from_end(Path(path), most_bytes))
    return beats[::-1], problems[::-1]


def sample_beats(path: Path | str, most_bytes: int) -> tuple[list[Beat], list[str]]:
    """Like tail_beats, for the whole file, or for a sample of it if it exceeds `most_bytes`."""
    return _readable(Path(path), sampled_lines(Path(path), most_bytes))


def _readable(path: Path, lines: Iterable[Line]) -> tuple[list[Beat], list[str]]:
    beats: list[Beat] = []
    problems: list[str] = []
    for line in lines:
        try:
            beats.append(parse_beat(path, line))
        except BrokenHeartbeat as error:
            problems.append(str(error))
    return beats, problems


def age_seconds(path: Path | str, now: float | None = None) -> float | None:
    """Seconds since the last sign of life of the rank; None without one."""
    beats = _beats_from_end(Path(path))
    ts = next((beat.ts for beat in beats if beat.msg != WATCHDOG_DUMP), None)
    return None if ts is None else (time.time() if now is None else now) - ts


def _beats_from_end(path: Path) -> Iterator[Beat]:
    for line in lines_from_end(path, SEARCH_BYTES):
        yield parse_beat(path, line)


HEAD = re.compile(
    rf'{{"schema": {SCHEMA}, "ts": (\d{{1,11}}(?:\.\d+)?), "iso": "([^"\\]*)", '
    r'"pid": (\d{1,9}), "rank": (\d{1,6}), "step": (\d{1,11}), "msg": "(\w+)"'
    r'(?:, "phase": "(\w+)"(\})?)?'
)
"""Prefix of every line as `write` formats it. Most lines end right after `phase`; matching those
with a regex is much faster than json.loads."""


def parse_head(path: Path, line: Line) -> Beat:
    """Like parse_beat, but of the extra fields only `phase` is read: much faster."""
    match = HEAD.match(line.text)
    return parse_beat(path, line) if match is None else _from_head(match)


def _from_head(match: re.Match[str]) -> Beat:
    ts, at, pid, rank, step, msg, phase, _ = match.groups()
    extra = {} if phase is None else {"phase": phase}
    numbers = {"ts": float(ts), "pid": int(pid), "rank": int(rank), "step": int(step)}
    return Beat(**numbers, msg=msg, iso=at, extra=extra)  # type: ignore[arg-type]


def parse_beat(path: Path, line: Line) -> Beat:
    """Parse a line of the file `path`; raise BrokenHeartbeat if invalid or of a newer schema."""
    match = HEAD.match(line.text)
    if match is not None and match[8] and match.end() == len(line.text):
        return _from_head(match)  # the regex covered the whole line
    try:
        content = json.loads(line.text)
        fields = {name: content.pop(name) for name in BASE_FIELDS if name in content}
        beat = Beat(**fields, extra=content)
        _require_types(beat)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise BrokenHeartbeat(
            f"{path}, {line.where}: not a line of a heartbeat ({error}): {line.text[:80]!r}; "
            "remove that line, or find out what else writes this file"
        ) from None
    if beat.schema > SCHEMA:
        raise BrokenHeartbeat(
            f"{path}, {line.where}: schema {beat.schema}; this program reads up to {SCHEMA}; "
            "use the program that wrote it"
        )
    return beat


def _require_types(beat: Beat) -> None:
    for name, kind in (("ts", int | float), ("step", int), ("rank", int), ("schema", int)):
        # json.loads accepts NaN and Infinity; `not abs(x) < 1e12` catches both.
        if not isinstance(getattr(beat, name), kind) or not abs(getattr(beat, name)) < 1e12:
            raise ValueError(f"{name}={getattr(beat, name)!r:.40} is out of range")
    if not isinstance(beat.pid, int | None) or not isinstance(beat.msg, str):
        raise ValueError(f"pid={beat.pid!r:.40}, msg={beat.msg!r:.40}")
