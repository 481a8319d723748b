"""What trains, measures and is run on a GPU needs none of the packages for other purposes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.data import DataError
from nsa.data.optional import need
from nsa.tests.conftest import REPOSITORY

FORBIDDEN = ("datasets", "pydantic", "fastapi")
BLOCKED = f"""
import importlib, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ImportError(f"{{name}} must not be needed")

sys.meta_path.insert(0, Finder())
"""
GROUPS = {
    "trainer": ["scripts.train_showcase", "nsa.train.prove", "nsa.train.checkpoint_commands"],
    "benches": [f"bench.{file.stem}" for file in sorted((REPOSITORY / "bench").glob("*.py"))],
    "gpu-tests": [
        f"nsa.tests.{file.stem}"
        for file in sorted((REPOSITORY / "nsa" / "tests").glob("test_*.py"))
        if re.search(r"mark\.gpu\b|nsa\.tests\.gpu\b", file.read_text(encoding="utf-8"))
    ],
}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED + code]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_imported_without_packages_for_other_purposes(group: str) -> None:
    assert GROUPS[group], f"no module was found for {group}"

    found = run_python("\n".join(f"importlib.import_module({name!r})" for name in GROUPS[group]))

    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_block_would_notice(package: str) -> None:
    found = run_python(f"import {package}")
    assert found.returncode == 1 and f"{package} must not be needed" in found.stderr


def test_a_folder_of_that_name_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scripts/datasets is one, and scripts/ is on the path of what is started from there."""
    (tmp_path / "nowhere_else").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"a stream needs the package nowhere_else .*nsa\[stream\]"):
        need("nowhere_else", "a stream", extra="stream")
