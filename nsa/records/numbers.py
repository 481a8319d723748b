"""The numbers of a logged step: name, unit, meaning, and every place that shows them, spelled once.

The heartbeat writer, training.csv, TensorBoard, `nsa monitor`, the dashboard and report.html take
names, titles and formats from the tables below. To add a number: one line in NUMBERS, and its value
in `RunLog._report` (train/log.py).

`python -m nsa.records.numbers PAGE` rewrites the table in docs/schemas/heartbeat.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nsa.config.describe import markdown_table


class Curve(NamedTuple):
    """Where a number is drawn."""

    chart: str
    """Id of the chart."""
    label: str
    """In the legend of the chart."""
    factor: float = 1.0
    """From the stored unit to that of the chart."""
    rare: bool = False
    """Left out while it is zero everywhere."""


class Monitored(NamedTuple):
    """Where `nsa monitor` shows a number, and how."""

    row: str
    text: str
    """Format; the value is in the unit of the chart."""


class Layered(NamedTuple):
    """How the dashboard's picture by layer shows a number."""

    label: str
    top: float | None = None
    """End of the colour scale; None: the largest value."""


@dataclass(frozen=True)
class Number:
    """A field of a progress line, and the places that show it."""

    name: str
    unit: str
    meaning: str
    _: KW_ONLY
    curve: Curve | None = None
    monitor: Monitored | None = None
    in_head: bool = False
    """The dashboard's header gets its last value."""
    tag: str = ""
    """Its curve in TensorBoard and in trackers."""
    csv: str = ""
    """Its format in training.csv."""
    stat: str = ""
    """Its key in AttentionStats.summary()."""
    by_layer: bool = False
    """`stat` is also a key of AttentionStats.per_layer(), and `layers` of a line has it."""
    layer: Layered | None = None
    parts: tuple[Number, ...] = ()
    """For a list: its entries, in order."""


# --- the numbers, in the order of a progress line ---

GIB = 1 / 1024
"""MiB to GiB."""
EVEN = math.log(3)
"""Entropy of three even gates, in nats."""
MEASURED = (
    Number(
        "loss",
        "nats per token",
        "of this update",
        curve=Curve("loss", "training"),
        tag="train/loss",
        csv=".6f",
    ),
    Number(
        "toks_per_s",
        "tokens/s",
        "all ranks, since the previous line",
        curve=Curve("toks", "tokens/s"),
        monitor=Monitored("speed", "{:,.0f} tokens/s"),
        in_head=True,
        tag="train/toks_per_s",
        csv=".0f",
    ),
    Number(
        "step_time_s",
        "s",
        "of an update",
        curve=Curve("step", "step"),
        monitor=Monitored("speed", "step {:.3g} s"),
        in_head=True,
    ),
    Number(
        "mfu",
        "0 to 1",
        "share of the device's peak since the previous line, see [metrics.json](metrics_json.md)",
        curve=Curve("mfu", "MFU"),
        monitor=Monitored("speed", "mfu {:.1%}"),
        in_head=True,
        tag="train/mfu",
    ),
    Number(
        "lr",
        "",
        "learning rate of this update",
        curve=Curve("lr", "rate"),
        monitor=Monitored("speed", "lr {:.2e}"),
        in_head=True,
        tag="train/lr",
        csv=".6e",
    ),
    Number(
        "grad_norm",
        "",
        "before clipping",
        curve=Curve("grad", "norm"),
        monitor=Monitored("speed", "gradient norm {:.3g}"),
        in_head=True,
        tag="train/grad_norm",
    ),
    Number(
        "index_loss",
        "nats",
        "KL loss of the indexers (rule msa), mean over layers; null without one",
        curve=Curve("loss", "indexer KL"),
        tag="train/index_loss",
    ),
    Number(
        "dt_fetch_s",
        "s",
        "wait for the batch of this update",
        curve=Curve("fetch", "last", 1000),
        monitor=Monitored("data", "fetch {:.0f} ms"),
        in_head=True,
    ),
    Number(
        "fetch_p50_ms",
        "ms",
        "median of that wait over recent updates",
        curve=Curve("fetch", "p50"),
        monitor=Monitored("data", "p50 {:.0f} ms"),
    ),
    Number(
        "fetch_p95_ms",
        "ms",
        "95th percentile of that wait over recent updates",
        curve=Curve("fetch", "p95"),
        monitor=Monitored("data", "p95 {:.0f} ms"),
    ),
    Number(
        "gpu_mem_alloc",
        "MiB",
        "GPU memory in tensors",
        curve=Curve("memory", "in tensors", GIB),
        in_head=True,
    ),
    Number(
        "gpu_mem_reserved",
        "MiB",
        "GPU memory held by torch's allocator",
        curve=Curve("memory", "held by torch", GIB),
        in_head=True,
    ),
    Number(
        "rss_mib",
        "MiB",
        "RSS of the process; null on a GPU",
        curve=Curve("memory", "process", GIB),
        in_head=True,
    ),
    Number(
        "gpu_util_pct",
        "%",
        "share of recent time in which a kernel ran",
        curve=Curve("util", "busy"),
        monitor=Monitored("memory", "GPU busy {:.0f}%"),
        in_head=True,
    ),
    Number(
        "gpu_temp_c",
        "degrees C",
        "of the GPU",
        curve=Curve("temp", "GPU"),
        monitor=Monitored("memory", "{:.0f} C"),
        in_head=True,
    ),
)
"""What the trainer measures itself: keyword arguments of `Heartbeat.progress`."""
SHARES = (
    Number(
        "share_cmp",
        "0 to 1",
        "mean weight of the compressed branch",
        curve=Curve("shares", "cmp"),
        tag="gates/share_cmp",
        layer=Layered("share of compressed", 1),
    ),
    Number(
        "share_sel",
        "0 to 1",
        "mean weight of the selected branch",
        curve=Curve("shares", "sel"),
        tag="gates/share_sel",
        layer=Layered("share of selected", 1),
    ),
    Number(
        "share_win",
        "0 to 1",
        "mean weight of the window branch",
        curve=Curve("shares", "win"),
        tag="gates/share_win",
        layer=Layered("share of window", 1),
    ),
)
"""By layer, AttentionStats.per_layer() has them under these names."""
ATTENTION = (
    Number(
        "entropy_mean",
        "nats",
        "entropy of the three gates, mean; ln 3 = 1.10 is even",
        curve=Curve("entropy", "mean"),
        monitor=Monitored("gates", "entropy {:.2f}"),
        in_head=True,
        tag="gates/entropy_mean",
        stat="entropy_mean",
        by_layer=True,
        layer=Layered("gate entropy, mean", EVEN),
    ),
    Number("gate_entropy_mean", "nats", "the same", stat="entropy_mean", by_layer=True),
    Number(
        "gate_entropy_min",
        "nats",
        "the smallest entropy",
        curve=Curve("entropy", "least"),
        tag="gates/entropy_min",
        stat="entropy_min",
        by_layer=True,
        layer=Layered("gate entropy, least", EVEN),
    ),
    Number(
        "gate_branch_shares",
        "0 to 1",
        "mean weight of compressed, selected, window",
        stat="branch_shares",
        parts=SHARES,
    ),
    Number(
        "max_gate_mean",
        "0 to 1",
        "weight of the largest gate, mean",
        curve=Curve("largest", "largest"),
        monitor=Monitored("gates", "largest {:.2f}"),
        tag="gates/max_gate_mean",
        stat="max_gate_mean",
        by_layer=True,
        layer=Layered("largest gate, mean", 1),
    ),
    Number(
        "gate_max_gate",
        "0 to 1",
        "the largest of all",
        tag="gates/max_gate_max",
        stat="max_gate_max",
        by_layer=True,
    ),
    Number(
        "collapse_fraction",
        "0 to 1",
        "share of gates that chose one branch (entropy < 0.1 and largest > 0.95)",
        curve=Curve("collapse", "collapsed"),
        monitor=Monitored("gates", "collapsed {:.1%}"),
        tag="gates/collapse_fraction",
        stat="collapse_fraction",
        by_layer=True,
        layer=Layered("collapsed gates", 1),
    ),
    Number("gate_collapse_frac", "0 to 1", "the same", stat="collapse_fraction", by_layer=True),
    Number(
        "sel_k_mean",
        "blocks",
        "that a query read, mean",
        curve=Curve("blocks", "mean"),
        tag="selection/k_mean",
        stat="sel_k_mean",
        by_layer=True,
        layer=Layered("blocks read, mean"),
    ),
    Number(
        "sel_k_max",
        "blocks",
        "that a query read, maximum",
        curve=Curve("blocks", "most"),
        tag="selection/k_max",
        stat="sel_k_max",
        by_layer=True,
    ),
    Number("sel_rows", "queries", "counted", stat="sel_rows"),
    Number(
        "sel_pct_at_max",
        "0 to 1",
        "share of queries that read all `n_sel` blocks",
        tag="selection/pct_at_max",
        stat="sel_pct_at_max",
        by_layer=True,
    ),
)
"""From AttentionStats. Gate health is written under two names each: readers of both exist."""


def _fallback(counter: str, label: str = "") -> Number:
    """A counter of fallback_counters.csv; `label` in its chart, if it can be other than zero."""
    curve = Curve("fallbacks", label, rare=counter != "total_fallbacks") if label else None
    since = "since the start of the process, see [fallback_counters.csv](fallback_counters_csv.md)"
    return Number(f"{FALLBACK_PREFIX}{counter}", "calls", since, curve=curve)


FALLBACK_PREFIX = "fb_"
FALLBACKS = (
    _fallback("total_fallbacks", "all"),
    _fallback("selection_triton_fails", "selected"),
    _fallback("compressed_fa2_fails", "compressed"),
    _fallback("sliding_fa2_fails", "window"),
    _fallback("selection_cuda_fails"),
    _fallback("selection_pack_fails"),
    _fallback("selection_mask_fails"),
)
NUMBERS = (*MEASURED, *ATTENTION, *FALLBACKS)
EVALUATED = (
    Number(
        "loss", "nats per token", "on held-out rows", curve=Curve("val", "held-out"), tag="val/loss"
    ),
    Number("ppl", "", "e to the loss", tag="val/ppl"),
)
"""The columns of val.csv."""
SCALARS = tuple(part for number in NUMBERS for part in number.parts or (number,))
"""NUMBERS with each list replaced by its entries."""


# --- the charts of the dashboard and of report.html, in order ---


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart; its curves are the numbers that name it."""

    id: str
    section: str
    """Heading on the dashboard."""
    title: str
    unit: str = ""
    form: str = "compact"
    """How values are written: a key of FORMS in web/static/format.js."""
    zero: bool = False
    """The axis starts at zero."""
    top: float | None = None
    """The axis reaches at least this far."""
    log: bool = False
    """The axis is logarithmic."""
    log_switch: bool = False
    """The axis is logarithmic while the switch of the page says so."""
    smooth: bool = False
    """The slider of the page smooths its curves."""


_training = partial(Chart, section="Training")
_speed = partial(Chart, section="Speed", zero=True, smooth=True)
_machine = partial(Chart, section="Machine")
_attention = partial(Chart, section="Attention", zero=True, form="fixed 3")
_loss = partial(_training, unit="nats per token", form="fixed 4", log_switch=True)

CHARTS = (
    _loss(id="loss", title="Loss", smooth=True),
    _loss(id="val", title="Held-out loss"),
    _training(id="grad", title="Gradient norm", unit="before clipping", log=True, smooth=True),
    _training(id="lr", title="Learning rate", zero=True),
    _speed(id="toks", title="Throughput", unit="tokens/s, all ranks", form="integer"),
    _speed(id="mfu", title="MFU", unit="share of the peak", form="percent"),
    _speed(id="step", title="Step time", unit="s"),
    _speed(id="fetch", title="Fetch time", unit="ms", log=True, zero=False, smooth=False),
    _machine(id="memory", title="Memory", unit="GiB", form="fixed 2", zero=True),
    _machine(id="util", title="GPU busy", unit="%", form="fixed 0", zero=True, top=100),
    _machine(id="temp", title="GPU temperature", unit="°C", form="fixed 0"),
    _machine(
        id="fallbacks",
        title="Fallbacks",
        unit="calls since the start",
        form="integer",
        zero=True,
        top=4,
    ),
    _attention(id="shares", title="Gate shares", unit="mean over all layers"),
    _attention(id="entropy", title="Gate entropy", unit="nats; even is 1.10", top=1.1),
    _attention(id="largest", title="Largest gate", unit="mean over all gates", top=1),
    _attention(
        id="collapse", title="Gate collapse", unit="share of gates", form="percent", top=0.01
    ),
    _attention(id="blocks", title="Blocks read", unit="per query", form="fixed 2"),
)


def curves_of(chart: Chart, numbers: Sequence[Number]) -> list[tuple[str, Curve]]:
    """The numbers that a chart draws, each as its name and its curve."""
    curves = [(number.name, number.curve) for number in numbers if number.curve]
    return [(name, curve) for name, curve in curves if curve.chart == chart.id]


# --- reading them back ---


def finite(value: Any) -> float | None:
    """A value of a JSON line as a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < math.inf else None


def scalars_of(extra: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """All SCALARS of a progress line, by name; None where not measured."""
    for number in NUMBERS:
        value = extra.get(number.name)
        if not number.parts:
            yield number.name, finite(value)
        elif isinstance(value, list) and len(value) == len(number.parts):
            yield from zip((part.name for part in number.parts), map(finite, value), strict=True)


# --- the table in docs/schemas/heartbeat.md ---

BEGIN, END = "<!-- begin numbers -->", "<!-- end numbers -->"


def field_table() -> str:
    """NUMBERS as a Markdown table; neighbours with the same unit and meaning share a row."""
    rows: list[tuple[Sequence[str], str, str]] = []
    for number in NUMBERS:
        if rows and rows[-1][1:] == (number.unit, number.meaning):
            rows[-1] = ((*rows[-1][0], number.name), *rows[-1][1:])
        else:
            rows.append(((number.name,), number.unit, number.meaning))
    cells = [(", ".join(f"`{name}`" for name in names), *rest) for names, *rest in rows]
    return markdown_table([("field", "unit", "meaning"), *cells])


def refresh(page: str) -> str:
    """The page with its table regenerated."""
    above, below = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{above}{BEGIN}\n{field_table()}\n{END}{below}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(refresh(document.read_text(encoding="utf-8")), encoding="utf-8")
