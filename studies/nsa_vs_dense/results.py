"""result.json of an arm and results.json of the study: writers, readers, and how calls are merged.

Schema, version 1. results.json is one object: `schema`, `table` (the file of the arms), `calls`
(each with `command`, `started`, `seconds`, `price_per_hour`, `cost`), `arms` (what train_arm.py
found of each, in the order of the table), `failed` (`name`, `reason`). result.json is one object of
`arms` with `schema`. `tokens_per_s` of an arm is null where it shared the device; `speed_steps` is
null where the speed is that of the whole run, or the number of updates that were done alone for it
afterwards. Page: docs/schemas/study_results.md.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.files import write_text
from nsa.records.heartbeat import strict

SCHEMA = 1
NAME = "results.json"
FIELDS = ("schema", "table", "calls", "arms", "failed")
ARM_FIELDS = (
    *("name", "comparison", "variant", "seed", "steps", "config", "settings", "environ"),
    *(
        "held_out_tokens",
        "data",
        "params",
        "machine",
        "tokens_per_step",
        "tokens_per_s",
        "speed_steps",
        "peak_mem_mib",
    ),
    *("resumed_at", "seconds", "training", "val", "gates", "reads", "held_out", "selection"),
)
IDENTITY = ARM_FIELDS[:10]
"""What decides the numbers of an arm."""


def write_arm(path: Path, arm: dict[str, Any]) -> None:
    """Write result.json; it is there when the arm is finished, and not before."""
    assert tuple(arm) == ARM_FIELDS, "a result has all fields, in their order"
    write_text(path, json.dumps(strict({"schema": SCHEMA, **arm}), allow_nan=False) + "\n")


def read_arm(path: Path) -> dict[str, Any]:
    """Read result.json."""
    content = _load(path)
    _check_schema(path, content)
    content.pop("schema")
    return _checked_arm(path, content)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace results.json."""
    content = {"schema": SCHEMA, **results}
    assert tuple(content) == FIELDS, "results have all fields, in their order"
    write_text(path, json.dumps(strict(content), allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Read results.json; refuses any other file."""
    content = _load(path)
    _check_schema(path, content)
    for key, kind in (("table", str), ("calls", list), ("arms", list), ("failed", list)):
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{path} has no {key}; it is no {NAME} of this study")
    content["arms"] = [_checked_arm(path, arm) for arm in content["arms"]]
    return content


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several calls as one; of an arm that was done twice the later one counts.

    Arms of a comparison must have had the same data and the same steps, or they cannot be compared.
    """
    arms = {arm["name"]: arm for part in parts for arm in part["arms"]}
    for arm in arms.values():
        first = next(a for a in arms.values() if a["comparison"] == arm["comparison"])
        for key in ("steps", "data", "tokens_per_step", "held_out_tokens"):
            if first[key] != arm[key]:
                raise ValueError(
                    f"{first['name']} and {arm['name']} differ in {key} ({first[key]} and "
                    f"{arm[key]}) and cannot be compared; leave one of the files out"
                )
    failed = {entry["name"]: entry for part in parts for entry in part["failed"]}
    return {
        "table": parts[-1]["table"],
        "calls": [call for part in parts for call in part["calls"]],
        "arms": sorted(arms.values(), key=lambda a: (a["comparison"], a["variant"], a["seed"])),
        "failed": [entry for name, entry in failed.items() if name not in arms],
    }


def gap(arm: dict[str, Any], dense: dict[str, Any]) -> tuple[float, float]:
    """Held-out loss of an arm minus that of the dense one of its seed, and the standard error of
    that difference: both have read the same rows, so it is taken row by row."""
    pairs = zip(arm["held_out"]["row_losses"], dense["held_out"]["row_losses"], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), error


def dense_twin(arm: dict[str, Any], arms: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The dense arm of the same comparison and seed, where it is there."""
    return next(
        (
            other
            for other in arms
            if (other["comparison"], other["seed"]) == (arm["comparison"], arm["seed"])
            and other["variant"] == "dense"
        ),
        None,
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); name a {NAME} of run.py") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; name a {NAME} of run.py")
    return content


def _check_schema(path: Path, content: dict[str, Any]) -> None:
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {content.get('schema')!r}; this program reads {SCHEMA}; use the "
            "program that wrote it"
        )


def _checked_arm(path: Path, arm: Any) -> dict[str, Any]:
    missing = set(ARM_FIELDS) - set(arm if isinstance(arm, dict) else ()) - {"speed_steps"}
    if missing:
        raise ValueError(f"{path}: an arm lacks {', '.join(sorted(missing))}; train it again")
    # Before arms could be timed afterwards, no result had the field: null is what it would be.
    return {key: arm.get(key) for key in ARM_FIELDS}
