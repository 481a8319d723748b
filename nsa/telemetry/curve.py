"""loss_curve.png: the loss of the training steps and on held-out text, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nsa.telemetry.atomic import replacing
from nsa.telemetry.csv_log import TrainingRow, ValRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "loss_curve.png"


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
            f"{NAME} needs matplotlib; install it with "
            "`pip install -c constraints.txt -e '.[plot]'`"
        ) from None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    _draw(figure.subplots(), training, val, title)
    with replacing(folder / NAME) as temporary:
        figure.savefig(temporary, format="png")
    return folder / NAME


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
