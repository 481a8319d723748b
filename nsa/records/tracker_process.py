"""Child process that talks to a tracker: reads lines of JSON from stdin until end-of-file.

The first line (Start) names the library and the run; the others are points of its curves. sinks.py
starts this file by path.
"""

from __future__ import annotations

# Nothing of nsa may be imported here: it would load torch, which takes seconds.
import importlib
import json
import sys
from types import ModuleType
from typing import Any

Start = dict[str, Any]
"""Keys: kind, project, name, id, folder, config."""


def main() -> None:
    """Open the tracker's run, log every point, and finish it."""
    start = json.loads(sys.stdin.readline())
    run = OPENERS[start["kind"]](importlib.import_module(start["kind"]), start)
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # truncated line: the trainer was killed while writing it
        point = json.loads(line)
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
