"""The pictures of the study, each of one results.json: curves, and what a model does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from nsa.files import replacing
from studies.nsa_vs_dense.results import dense_twin

# Colours that stay apart for colour-blind readers.
COLOURS = {"dense": "#333333", "nsa": "#0072b2", "nsa-mlp": "#d55e00", "nsa-sigmoid": "#cc79a7"}
OTHERS = ("#009e73", "#e69f00", "#56b4e9", "#8c6d31", "#9467bd")
SEEDS = ("-", (0, (4, 1.5)), ":")
BRANCHES = ("compressed", "selected", "window")
GOAL = 0.02
"""Nats that NSA may lose against dense attention."""
WIDTH = 8.3
Arms = Sequence[dict[str, Any]]


def draw_curves(arms: Arms, path: Path) -> None:
    """Training and held-out loss of a comparison, and below them the gap to the dense arm."""
    figure = new_figure(6.2)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    for arm in arms:
        style = _style(arm, arms)
        training, val = arm["training"], arm["val"]
        top.plot(training["step"], _smooth(training["loss"]), linewidth=0.9, alpha=0.45, **style)
        top.plot(
            val["step"],
            val["loss"],
            linewidth=1.8,
            marker="o",
            markersize=3,
            label=_label(arm),
            **style,
        )
        twin = dense_twin(arm, arms)
        if twin is not None and twin is not arm:
            gaps = _gaps(val, twin["val"])
            low.plot(*zip(*gaps, strict=True), linewidth=1.5, marker="o", markersize=3, **style)
    low.axhspan(-GOAL, GOAL, color="#cccccc", alpha=0.5, linewidth=0)
    low.axhline(0, color="#333333", linewidth=0.8)
    low.set_ylim(*_gap_limits(arms))
    top.set_ylim(*_loss_limits(arms))
    top.set_ylabel("loss, nats per token")
    low.set_ylabel("held-out loss\nminus dense, nats")
    low.set_xlabel("step (optimizer updates)")
    top.set_title(f"{_title(arms)}. Points: held-out text; thin: training, smoothed", **LEFT)
    low.set_title(f"grey band: within {GOAL} nats of dense with the same seed", **LEFT)
    top.legend(frameon=False, fontsize=9)
    finish(figure, path)


def draw_positions(arms: Arms, path: Path) -> None:
    """Held-out loss by the place of a token in its row: is more context still of use?"""
    figure = new_figure(3.4)
    axes = figure.subplots()
    for arm in arms:
        bins = arm["held_out"]["by_position"]
        axes.plot(
            bins["until"],
            bins["loss"],
            marker="o",
            markersize=3,
            label=_label(arm),
            **_style(arm, arms),
        )
    axes.set_xlabel("tokens before (end of the bin)")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"{_title(arms)}: held-out loss by position", **LEFT)
    axes.legend(frameon=False, fontsize=9)
    finish(figure, path)


def draw_gates(arm: dict[str, Any], path: Path) -> None:
    """The share of each branch in the gates of every layer, over the training."""
    gates = arm["gates"]
    num_layers = len(gates["shares"][0])
    figure = new_figure(3.2)
    panels = figure.subplots(1, 3, sharey=True)
    for branch, (axes, name) in enumerate(zip(panels, BRANCHES, strict=True)):
        for layer in range(num_layers):
            shares = [step[layer][branch] for step in gates["shares"]]
            axes.plot(gates["step"], shares, color=_shade(layer, num_layers), linewidth=1.3)
        axes.axhline(1 / 3, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(name, **LEFT)
        axes.set_xlabel("step")
    panels[0].set_ylabel("share of the gate")
    panels[0].set_ylim(bottom=0)
    _layer_bar(figure, panels, num_layers)
    figure.suptitle(f"{arm['name']}: what the gates give to each branch", **TOP)
    finish(figure, path)


def draw_distances(arm: dict[str, Any], path: Path) -> None:
    """How far back the queries read, by layer, beside blocks drawn at random."""
    found = arm["selection"]
    names = _distance_names(found["edges"], found["block_tokens"])
    places = range(len(names))
    num_layers = len(found["distances"])
    figure = new_figure(3.8)
    axes = figure.subplots()
    means = [100 * fmean(layer[i] for layer in found["distances"]) for i in places]
    axes.bar(places, means, color="#d7e6f2", label="mean of the layers", width=0.75)
    for layer, shares in enumerate(found["distances"]):
        style = {
            "color": _shade(layer, num_layers),
            "linewidth": 1.1,
            "marker": "o",
            "markersize": 3,
        }
        axes.plot(places, [100 * share for share in shares], **style)
    random = [100 * share for share in found["random_distances"]]
    axes.plot(places, random, "kx", markersize=6, label="blocks drawn at random")
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_xlabel(f"distance of the block, tokens (blocks of {found['block_tokens']})")
    axes.set_ylabel("share of reads, %")
    axes.set_title(
        f"{arm['name']}: how far back queries read (own, previous, first: always)", **LEFT
    )
    axes.legend(frameon=False, fontsize=9)
    _layer_bar(figure, [axes], num_layers)
    finish(figure, path)


def draw_overlap(arm: dict[str, Any], path: Path) -> None:
    """How alike the blocks of neighbours are: shared with a later query, and put together."""
    found = arm["selection"]
    num_layers = len(found["overlap"])
    figure = new_figure(3.8)
    left, right = figure.subplots(1, 2)
    for layer in range(num_layers):
        style = {
            "color": _shade(layer, num_layers),
            "marker": "o",
            "markersize": 3,
            "linewidth": 1.2,
        }
        left.plot(found["lags"], [100 * x for x in found["overlap"][layer]], **style)
        right.plot(found["tiles"], found["union"][layer], **style)
    left.plot(found["lags"], [100 * x for x in found["random_overlap"]], "k--", linewidth=1)
    right.plot(found["tiles"], found["random_union"], "k--", linewidth=1, label="drawn at random")
    for axes, at in ((left, found["lags"]), (right, found["tiles"])):
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(x) for x in at], fontsize=8)
        axes.minorticks_off()
    left.set_ylim(0, 100)
    right.set_ylim(bottom=0)
    left.set_xlabel("tokens between the two queries")
    left.set_ylabel("scored blocks in common, %")
    right.set_xlabel("neighbouring queries in a tile")
    right.set_ylabel("blocks that the tile reads / n")
    right.legend(frameon=False, fontsize=9)
    _layer_bar(figure, [left, right], num_layers)
    figure.suptitle(f"{arm['name']}: how alike the blocks of neighbours are", **TOP)
    finish(figure, path)


LEFT: dict[str, Any] = {"loc": "left", "fontsize": 9.5}
TOP: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 10}


def new_figure(height: float) -> Any:
    """An empty picture of the usual width."""
    # Only who draws needs it: pip install 'nsa[plot]'. Without pyplot: no window, no global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=130, layout="constrained")


def finish(figure: Any, path: Path, *, grid: bool = True) -> None:
    """Give all panels the same look, and write the file."""
    for axes in figure.axes:
        if axes.get_label() != "<colorbar>":
            axes.spines[["top", "right"]].set_visible(False)
            if grid:
                axes.grid(alpha=0.25, linewidth=0.6)
                axes.set_axisbelow(True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", facecolor="white")


def _style(arm: dict[str, Any], arms: Arms) -> dict[str, Any]:
    unknown = sorted({a["variant"] for a in arms} - set(COLOURS))
    colour = COLOURS.get(arm["variant"]) or OTHERS[unknown.index(arm["variant"]) % len(OTHERS)]
    seeds = sorted({a["seed"] for a in arms})
    return {"color": colour, "linestyle": SEEDS[seeds.index(arm["seed"]) % len(SEEDS)]}


def _label(arm: dict[str, Any]) -> str:
    return f"{arm['variant']}, seed {arm['seed']}: {arm['held_out']['loss']:.3f}"


def _title(arms: Arms) -> str:
    first = arms[0]
    tokens = first["steps"] * first["tokens_per_step"] / 1e6
    return f"{first['comparison']}: {first['steps']} steps, {tokens:,.1f}M tokens"


def _gaps(ours: dict[str, Any], dense: dict[str, Any]) -> list[tuple[int, float]]:
    """The difference at the steps at which both were evaluated."""
    at = dict(zip(dense["step"], dense["loss"], strict=True))
    pairs = zip(ours["step"], ours["loss"], strict=True)
    return [(step, loss - at[step]) for step, loss in pairs if step in at]


def _gap_limits(arms: Arms) -> tuple[float, float]:
    """The later half decides: the first gaps are large and say little."""
    late = [0.0]
    for arm in arms:
        twin = dense_twin(arm, arms)
        gaps = _gaps(arm["val"], twin["val"]) if twin else []
        late += [gap for _, gap in gaps[len(gaps) // 3 :]]
    reach = max(2.5 * GOAL, 1.25 * max(map(abs, late)))
    return -reach, reach


def _loss_limits(arms: Arms) -> tuple[float, float]:
    """From the best loss to about that of the second evaluation: the fall from ln V is no news."""
    losses = [
        loss for arm in arms for loss in (*arm["val"]["loss"], *_smooth(arm["training"]["loss"]))
    ]
    early = [arm["val"]["loss"][min(1, len(arm["val"]["loss"]) - 1)] for arm in arms]
    lowest, highest = min(losses), max(early)
    room = 0.06 * (highest - lowest) or 0.1
    return lowest - room, highest + 3 * room


def _smooth(losses: Sequence[float], reach: int = 3) -> list[float]:
    """Median of up to `reach` neighbours on both sides."""
    sides = (min(i, len(losses) - 1 - i, reach) for i in range(len(losses)))
    return [median(losses[i - side : i + side + 1]) for i, side in enumerate(sides)]


def _shade(layer: int, num_layers: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.92 * layer / max(1, num_layers - 1))


def _layer_bar(figure: Any, axes: Sequence[Any], num_layers: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    shades = ListedColormap([_shade(layer, num_layers) for layer in range(num_layers)])
    scale = ScalarMappable(Normalize(-0.5, num_layers - 0.5), shades)
    bar = figure.colorbar(scale, ax=list(axes), pad=0.01, aspect=25)
    bar.set_label("layer", fontsize=9)
    bar.set_ticks(sorted({0, num_layers // 2, num_layers - 1}))


def _distance_names(edges: Sequence[int], block_tokens: int) -> list[str]:
    """Own block, the one before, then the far end of each bin; the first block last."""
    far = [f"to\n{_short(edge * block_tokens)}" for edge in edges[2:]]
    return ["own\nblock", "block\nbefore", *far, "first\nblock"]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
