"""Draw the pictures of docs/concepts/nsa.md from real selections.

    nsa train --config quickstart nsa.n_sel=6 train.seq_len=512 train.batch_size=2 \\
        train.out_dir=artifacts/concepts
    python scripts/draw_concepts.py --model artifacts/concepts --out docs/concepts

Two pictures show a recorded selection of a 30M model on 8192 tokens (bench/recorded), the third one
how a byte model that was just trained chooses blocks of held-out text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

import nsa
from bench.attention.selections import read_selection
from nsa.config import StrictParser

RECORDED = Path(__file__).resolve().parents[1] / "bench/recorded/selection-30m-8192-nsa-s1.npz"
# Colours that stay apart for colour-blind readers.
CMP, SEL, FORCED, WIN, DENSE = "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#999999"
LAYER, GROUP, QUERY = 7, 0, 6500
"""What is drawn of the recorded selection."""


def main(argv: list[str] | None = None) -> int:
    """Write the pictures."""
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="run folder of the byte model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args(argv)
    selection, spec = read_selection(RECORDED)
    rows = selection[LAYER, :, GROUP]  # [S, n_sel]
    draw_one_query(rows, spec, QUERY, args.out / "one-query.png")
    draw_map(rows, spec, args.out / "selection-map.png")
    draw_choice(args.model, args.out / "choice.png")
    return 0


# --- what one query reads ---


def draw_one_query(rows: Tensor, spec: nsa.BlockSpec, t: int, path: Path) -> None:
    """Four bands over the sequence: dense attention, and the three branches of one query."""
    forced, free = _split(rows[t], spec, t)
    num_cmp = spec.num_cmp(t + 1)
    sel_tokens = spec.num_selected_tokens(t + 1)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.broken_barh([(0, t + 1)], (3, 0.7), color=DENSE)
    # Thin: the whole past, at a sixteenth of its resolution with the usual sizes.
    axes.broken_barh([(0, (num_cmp - 1) * spec.d + spec.l)], (2.25, 0.2), color=CMP)
    for blocks, color in ((forced, FORCED), (free, SEL)):
        spans = [(j * spec.l_sel, min(spec.l_sel, t + 1 - j * spec.l_sel)) for j in blocks]
        axes.broken_barh(spans, (1, 0.7), color=color)
    axes.broken_barh([(t - spec.w + 1, spec.w)], (0, 0.7), color=WIN)
    reads = num_cmp + sel_tokens + spec.w
    labels = (
        f"window\n{spec.w} tokens",
        f"selected\n{sel_tokens} tokens in {len(forced) + len(free)} blocks",
        f"compressed\n{num_cmp} tokens, one per {spec.d}",
        f"dense attention\n{t + 1} tokens",
    )
    axes.set_yticks([0.35, 1.35, 2.35, 3.35], labels)
    axes.set_xlim(0, rows.shape[0])
    axes.axvline(t, color="black", linewidth=1)
    axes.text(t + 60, 3.3, "query", va="center")
    axes.text(t + 60, 1.5, "forced: first, previous, own", va="center", color=FORCED, fontsize=8)
    axes.text(t + 60, 1.2, "chosen by score", va="center", color=SEL, fontsize=8)
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_title(f"What the query at {t} reads: {reads} tokens instead of {t + 1}", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


def _split(row: Tensor, spec: nsa.BlockSpec, t: int) -> tuple[list[int], list[int]]:
    """The forced blocks of a query, and the others that it reads."""
    current = t // spec.l_sel
    forced = sorted({0, max(current - 1, 0), current})
    return forced, [j for j in row.tolist() if j >= 0 and j not in forced]


# --- the selections of all queries ---


def draw_map(rows: Tensor, spec: nsa.BlockSpec, path: Path) -> None:
    """Every query from top to bottom, every block from left to right."""
    every = 16  # queries; neighbours differ little
    ids = rows[every - 1 :: every].numpy()  # [rows, n_sel]
    current = (np.arange(ids.shape[0]) * every + every - 1) // spec.l_sel
    picture = np.zeros((ids.shape[0], spec.num_blocks(rows.shape[0])))
    picture[np.arange(picture.shape[1])[None, :] <= current[:, None]] = 1
    row, place = np.nonzero(ids >= 0)
    picture[row, ids[row, place]] = 2
    for block in (np.zeros_like(current), np.maximum(current - 1, 0), current):
        picture[np.arange(len(current)), block] = 3
    figure = Figure(figsize=(7, 5.6), layout="constrained")
    axes = figure.add_subplot()
    colors = ListedColormap(["white", "#eeeeee", SEL, FORCED])
    extent = (0, picture.shape[1], rows.shape[0], 0)
    axes.imshow(picture, cmap=colors, aspect="auto", extent=extent, interpolation="nearest")
    axes.set_xlabel(f"block of {spec.l_sel} tokens")
    axes.set_ylabel("position of the query")
    axes.text(75, 700, "the future", color="#999999")
    for y, color, text in ((1500, SEL, "chosen by score"), (1900, FORCED, "forced")):
        axes.text(75, y, text, color=color)
    axes.text(75, 2300, "not read", color="#bbbbbb")
    title = f"A layer of a trained model: {spec.n_sel} blocks for each query"
    axes.set_title(title, fontsize=11)
    _save(figure, path)


# --- how one query chooses ---


def draw_choice(folder: Path, path: Path) -> None:
    """Probabilities of compressed tokens, scores of blocks, and the text of the blocks."""
    text, spec, probs, scores, row = _choice_of(folder)
    t = len(text) - 1
    forced, free = _split(row, spec, t)
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 2.6))
    starts = np.arange(len(probs)) * spec.d
    left.barh(starts + spec.l / 2, probs, height=spec.d * 0.8, color=CMP)
    left.set_title("1. weight of each\ncompressed token", fontsize=10)
    blocks = np.arange(len(scores))
    colors = [FORCED if j in forced else SEL if j in free else DENSE for j in blocks]
    middle.barh((blocks + 0.5) * spec.l_sel, scores, height=spec.l_sel * 0.8, color=colors)
    middle.set_title("2. score of each block:\nthe weights inside it", fontsize=10)
    right.set_title(f"3. the {spec.n_sel} blocks that are read", fontsize=10)
    for j in blocks:
        line = text[j * spec.l_sel : (j + 1) * spec.l_sel].replace("\n", "\u21b5")
        read = j in forced or j in free
        color = FORCED if j in forced else SEL if read else "#aaaaaa"
        word = "forced" if j in forced else "best scores" if read else ""
        style: dict[str, Any] = dict(va="center", family="monospace", fontsize=9)
        right.text(0.0, (j + 0.5) * spec.l_sel, line, color="black" if read else "#aaaaaa", **style)
        right.text(0.6, (j + 0.5) * spec.l_sel, word, color=color, va="center", fontsize=9)
    right.set_axis_off()
    left.set_ylabel("position in the text (bytes)")
    left.set_ylim(len(text), 0)
    left.set_yticks(range(0, len(text) + 1, 2 * spec.l_sel))
    for axes in (left, middle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([])
    _save(figure, path)


def _choice_of(folder: Path) -> tuple[str, nsa.BlockSpec, Any, Any, Tensor]:
    """Of the last byte of a held-out text, in the last layer: weights, scores, and its blocks."""
    from nsa.data.documents import read_works, split_works
    from nsa.ops.reference import block_scores
    from nsa.train import load_model

    model, config = load_model(folder / "model.pt")
    held_out = split_works(read_works().values())[1]
    long = (piece.encode() for piece in held_out if len(piece) >= config.train.seq_len)
    text = next(long)[: config.train.seq_len]
    ids = torch.tensor([list(text)])
    calls: list[tuple[Tensor, ...]] = []

    def recorded(*tensors: Any, **options: Any) -> Any:
        calls.append(tensors)
        return nsa.nsa_attention(*tensors, **options)

    with mock.patch("nsa.model.attention.nsa_attention", recorded), torch.no_grad():
        model.eval()(ids)
    q, k_cmp, spec = calls[-1][0], calls[-1][1], calls[-1][-1]
    assert isinstance(spec, nsa.BlockSpec)
    scale = q.shape[-1] ** -0.5
    scores = block_scores(q, k_cmp, spec, scale=scale, doc_lens=[ids.shape[1]])[0]
    # The group's heads together, as the scores have them: [heads, N] of the last query.
    logits = torch.einsum("hk,nk->hn", q[0, -1], k_cmp[0, :, 0]) * scale
    probs = logits.softmax(dim=-1).sum(dim=0)
    row = nsa.select_blocks(q, k_cmp, spec)[0, -1, 0]
    return text.decode(), spec, probs.numpy(), scores[0, -1, 0].numpy(), row


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130, facecolor="white")


if __name__ == "__main__":
    raise SystemExit(main())
