""".HALT (asks a run to stop) and .anomaly_type (why a run stopped itself).

Schema, version 1. `.HALT`: text, may be empty (`touch .HALT`); programs write `halt: <reason>`. If
it exists, the run stops after the current step. The run then renames it to `.HALT.done`, or
`.HALT.done.2` and so on. After an anomaly it stays, so that nobody restarts without looking.
`.anomaly_type`: one word of ANOMALIES.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from nsa.files import complain, read_text, write_text

HALT = ".HALT"
DONE = ".HALT.done"
ANOMALY = ".anomaly_type"
PREFIX = "halt: "
ANOMALIES = (
    "nan_loss",
    "heartbeat_stall",
    "throughput_flatline",
    "gate_collapse",
    "zero_grad",
    "oom",
    "stall",
)


class Halt(NamedTuple):
    """A pending request to stop."""

    text: str
    """Content of the file; empty if it was only touched."""
    age_s: float
    """Seconds since it was written."""

    @property
    def reason(self) -> str:
        """The text without PREFIX."""
        return self.text.removeprefix(PREFIX.strip()).strip()


def read_halt(out_dir: Path | str) -> Halt | None:
    """The pending request to stop, or None; without a request this is a single lstat."""
    path = Path(out_dir) / HALT
    try:
        written = path.lstat().st_mtime
    except OSError:  # missing, or a transient error of a network disk: not a request
        return None
    try:
        text = read_text(path).strip()
    except FileNotFoundError:
        return None
    except OSError as error:  # the file exists, so this counts as a request
        text = f"unreadable: {error.strerror}"
    return Halt(text, max(0.0, time.time() - written))


def write_halt(out_dir: Path | str, reason: str) -> bool:
    """Ask the run to stop, replacing an earlier request. On failure, warn and return False."""
    return _write(Path(out_dir) / HALT, f"{PREFIX}{reason}\n")


def obeyed(out_dir: Path | str) -> Path | None:
    """Rename `.HALT` after the run stopped, so that the next start does not stop at once.

    A `.HALT` that names an anomaly, as a watchdog writes it, stays: a person must look first.
    """
    folder = Path(out_dir)
    # Written by a watchdog or by the run itself, not by the operator.
    if (halt := read_halt(folder)) is not None and halt.reason in ANOMALIES:
        return None
    # Keep older .HALT.done files: they say why the run was stopped before.
    names = (DONE, *(f"{DONE}.{number}" for number in range(2, 10_000)))
    target = next(folder / name for name in names if not (folder / name).exists())
    try:
        return (folder / HALT).rename(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        complain(folder / HALT, error, "not renamed: remove it before the next start")
        return None


def write_anomaly(out_dir: Path | str, kind: str) -> bool:
    """Record the anomaly that stops the run. On failure, warn and return False."""
    if kind not in ANOMALIES:
        raise ValueError(f"anomaly {kind!r} is unknown; use one of {', '.join(ANOMALIES)}")
    return _write(Path(out_dir) / ANOMALY, f"{kind}\n")


def read_anomaly(out_dir: Path | str) -> str | None:
    """The anomaly that stopped the run, or None."""
    try:
        text = read_text(Path(out_dir) / ANOMALY)
    except FileNotFoundError:
        return None
    return text.strip() or None


def _write(path: Path, text: str) -> bool:
    try:
        write_text(path, text)
    except OSError as error:  # full disk: the run must still be able to shut down
        complain(path, error)
        return False
    return True
