"""Where healthy ends: every threshold of the watchdog and the monitor, once, by kind of device.

docs/operate.md holds the table of them; `python -m nsa.operate.limits docs/operate.md` renews it.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config.describe import markdown_table

HALTING = ("heartbeat_stall", "throughput_flatline", "gate_collapse", "zero_grad", "nan_loss")
"""Alarms after which going on wastes the machine: it is asked to stop. Others are only said."""


def _limit(value: float, unit: str, meaning: str) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds for a run on a GPU; `limits_for` has those of other devices."""

    stall_s: float = _limit(180.0, "s", "silence of a rank that is never called a stall")
    stall_gaps: float = _limit(10.0, "x", "nor is silence of so many usual times between beats,")
    stall_longest: float = _limit(3.0, "x", "or of so many times the longest one seen lately")
    first_step_s: float = _limit(
        900.0, "s", "silence allowed before the second update and after the last one"
    )
    pause_s: float = _limit(1800.0, "s", "silence allowed in an evaluation or a checkpoint")
    gone_s: float = _limit(10.0, "s", "silence after which a process that is gone counts as dead")
    flatline_n: int = _limit(4, "lines", "logged in a row that must all be slow")
    flatline_share: float = _limit(0.25, "x", "of the usual tokens/s: below is slow")
    flatline_s: float = _limit(60.0, "s", "that they must span at least")
    flatline_usual_n: int = _limit(8, "lines", "before them that the usual speed needs at least")
    gate_n: int = _limit(3, "lines", "logged in a row with collapsed gates")
    gate_entropy: float = _limit(0.2, "nats", "mean entropy of the gates: below is collapsed")
    gate_max: float = _limit(0.9, "share", "mean of the largest gate: above is collapsed")
    zero_grad_n: int = _limit(2, "lines", "logged in a row whose gradient is zero")
    zero_grad: float = _limit(1e-12, "norm", "gradient that counts as zero")
    bad_grad_n: int = _limit(3, "lines", "logged in a row whose gradient is not finite")
    spike_n: int = _limit(2, "lines", "logged in a row with a loss far above the usual one")
    spike_usual_n: int = _limit(30, "lines", "before them that make the usual loss; half of it do")
    spike_deviations: float = _limit(8.0, "x", "the usual scatter: above is far, if it also is")
    spike_rise: float = _limit(0.5, "nats", "above the usual loss")
    plateau_steps: int = _limit(1000, "steps", "without progress that are a plateau,")
    plateau_share: float = _limit(0.5, "x", "of all steps so far, where that is more")
    plateau_gain: float = _limit(
        0.002, "nats", "fall of the loss, from one half of them to the other, that is progress"
    )
    plateau_lines: int = _limit(100, "lines", "logged that must lie in that span")
    creep_lines: int = _limit(45, "lines", "logged over which memory is compared, in thirds")
    creep_mib: float = _limit(512.0, "MiB", "rise from the first third to the last,")
    creep_share: float = _limit(0.05, "x", "of the first third, where that is more")
    fallbacks_n: int = _limit(5, "lines", "logged in a row with a higher count than before")
    fallbacks_rise: int = _limit(10, "calls", "that they must add up to")
    free_gib: float = _limit(5.0, "GiB", "free on the disk of the run: less is nearly full,")
    free_checkpoints: float = _limit(2.0, "x", "the newest checkpoint, where that is more")
    fetch_s: float = _limit(5.0, "s", "wait for a batch that the monitor marks")
    gate_entropy_low: float = _limit(0.5, "nats", "mean gate entropy that the monitor marks below")
    halt_after_s: float = _limit(0.0, "s", "from the alarm to .HALT")
    dump_after_s: float = _limit(120.0, "s", "from .HALT to SIGUSR1, with --kill")
    term_after_s: float = _limit(30.0, "s", "from SIGUSR1 to SIGTERM, with --kill")
    kill_after_s: float = _limit(300.0, "s", "from SIGTERM to SIGKILL, with --kill")


GPU = Limits()
CPU = dataclasses.replace(GPU, first_step_s=1800.0, creep_mib=1024.0, free_gib=1.0)
"""Slower to start; memory is that of the whole process, which wanders more; smaller files."""
BY_KIND = {"cuda": GPU, "cpu": CPU}


def limits_for(device: str | None) -> Limits:
    """The limits for a device as metrics.json names it, like cuda:0; those of a GPU if unknown."""
    return BY_KIND.get((device or "").partition(":")[0], GPU)


def limit_table() -> str:
    """Every limit with its value on each kind of device, as Markdown."""
    rows = [("limit", *BY_KIND, "unit", "meaning")]
    for item in dataclasses.fields(Limits):
        values = (f"{getattr(limits, item.name):g}" for limits in BY_KIND.values())
        rows.append((f"`{item.name}`", *values, item.metadata["unit"], item.metadata["meaning"]))
    return markdown_table(rows)


def refresh(page: str) -> str:
    """Return the documentation page with its table brought up to date."""
    begin, end = "<!-- begin limits -->", "<!-- end limits -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no {begin} ... {end}; put both lines where it belongs")
    above, below = page.partition(begin)[0], page.partition(end)[2]
    return f"{above}{begin}\n{limit_table()}\n{end}{below}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(refresh(document.read_text(encoding="utf-8")), encoding="utf-8")
