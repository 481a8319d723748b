"""The process that talks to a tracker: it reads lines of JSON from stdin until they end.

The first line says which library to use and what the run is, the others are points of its curves.
sinks.py starts this file by its path. It imports nothing of nsa: torch would cost seconds.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

Start = dict[str, Any]
"""kind, project, name, id, folder, config."""


def main() -> None:
    """Open the run, log every point, and finish it."""
    start = json.loads(sys.stdin.readline())
    run = OPENERS[start["kind"]](importlib.import_module(start["kind"]), start)
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # the trainer was killed while it wrote
        point = json.loads(line)
        run.log(point["values"], step=point["step"])
    run.finish()


def _open_wandb(wandb: ModuleType, start: Start) -> Any:
    """Whether it is offline, WANDB_MODE says; it prints nothing, and leaves the console alone."""
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
    """Runs go on by their name, which is the id here."""
    return trackio.init(
        project=start["project"], name=start["id"], config=start["config"], resume="allow"
    )


OPENERS = {"wandb": _open_wandb, "trackio": _open_trackio}

if __name__ == "__main__":
    main()
