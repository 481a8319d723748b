"""Thresholds from limits.toml as typed values, one set per kind of device.

`python -m nsa.operate.limits PAGE` rewrites the tables in a documentation page.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.config.check import nearest
from nsa.config.describe import markdown_table

HALTING = ("heartbeat_stall", "throughput_flatline", "gate_collapse", "zero_grad", "nan_loss")
"""Alarms that make the watchdog stop the run; all others are only logged."""
FILE = Path(__file__).with_name("limits.toml")
KINDS = ("cuda", "cpu", "h200")
"""Kinds of device: any GPU, the CPU, and GPUs whose name contains the kind."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The thresholds for one kind of device; limits.toml has the unit and meaning of each."""

    stall_s: float
    stall_gaps: float
    stall_longest: float
    first_step_s: float
    pause_s: float
    gone_s: float
    flatline_n: int
    flatline_share: float
    flatline_s: float
    flatline_usual_n: int
    gate_n: int
    gate_entropy: float
    gate_max: float
    zero_grad_n: int
    zero_grad: float
    bad_grad_n: int
    spike_n: int
    spike_usual_n: int
    spike_deviations: float
    spike_rise: float
    plateau_steps: int
    plateau_share: float
    plateau_gain: float
    plateau_lines: int
    creep_lines: int
    creep_mib: float
    creep_share: float
    fallbacks_n: int
    fallbacks_rise: int
    free_gib: float
    free_checkpoints: float
    fetch_s: float
    gate_entropy_low: float
    halt_after_s: float
    dump_after_s: float
    term_after_s: float
    kill_after_s: float
    steps_launch: int
    steps_phase1: int
    steps_phase2: int
    steady_lines: int
    toks_per_s_min: float
    stable_share: float
    step_time_ratio: float
    gpu_util_pct: float
    memory_gib: float
    memory_gib_phase2: float
    collapse_fraction: float
    fallbacks_max: int
    first_batch_s: float
    loss_start_nats: float
    leak_nats: float
    pilot_h: float
    write_mib_per_s: float
    memory_share: float
    parity_fp32: float
    parity_bf16: float
    parity_fp16: float
    parity_grad: float
    parity_rows: float
    all_reduce_s: float
    eta_h: float


Entries = dict[str, dict[str, dict[str, Any]]]
"""limits.toml: group -> name -> values by kind, unit and meaning."""


def read_limits() -> Entries:
    """limits.toml as parsed."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _by_kind(groups: Entries) -> dict[str, Limits]:
    entries = {name: entry for group in groups.values() for name, entry in group.items()}
    values: dict[str, Any]
    found = {}
    for kind in KINDS:
        # A kind without its own value uses the general GPU value.
        values = {name: entry.get(kind, entry["cuda"]) for name, entry in entries.items()}
        found[kind] = Limits(**values)
    return found


# Parsed at import: a missing or unknown name in limits.toml fails at once.
BY_KIND = _by_kind(read_limits())
GPU, CPU = BY_KIND["cuda"], BY_KIND["cpu"]


def limits_for(device: str | None, gpu_name: str | None = None) -> Limits:
    """Limits for a device as metrics.json names it, like cuda:0; GPU limits if unknown.

    `gpu_name` is the GPU name in env.json; a matching kind overrides the general GPU limits.
    """
    kind = (device or "").partition(":")[0]
    if kind != "cpu" and gpu_name:
        # "NVIDIA H200" selects the kind h200.
        kind = next((known for known in KINDS if known in gpu_name.lower()), kind)
    return BY_KIND.get(kind, GPU)


def with_values(limits: Limits, values: Mapping[str, float]) -> Limits:
    """Replace limits by name; reject unknown names and invalid values."""
    known = {item.name: type(getattr(limits, item.name)) for item in dataclasses.fields(Limits)}
    replaced: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"{name!r} is not a limit; the nearest is {nearest(name, known)!r}; "
                "nsa/operate/limits.toml lists them"
            )
        # int(2.5) != 2.5 rejects a fraction for a whole-number limit; NaN fails the range test.
        if not 0 <= value < float("inf") or known[name](value) != value:
            kind = "a whole number" if known[name] is int else "a finite number"
            raise ValueError(f"limit {name}={value:g} is not {kind} >= 0; use one")
        replaced[name] = known[name](value)
    return dataclasses.replace(limits, **replaced)


def limit_table(group: str) -> str:
    """All limits of a group with their value per kind of device, as a Markdown table."""
    rows = [("limit", *KINDS, "unit", "meaning")]
    for name, entry in read_limits()[group].items():
        values = (f"{getattr(BY_KIND[kind], name):g}" for kind in KINDS)
        rows.append((f"`{name}`", *values, entry["unit"], entry["meaning"]))
    return markdown_table(rows)


def refresh(page: str) -> str:
    """Return a documentation page with its limit tables regenerated."""
    found = False
    for group in read_limits():
        begin, end = f"<!-- begin limits {group} -->", f"<!-- end limits {group} -->"
        if begin in page and end in page:
            found = True
            above, below = page.partition(begin)[0], page.partition(end)[2]
            page = f"{above}{begin}\n{limit_table(group)}\n{end}{below}"
    if not found:
        names = " or ".join(read_limits())
        raise ValueError(f"the page has no <!-- begin limits {names} --> with its end; add both")
    return page


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(refresh(document.read_text(encoding="utf-8")), encoding="utf-8")
