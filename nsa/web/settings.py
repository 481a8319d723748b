"""config.yaml and env.json of runs as flat tables, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from nsa.files import read_text
from nsa.telemetry.config_file import NAME as CONFIG
from nsa.telemetry.env_file import NAME as ENV

MOST_BYTES = 1 << 20
MOST_KEYS = 2000
MOST_DEPTH = 8
MOST_TEXT = 300
Flat = dict[str, str]


class Settings:
    """The settings of one run, read again when a file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: dict[str, str] = {}
        self._known: dict[str, tuple[tuple[int, int, int], Flat]] = {}

    def config(self) -> Flat:
        """config.yaml by key; empty where it cannot be read."""
        return self._load(CONFIG, yaml.safe_load)

    def env(self) -> Flat:
        """env.json by field; empty where it cannot be read."""
        return self._load(ENV, json.loads)

    def _load(self, name: str, parse: Callable[[str], Any]) -> Flat:
        """Parse the file as plain data: also one of a newer version has something to show."""
        path = self.folder / name
        try:
            status = path.lstat()
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            if name not in self._known or self._known[name][0] != stamp:
                self._known[name] = stamp, dict(_flatten(parse(read_text(path, MOST_BYTES))))
                self.problems.pop(name, None)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            text = " ".join(str(error).split())[:MOST_TEXT]
            self.problems[name] = f"{path}: {text}"
            return {}
        return self._known[name][1]


def _flatten(content: Any) -> Iterator[tuple[str, str]]:
    """Keys with dots; only so many, because aliases can make a small file endless."""
    left = MOST_KEYS
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting and left:
        name, value, depth = waiting.pop()
        if isinstance(value, dict) and depth < MOST_DEPTH:
            items = list(value.items())[:MOST_KEYS]
            waiting += [
                (f"{name}.{key}"[-MOST_TEXT:] if name else str(key)[:MOST_TEXT], inner, depth + 1)
                for key, inner in reversed(items)
            ]
            if len(waiting) > MOST_KEYS:
                del waiting[: len(waiting) - MOST_KEYS]
        else:
            left -= 1
            yield name, _text(value, depth)


def _text(value: Any, depth: int) -> str:
    if isinstance(value, list) and depth < MOST_DEPTH and all(_is_plain(item) for item in value):
        return " ".join(str(item) for item in value[:100])[:MOST_TEXT]
    if isinstance(value, dict | list):
        return f"({len(value)} entries)"
    return "null" if value is None else str(value)[:MOST_TEXT]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | None)


def side_by_side(tables: Sequence[Flat]) -> list[dict[str, Any]]:
    """A row for every key that any has, with the value of each, and whether they differ."""
    keys: dict[str, None] = {}
    for table in tables:
        keys |= dict.fromkeys(table)
    rows = []
    for key in keys:
        values = [table.get(key) for table in tables]
        known = [table for table in tables if table]  # a run without the file differs in nothing
        differs = len({table.get(key) for table in known}) > 1
        rows.append({"key": key, "values": values, "differs": differs})
    return rows
