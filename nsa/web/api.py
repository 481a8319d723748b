"""What can be asked for under /api: each path is a function of the query, and gives plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

MOST_POINTS = 2000
FAR = 1e15
"""Beyond any step, and any number of seconds."""
Query = Mapping[str, str]


class Run(Protocol):
    """One run; nsa.web.source.Source."""

    def series(self, first: float, last: float, points: int) -> dict[str, Any]: ...
    def layers(self, first: float, last: float, points: int) -> dict[str, Any]: ...
    def selection(self, step: int) -> dict[str, Any]: ...
    def timeline(self, last_s: float, cells: int) -> dict[str, Any]: ...


class Runs(Protocol):
    """All of them; nsa.web.source.Sources."""

    def runs(self) -> dict[str, Any]: ...
    def get(self, index: int) -> Run: ...
    def settings(self) -> dict[str, Any]: ...


def answer(runs: Runs, path: str, query: Query) -> dict[str, Any]:
    """The answer to a path; LookupError where there is none, ValueError for a bad query."""
    return PATHS[path](runs, query)


def _series(runs: Runs, query: Query) -> dict[str, Any]:
    first, last, points = _window(query)
    return _run(runs, query).series(first, last, points)


def _layers(runs: Runs, query: Query) -> dict[str, Any]:
    first, last, points = _window(query)
    return _run(runs, query).layers(first, last, points)


def _selection(runs: Runs, query: Query) -> dict[str, Any]:
    return _run(runs, query).selection(int(_number(query, "step", FAR, 0, FAR)))


def _timeline(runs: Runs, query: Query) -> dict[str, Any]:
    last_s = _number(query, "last_s", FAR, 1, FAR)
    return _run(runs, query).timeline(last_s, int(_number(query, "cells", 240, 1, MOST_POINTS)))


PATHS: dict[str, Callable[[Runs, Query], dict[str, Any]]] = {
    "/api/runs": lambda runs, query: runs.runs(),
    "/api/settings": lambda runs, query: runs.settings(),
    "/api/series": _series,
    "/api/layers": _layers,
    "/api/selection": _selection,
    "/api/timeline": _timeline,
}


def _run(runs: Runs, query: Query) -> Run:
    return runs.get(int(_number(query, "run", 0, 0, FAR)))


def _window(query: Query) -> tuple[float, float, int]:
    first, last = _number(query, "from", 0, -FAR, FAR), _number(query, "to", FAR, -FAR, FAR)
    return first, last, int(_number(query, "points", 600, 1, MOST_POINTS))


def _number(query: Query, name: str, default: float, least: float, most: float) -> float:
    text = query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ValueError(f"{name}={text!r:.40} is not a number from {least:g} to {most:g}")
    return value
