"""Starts the ranks of a test: as many processes of one script, which meet by a file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.nursery import Nursery

TIMEOUT_S = 120


def run_ranks(name: str, size: int, nursery: Nursery, folder: Path) -> list[dict[str, Any]]:
    """Run a script of this folder on so many ranks; what each of them wrote."""
    script = REPOSITORY / "nsa" / "tests" / "parallel" / name
    environ = dict(os.environ) | {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(REPOSITORY)
    ranks = [
        subprocess.Popen(
            [str(nursery.python), str(script), str(folder)],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(printed)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
