"""What a result file says of its machine, and how it is written and read."""

from __future__ import annotations

import json
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nsa.config.load import REPOSITORY
from nsa.files import write_text
from nsa.records.env import git_commit


def describe_machine(device: str) -> dict[str, str]:
    """Where the numbers come from; asked in the process that measures."""
    on_cpu = f"cpu ({platform.machine()})"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else on_cpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton_version(),
        "python": platform.python_version(),
    }


def describe_command(command: list[str], commit_name: str | None = None) -> dict[str, str]:
    """What was called, and the commit: a given one where git is not available."""
    return {"commit": commit_name or commit(), "command": " ".join(command)}


def commit() -> str:
    """The commit of this clone, with `-dirty` if files differ; `unknown` outside one."""
    return git_commit(REPOSITORY) or "unknown"


def triton_version() -> str:
    if find_spec("triton") is None:
        return "not installed"
    import triton

    return str(triton.__version__)


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Write the result; the file appears under its name when it is complete."""
    write_text(Path(path), json.dumps(result, indent=1) + "\n")


def read_json(path: str | Path, version: int, script: str) -> dict[str, Any]:
    """Read what `write_json` wrote for a script, in the version that this reader knows."""
    result: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if result.get("version") != version:
        raise ValueError(
            f"{path} has version {result.get('version')}; this reader knows {version}: measure "
            f"again with bench/{script}"
        )
    return result
