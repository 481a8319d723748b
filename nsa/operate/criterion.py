"""The parts that criteria are made of: a row with its verdict, thirds of a curve, percentiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from nsa.operate.evidence import Evidence, Point
from nsa.operate.limits import Limits
from nsa.operate.verdict import FAIL, NOT_MEASURED, PASS, Row
from nsa.telemetry.metrics import NAME as METRICS

NO_METRICS = f"no {METRICS} that can be read"

Criterion = Callable[[Evidence, Limits], Row | None]
"""Judges one thing; None where the question does not arise, as for gates of dense attention."""


def judged(
    name: str,
    ok: bool,
    value: str,
    *,
    limit: str,
    evidence: str,
    advice: str = "",
    essential: bool = True,
) -> Row:
    """A row about something that was measured."""
    return Row(
        name=name,
        value=value,
        limit=limit,
        verdict=PASS if ok else FAIL,
        evidence=evidence,
        advice="" if ok else advice,
        essential=essential,
    )


def missing(name: str, *, limit: str, evidence: str, advice: str, essential: bool) -> Row:
    """A row about something that was not recorded."""
    return Row(
        name=name,
        value="-",
        limit=limit,
        verdict=NOT_MEASURED,
        evidence=evidence,
        advice=advice,
        essential=essential,
    )


def known(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """The points that are numbers, each with its number."""
    return [(point.value, point) for point in points if point.value is not None]


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and the last third; there are three values at least."""
    third = max(1, len(values) // 3)
    return median(values[:third]), median(values[-third:])


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of them does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(share * (len(ranked) - 1)))]
