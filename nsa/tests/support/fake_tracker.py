"""A package with the interface of a tracker, on disk: it writes every call into a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SOURCE = """\
import json, time

def _record(what, **values):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([what, values]) + "\\n")

class Settings:
    def __init__(self, **values):
        self.values = values

class Run:
    def log(self, values, step):
        {log}
        _record("log", values=values, step=step)

    def finish(self):
        _record("finish")

def init(settings=None, **values):
    {init}
    _record("init", settings=getattr(settings, "values", None), **values)
    return Run()
"""

Calls = list[tuple[str, dict[str, Any]]]


def install(
    name: str, folder: Path, patch: pytest.MonkeyPatch, *, init: str = "pass", log: str = "pass"
) -> Path:
    """Make `import NAME` find the package here and in processes; return the file of its calls."""
    calls, packages = folder / "calls.jsonl", folder / "packages"
    packages.mkdir()
    source = SOURCE.format(calls=str(calls), init=init, log=log)
    (packages / f"{name}.py").write_text(source, encoding="utf-8")
    patch.syspath_prepend(packages)
    given = [str(packages), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    patch.setenv("PYTHONPATH", os.pathsep.join(given))
    return calls


def read_calls(path: Path) -> Calls:
    """The calls in their order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(name, values) for name, values in map(json.loads, lines)]
