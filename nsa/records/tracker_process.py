"""Child process that talks to a tracker, and the lines of JSON that it reads from stdin.

The first line (Start) names the library and the run; the others (Point) are points of its curves,
until end-of-file. sinks.py starts this file by path and writes the lines.
"""

from __future__ import annotations

# Nothing of nsa may be imported here: it would load torch, which takes seconds.
import importlib
import json
import sys
from types import ModuleType
from typing import Any, TypedDict


class Start(TypedDict):
    """The first line: what a run of the tracker is opened with."""

    kind: str
    """Name of the library's module: wandb or trackio."""
    project: str
    name: str
    id: str
    """A resumed run continues under the same id."""
    folder: str
    config: dict[str, Any]


class Point(TypedDict):
    """Every other line: a value for each curve, at one step."""

    step: int
    values: dict[str, float]


def encode(message: Start | Point) -> bytes:
    """One line for stdin."""
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    """Open the tracker's run, log every point, and finish it."""
    start: Start = json.loads(sys.stdin.readline())
    run = OPENERS[start["kind"]](importlib.import_module(start["kind"]), start)
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # truncated line: the trainer was killed while writing it
        point: Point = json.loads(line)
        run.log(point["values"], step=point["step"])
    run.finish()


def _open_wandb(wandb: ModuleType, start: Start) -> Any:
    """WANDB_MODE decides whether it is offline. It neither prints nor captures the console."""
    return wandb.init(
        project=start["project"],
        name=start["name"],
        id=start["id"],
        dir=start["folder"],
        config=start["config"],
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )


def _open_trackio(trackio: ModuleType, start: Start) -> Any:
    """trackio resumes runs by name, so the id is passed as the name."""
    return trackio.init(
        project=start["project"], name=start["id"], config=start["config"], resume="allow"
    )


OPENERS = {"wandb": _open_wandb, "trackio": _open_trackio}

if __name__ == "__main__":
    main()
