""".HALT and .anomaly_type: small files by which a run is stopped, and says why it stopped itself.

Schema, version 1. `.HALT`: text, may be empty (`touch .HALT`); a program writes `halt: <reason>`.
Its presence asks the run to stop after the current step. A halt that was obeyed becomes
`.HALT.done`, then `.HALT.done.2` and so on; after an anomaly it stays, so that nobody restarts
without looking. `.anomaly_type`: one word of ANOMALIES.
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
    """A standing request to stop."""

    text: str
    """What the file says; empty when it was only touched."""
    age_s: float
    """Seconds since it was written."""

    @property
    def reason(self) -> str:
        """The text without the word that programs put before it."""
        return self.text.removeprefix(PREFIX.strip()).strip()


def read_halt(out_dir: Path | str) -> Halt | None:
    """The request to stop, or None; costs one look at the folder while there is none."""
    path = Path(out_dir) / HALT
    try:
        written = path.lstat().st_mtime
    except OSError:  # not there; or a network disk that stumbles, which is no request
        return None
    try:
        text = read_text(path).strip()
    except FileNotFoundError:
        return None
    except OSError as error:  # what is there and cannot be read still asks
        text = f"unreadable: {error.strerror}"
    return Halt(text, max(0.0, time.time() - written))


def write_halt(out_dir: Path | str, reason: str) -> bool:
    """Ask the run to stop, in place of an earlier request. False, and a complaint, if it failed."""
    return _write(Path(out_dir) / HALT, f"{PREFIX}{reason}\n")


def obeyed(out_dir: Path | str) -> Path | None:
    """Rename `.HALT` after it was obeyed, so that the next start does not stop at once.

    One that names an anomaly, as a watchdog writes it, stays: somebody must look first.
    """
    folder = Path(out_dir)
    if (halt := read_halt(folder)) is not None and halt.reason in ANOMALIES:
        return None
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
    """Leave the kind of anomaly that stops the run. False, and a complaint, if it failed."""
    if kind not in ANOMALIES:
        raise ValueError(f"anomaly {kind!r} is not known; use one of {', '.join(ANOMALIES)}")
    return _write(Path(out_dir) / ANOMALY, f"{kind}\n")


def read_anomaly(out_dir: Path | str) -> str | None:
    """The kind of anomaly that the run ended with, or None."""
    try:
        text = read_text(Path(out_dir) / ANOMALY)
    except FileNotFoundError:
        return None
    return text.strip() or None


def _write(path: Path, text: str) -> bool:
    try:
        write_text(path, text)
    except OSError as error:
        complain(path, error)
        return False
    return True
