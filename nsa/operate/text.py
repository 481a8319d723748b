"""Text helpers for terminals: escaping, durations, sparklines, progress bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
"""For terminals without Unicode."""
GIB, MIB = 1 << 30, 1 << 20


def printable(text: str) -> str:
    """Replace control characters: files of a run may contain terminal escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text)


def first_line(error: BaseException) -> str:
    """First line of an error message; the class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def duration(seconds: float) -> str:
    """Format a time span in its two largest units: 7 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    rest = round(seconds)
    if rest < 60:
        return f"{rest} s"
    if rest < 3600:
        return f"{rest // 60} min {rest % 60} s"
    if rest < 86400:
        return f"{rest // 3600} h {rest % 3600 // 60} min"
    return f"{rest // 86400} d {rest % 86400 // 3600} h"


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Draw a curve in at most `width` characters; each is the mean of an equal slice of values."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width <= 0:
        return ""
    count = min(width, len(known))
    edges = [len(known) * i // count for i in range(count + 1)]
    means = [fmean(known[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def progress_bar(share: float, width: int, full: str = "█", empty: str = "░") -> str:
    """Draw a fraction between 0 and 1."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return full * done + empty * (width - done)
