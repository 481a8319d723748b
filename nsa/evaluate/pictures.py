"""The pictures of an evaluation: the needle grid, and the loss by position and context.

matplotlib is optional: the extra `plot` installs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.data.errors import need
from nsa.evaluate.results import Evaluation
from nsa.files import replacing

PICTURES = ("needle.png", "perplexity.png")


def draw(folder: Path, found: Evaluation) -> list[Path]:
    """Write the pictures of what was measured; returns their paths."""
    drawn = []
    if found.needle is not None:
        grid = found.needle
        figure = _new_figure(1.2 * len(grid["lengths"]) + 3, 4)
        axes = figure.subplots()
        shares = shares_of(grid["right"], grid["asked"]).T  # [depths, lengths]
        image = draw_shares(axes, shares, map(short, grid["lengths"]), grid["depths"])
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("depth of the needle, %")
        figure.colorbar(image, ax=axes, label="right answers, %")
        _save(figure, folder / PICTURES[0], found.model)
        drawn.append(folder / PICTURES[0])
    if found.perplexity is not None:
        figure = _new_figure(8, 3.4)
        _draw_losses(figure, found.perplexity)
        _save(figure, folder / PICTURES[1], found.model)
        drawn.append(folder / PICTURES[1])
    return drawn


def draw_shares(axes: Any, shares: NDArray[Any], names: Any, depths: Sequence[float]) -> Any:
    """A heat map of percentages [depths, columns], with their numbers; returns the image."""
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (depth, place), share in np.ndenumerate(shares):
        style = {"ha": "center", "va": "center", "fontsize": 7}
        axes.text(place, depth, f"{share:.0f}", color="black" if share > 60 else "white", **style)
    names = list(names)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    return image


def shares_of(right: Any, asked: Any) -> NDArray[np.float64]:
    """Right answers in percent."""
    return 100 * np.array(right) / np.maximum(1, asked)


def short(length: int) -> str:
    """A number of tokens: 8k for 8192."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _draw_losses(figure: Any, found: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(found["until"], found["loss_at"], marker="o", markersize=3)
    left.set_xlabel(f"position in a row of {found['length']} tokens")
    left.set_ylabel("loss, nats per token")
    right.plot(found["lengths"], found["loss_of"], marker="o", markersize=3)
    right.set_xscale("log", base=2)
    right.set_xticks(found["lengths"], [short(n) for n in found["lengths"]])
    right.set_xlabel(f"context of the last {found['targets']} tokens")


def _new_figure(width: float, height: float) -> Any:
    need("matplotlib", "a picture", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
