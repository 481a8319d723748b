"""What many GPUs would do: a simulation of training steps, calibrated on measured kernels.

`python bench/scale.py` prints the table of docs/scale.md; `--page docs/scale.md` writes it there.

Nothing here is measured on more than one GPU. A step is a sum of times without any overlap:

    attention   a * S + b * S^2 for a row of S tokens, fitted to docs/results/prefill.json for the
                same heads, divided by the ranks that share the row, times PART_FACTOR
    the rest    operations of all other products over the rate that a measured step reached
    keys        bytes of nsa.parallel.received_bytes for every layer, forward and backward, and once
                more where the forward pass is recomputed
    weights     FSDP over all GPUs: gathered twice and gradients scattered, 2 bytes a number; of
                small models the gradients alone, as DDP sums them

Each cell takes the fastest of the plans that fit the memory and the batch: how many ranks share a
row (cp), and whether layers are recomputed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

from nsa.config import Config, StrictParser, load_config
from nsa.config.describe import fill, markdown_table
from nsa.config.load import REPOSITORY
from nsa.config.schema import ModelConfig
from nsa.model import NSAAttention
from nsa.model.cost import block_spec, forward_flops, parameter_counts, training_memory
from nsa.ops import BlockSpec
from nsa.parallel import Split, received_bytes

NVLINK_BYTES_PER_S = 450e9
"""Per GPU and direction, within a node of NODE GPUs."""
NODE = 8
INFINIBAND_BYTES_PER_S = 50e9
"""Per GPU and direction: 400 Gb/s. Collectives over whole nodes use the adapters of all GPUs."""
REACHED = 0.8
"""Share of a link's speed that a collective reaches."""
START_S, HOP_S = 20e-6, 1e-6
"""Of every collective: a constant, and a time for every node that takes part."""
MEMORY_BYTES = 141e9 * 0.85
"""Of an H200, without a margin for what is not counted."""
REPLICATED_BYTES = 10e9
"""Weights, gradients and moments up to here are whole on every GPU: DDP."""
BUCKET_BYTES = 25e6
"""Gradients that DDP sums in one collective."""
BATCH_TOKENS = 16 << 20
"""Largest global batch. More GPUs than rows need several ranks for each row."""
PART_FACTOR = 1.125
"""Time of the slowest of 8 ranks over the whole divided by 8, measured on one H200 for 256k tokens
(docs/results/parallel.json)."""
MEASURED_STEP = (65536, 0.2533)
"""Tokens and seconds of a compiled step of the 125M model, one H200 (docs/results/training.md)."""
FIT_FROM = 16384
"""Shortest row of the fit: shorter ones go other ways through the kernels."""
COLLECTIVES = 4
"""Of a layer and pass: two halos, compressed and selected keys."""

LENGTHS = (1 << 16, 1 << 18, 1 << 20)
GPUS = (8, 64, 1024)
SHAPES: dict[str, tuple[str, ...]] = {
    "125M": (),
    "8B": (
        *("model.dim=4096", "model.n_layers=32", "model.n_heads=32", "model.n_kv_groups=8"),
        *("model.d_k=128", "model.d_v=128", "model.mlp=gated", "model.mlp_dim=14336"),
    ),
}
"""Both with the vocabulary of GPT-2; the second has the layers of an 8B Llama."""


class Step(NamedTuple):
    """A plan for so many GPUs, and the seconds of its parts."""

    num_gpus: int
    cp: int
    recompute: bool
    length: int
    attention_s: float
    rest_s: float
    keys_s: float
    weights_s: float

    @property
    def num_rows(self) -> int:
        """Rows of a step: data parallel ranks."""
        return self.num_gpus // self.cp

    @property
    def communication(self) -> float:
        """Share of the step, without overlap."""
        return (self.keys_s + self.weights_s) / sum(self[4:])

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.length / sum(self[4:])


def main(argv: list[str] | None = None) -> int:
    parser = StrictParser(prog="scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", metavar="FILE", help="write the table into this page")
    args = parser.parse_args(argv)
    print(table())
    if args.page:
        page = Path(args.page)
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def updated(page: str) -> str:
    """A page with this simulation's table."""
    return fill(page, {"simulation": table()})


@cache
def table() -> str:
    """Every shape, length and number of GPUs."""
    head = ("model", "tokens of a row", "GPUs", "ranks a row x rows", "recomputed", "tokens/s")
    rows: list[tuple[str, ...]] = [(*head, "of it per GPU", "communication")]
    for name in SHAPES:
        for length in LENGTHS:
            for num_gpus in GPUS:
                step = best_step(name, length, num_gpus)
                rows.append((name, f"{length // 1024}k", str(num_gpus), *_cells(step)))
    return markdown_table(rows)


def best_step(name: str, length: int, num_gpus: int) -> Step | None:
    """The fastest plan; None: none fits."""
    return max(plans(name, length, num_gpus), key=lambda step: step.tokens_per_s, default=None)


def plans(name: str, length: int, num_gpus: int) -> Iterator[Step]:
    """All plans within memory and batch."""
    cp = max(1, num_gpus * length // BATCH_TOKENS)
    while cp <= num_gpus:
        for recompute in (False, True):
            if memory_bytes(name, length, num_gpus, cp, recompute) <= MEMORY_BYTES:
                yield simulate(name, length, num_gpus, cp, recompute)
        cp *= 2


def simulate(name: str, length: int, num_gpus: int, cp: int, recompute: bool) -> Step:
    """Seconds of a step in which every group of cp ranks trains on one row."""
    config = config_of(name, length)
    forward_s, both_s = attention_s(config)
    passes = 1 if recompute else 0
    attention = config.model.n_layers * (both_s + passes * forward_s) / cp
    flops = (3 + passes) * sum(_products(config).values()) / cp
    return Step(
        num_gpus=num_gpus,
        cp=cp,
        recompute=recompute,
        length=length,
        attention_s=attention * (PART_FACTOR if cp > 1 else 1.0),
        rest_s=flops / flops_per_s(),
        keys_s=(2 + passes) * config.model.n_layers * _keys_s(config, cp),
        weights_s=_weights_s(config, num_gpus),
    )


# --- Calibration ---


@cache
def config_of(name: str, length: int) -> Config:
    """A shape of SHAPES with rows of so many tokens, in bf16 with fp32 weights."""
    usual = ("data.tokenizer=gpt2", "train.batch_size=1", f"train.seq_len={length}")
    settings = (*usual, "runtime.precision=bf16", *SHAPES[name])
    path = REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml"
    return load_config(path, list(settings), environ={})


@cache
def _measured(n_heads: int, n_kv_groups: int, d_k: int) -> tuple[dict[str, Any], ...]:
    """Rows of the kernels' results for such heads, by length."""
    text = (REPOSITORY / "docs" / "results" / "prefill.json").read_text(encoding="utf-8")
    wanted = {"name": "nsa", "Hq": n_heads, "Hkv": n_kv_groups, "Dk": d_k, "Dv": d_k, "B": 1}
    found = [row for row in json.loads(text)["rows"] if wanted.items() <= row.items()]
    assert found, f"docs/results/prefill.json has no row of {wanted}"
    return tuple(sorted(found, key=lambda row: row["S"]))


def attention_s(config: Config) -> tuple[float, float]:
    """Seconds of one layer's attention over a row on one GPU: forward, and forward + backward."""
    model, length = config.model, config.train.seq_len
    rows = _measured(model.n_heads, model.n_kv_groups, model.d_k)
    rows = tuple(row for row in rows if row["S"] >= FIT_FROM)
    forward, both = (
        _fit([(row["S"], 1e-3 * row[name]) for row in rows])
        for name in ("fwd_graph_ms", "both_graph_ms")
    )
    return _at(forward, length), _at(both, length)


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """a and b of a * S + b * S^2 with the least squares of relative errors."""
    # With t / S = a + b * S, every point divided by its t: two normal equations.
    rows = [(s / t, s * s / t) for s, t in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ya, yb = (sum(x[i] for x in rows) for i in (0, 1))
    det = aa * bb - ab * ab
    return (ya * bb - yb * ab) / det, (aa * yb - ab * ya) / det


def _at(fit: tuple[float, float], length: int) -> float:
    return fit[0] * length + fit[1] * length**2


@cache
def flops_per_s() -> float:
    """Rate of all but attention in the measured step of the 125M model."""
    length, step_s = MEASURED_STEP
    config = config_of("125M", length)
    rest_s = step_s - config.model.n_layers * attention_s(config)[1]
    return 3 * sum(_products(config).values()) / rest_s


def _products(config: Config) -> dict[str, int]:
    """Operations of the forward pass outside of attention."""
    some = 1024  # of a short row: they are the same for every token
    flops = forward_flops(config, some)
    count = config.train.seq_len // some
    return {part: count * flops[part] for part in ("projections", "mlp", "head")}


# --- Memory and links ---


def memory_bytes(name: str, length: int, num_gpus: int, cp: int, recompute: bool) -> float:
    """Estimate of a rank: what training keeps, attention's temporary memory, and gathered keys."""
    config = config_of(name, length // cp)  # of a rank's tokens
    model, spec = config.model, block_spec(config)
    config = replace(config, runtime=replace(config.runtime, gradient_checkpointing=recompute))
    parts = training_memory(config)
    shared = ("weights", "gradients", "optimizer", "16-bit weights")
    kept = sum(size for part, size in parts.items() if part not in shared)
    weights = sum(parts[part] for part in shared) / (1 if is_replicated(config) else num_gpus)
    longest = _measured(model.n_heads, model.n_kv_groups, model.d_k)[-1]
    temporary = longest["peak_mib"] * 2**20 * length / cp / longest["S"]
    # Beside its id, a layer keeps of every choice its query and place in the list of its block.
    index = model.n_kv_groups * (length // cp) * spec.n_sel * (4 + 2)
    keys = 2 * length * model.n_kv_groups * (model.d_k + model.d_v) * (1 + 1 / spec.d)
    layers = 1 if recompute else model.n_layers
    # A row's keys and their gradient arrive for one layer; without recomputation all are kept.
    return kept + weights + temporary + layers * (index + keys * (cp > 1)) + keys * (cp > 1)


def _keys_s(config: Config, cp: int) -> float:
    """Seconds of the exchange of one layer in one pass."""
    if cp == 1:
        return 0.0
    split = Split(config.train.seq_len, cp)
    layer = _layer(config.model, block_spec(config))
    received = max(received_bytes(layer, split, rank) for rank in (0, cp // 2, cp - 1))
    return received / link_bytes_per_s(cp) + COLLECTIVES * _latency_s(cp)


def is_replicated(config: Config) -> bool:
    """Whether a model is so small that every GPU holds its training state."""
    parts = training_memory(config)
    return parts["weights"] + parts["gradients"] + parts["optimizer"] <= REPLICATED_BYTES


def _weights_s(config: Config, num_gpus: int) -> float:
    """Seconds of DDP's sums of gradients, or of FSDP's three collectives of every layer."""
    size = 2 * sum(parameter_counts(config).values())
    count, times = 3 * config.model.n_layers, 3
    if is_replicated(config):
        count, times = math.ceil(size / BUCKET_BYTES), 2  # a sum is a scatter and a gather
    moved = times * size * (num_gpus - 1) / num_gpus
    return moved / link_bytes_per_s(num_gpus) + count * _latency_s(num_gpus)


def link_bytes_per_s(num_ranks: int) -> float:
    """What a rank receives in a collective of neighbours: one node, or several whole nodes."""
    if num_ranks <= NODE:
        return REACHED * NVLINK_BYTES_PER_S
    return REACHED * min(NVLINK_BYTES_PER_S, NODE * INFINIBAND_BYTES_PER_S)


def _latency_s(num_ranks: int) -> float:
    return START_S + HOP_S * math.ceil(num_ranks / NODE)


@cache
def _layer(model: ModelConfig, spec: BlockSpec) -> NSAAttention:
    """An attention layer of the model, without memory."""
    heads = (model.dim, model.n_heads, model.n_kv_groups, model.d_k, model.d_v)
    with torch.device("meta"):
        return NSAAttention(*heads, spec.l, spec.d, spec.l_sel, spec.n_sel, spec.w)


def _cells(step: Step | None) -> tuple[str, ...]:
    if step is None:
        return ("does not fit", *[""] * 4)
    return (
        f"{step.cp} x {step.num_rows}",
        "yes" if step.recompute else "no",
        _number(step.tokens_per_s),
        _number(step.tokens_per_s / step.num_gpus),
        f"{100 * step.communication:.0f} %",
    )


def _number(value: float) -> str:
    """Two significant digits: a simulation has no more."""
    digits = 10 ** (len(str(int(value))) - 2)
    return f"{round(value / digits) * digits:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
