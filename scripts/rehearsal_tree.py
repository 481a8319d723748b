"""A copy of the repository in which everything is small, and a dataset on this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from nsa.tests.data.test_tokenizers import write_gpt2
from nsa.tests.support.hub import Hub, parquet_bytes
from scripts.surface import REPOSITORY, load

DOCUMENT_LINES = 40


def make_tree(tree: Path) -> None:
    """Copy what git knows and what is new, make the configs small, and link the environment."""
    for name in _files():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target)
    (tree / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    (tree / "artifacts").mkdir()
    (tree / "home").mkdir()
    (tree / "gpt2").mkdir()
    write_gpt2(tree / "gpt2", "vocab.json", "merges.txt")
    for path in sorted((tree / "configs").glob("*.yaml")):
        path.write_text(yaml.safe_dump(_smaller(path, tree), sort_keys=False), encoding="utf-8")
    shims = tree / "home" / "bin"
    shims.mkdir()
    command = f'#!/bin/sh\nPYTHONPATH="{tree}" exec python -m nsa.cli "$@"\n'
    (shims / "nsa").write_text(command, encoding="utf-8")
    (shims / "nsa").chmod(0o755)


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [name for name in listed if name and (REPOSITORY / name).is_file()]


def _smaller(path: Path, tree: Path) -> dict[str, Any]:
    """The config with the sizes of a rehearsal, where it sets them; base.yaml sets them all."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group, values in load()["rehearsal"]["keys"].items():
        given = content.setdefault(group, {}) if path.name == "base.yaml" else content.get(group)
        for key, value in values.items():
            if given is None or (key not in given and path.name != "base.yaml"):
                continue
            given[key] = min(given.get(key, value), value)  # what is off stays off
    if content.get("data", {}).get("tokenizer") == "gpt2":
        content["data"]["tokenizer_path"] = str(tree / "gpt2")  # it would come from the network
        # A CPU without bf16 needs minutes for one step with this vocabulary.
        content.setdefault("runtime", {})["precision"] = "fp32"
    return content


@contextmanager
def dataset() -> Iterator[Hub]:
    """FineWeb-Edu's place on the hub, on loopback, with documents of the embedded corpus."""
    texts: list[str] = []
    for path in sorted((REPOSITORY / "nsa" / "data" / "corpus").glob("*.txt"))[:4]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        starts = range(0, len(lines), DOCUMENT_LINES)
        texts += ["".join(lines[start : start + DOCUMENT_LINES]) for start in starts]
    halves = {"00000": texts[::2], "00001": texts[1::2]}
    files = {f"data/CC-MAIN-2013-20/train-{n}.parquet": parquet_bytes(t) for n, t in halves.items()}
    with Hub(files) as hub:
        yield hub
