"""dtypes_report.txt and opt_state_mb.txt: the types of the weights, and what the optimizer holds.

Schema, version 1. dtypes_report.txt: a line `version 1`, a line `compute TYPE` (the precision that
products are computed in), then for every parameter its name, dtype and shape, as
`blocks.0.mlp.fc1.weight float32 3072x768`. opt_state_mb.txt: one number, the MiB of all tensors in
the optimizer's state after its first update. Both are written once for each start of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.files import read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.best_effort import best_effort

if TYPE_CHECKING:  # readers of run folders start without torch
    from torch import Tensor

DTYPES = "dtypes_report.txt"
OPT_STATE = "opt_state_mb.txt"
VERSION = 1
MIB = 2**20


class ParameterType(NamedTuple):
    """A parameter's line of dtypes_report.txt."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class DtypesReport(NamedTuple):
    """dtypes_report.txt."""

    compute: str
    parameters: list[ParameterType]


def write_dtypes(folder: Path, compute: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Write the types of all parameters; a full disk costs the file, not the run."""
    lines = [f"version {VERSION}", f"compute {compute}"]
    for name, x in parameters:
        shape = "x".join(map(str, x.shape)) or "scalar"
        lines.append(f"{name} {str(x.dtype).removeprefix('torch.')} {shape}")
    with best_effort(folder / DTYPES):
        write_text(folder / DTYPES, "\n".join(lines) + "\n")


def read_dtypes(folder: Path) -> DtypesReport:
    """Read dtypes_report.txt of a run folder."""
    path = folder / DTYPES
    lines = [line.split(" ") for line in read_text(path).splitlines()]
    kinds = [line[0] for line in lines[:2]]
    if kinds != ["version", "compute"] or lines[0][1:] != [str(VERSION)]:
        raise ValueError(
            f"{path} does not begin with 'version {VERSION}' and 'compute TYPE'; "
            "it is of another version or another program"
        )
    try:
        found = [ParameterType(name, dtype, _shape(shape)) for name, dtype, shape in lines[2:]]
    except ValueError as error:
        raise ValueError(f"{path} has a line that is not 'name dtype shape' ({error})") from None
    return DtypesReport(lines[1][1], found)


def write_opt_state(folder: Path, state_dict: Mapping[str, Any]) -> None:
    """Write the size of an optimizer's state; a full disk costs the file, not the run."""
    with best_effort(folder / OPT_STATE):
        write_text(folder / OPT_STATE, f"{_num_bytes(state_dict) / MIB:.4f}\n")


def read_opt_state(folder: Path) -> float:
    """Read opt_state_mb.txt of a run folder: MiB."""
    text = read_text(folder / OPT_STATE)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{folder / OPT_STATE} holds {text[:40]!r}, not a number of MiB; remove the file"
        ) from None


def _num_bytes(value: Any) -> int:
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_num_bytes(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_bytes(inner) for inner in value)
    return 0


def _shape(text: str) -> tuple[int, ...]:
    return () if text == "scalar" else tuple(int(size) for size in text.split("x"))
