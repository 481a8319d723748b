"""dtypes_report.txt and opt_state_mb.txt: the types of the weights, and what the optimizer holds.

Schema, version 1. dtypes_report.txt: a line `version 1`, a line `compute TYPE` (the precision that
products are computed in), then for every parameter its name, dtype and shape, as
`blocks.0.mlp.fc1.weight float32 3072x768`. opt_state_mb.txt: one number, the MiB of all tensors in
the optimizer's state after its first update. Both are written once for each start of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.files import best_effort, read_text, replacing, write_text
from nsa.records.tables import TrainingRow, ValRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


# sample.txt: a text that the trained model wrote, as it came.

SAMPLE_NAME = "sample.txt"


def write_sample(folder: Path, text: str) -> Path:
    """Write the text, prompt first."""
    write_text(folder / SAMPLE_NAME, text)
    return folder / SAMPLE_NAME


def read_sample(folder: Path) -> str:
    """Read the text back, with its line ends as they are."""
    return read_text(folder / SAMPLE_NAME)


# loss_curve.png: the loss of the training steps and on held-out text, step by step.

CURVE_NAME = "loss_curve.png"


class PlotUnavailable(RuntimeError):
    """matplotlib is not installed; everything else of a run works without it."""


def draw_loss_curve(
    folder: Path, training: Sequence[TrainingRow], val: Sequence[ValRow], title: str
) -> Path:
    """Draw the curve of a run, and replace the picture in its folder."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no global state
    except ModuleNotFoundError:
        raise PlotUnavailable(
            f"{CURVE_NAME} needs matplotlib; install it with "
            "`pip install -c constraints.txt -e '.[plot]'`"
        ) from None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    _draw(figure.subplots(), training, val, title)
    with replacing(folder / CURVE_NAME) as temporary:
        figure.savefig(temporary, format="png")
    return folder / CURVE_NAME


def _draw(axes: Axes, training: Sequence[TrainingRow], val: Sequence[ValRow], title: str) -> None:
    steps, losses = [row.step for row in training], [row.loss for row in training]
    axes.plot(steps, losses, color="#9db8d9", linewidth=1, label="training, each logged step")
    axes.plot(steps, _smooth(losses), color="#1f4e8c", linewidth=2, label="training, smoothed")
    if val:
        at, held_out = [row.step for row in val], [row.loss for row in val]
        axes.plot(at, held_out, "o--", color="#c8501e", markersize=5, label="held-out text")
        _note(axes, at[-1], held_out[-1])
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _note(axes: Axes, step: int, loss: float) -> None:
    """Write the last held-out loss at its point: the number that one looks for."""
    axes.annotate(
        f"{loss:.3f}",
        (step, loss),
        (0, -17),
        textcoords="offset points",
        ha="center",
        color="#c8501e",
    )


def _smooth(losses: Sequence[float], reach: int = 4) -> list[float]:
    """Median of up to `reach` neighbours on both sides: exact where the loss only falls."""
    sides = (min(i, len(losses) - 1 - i, reach) for i in range(len(losses)))
    return [median(losses[i - side : i + side + 1]) for i, side in enumerate(sides)]
