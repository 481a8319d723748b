// Which charts there are: where their numbers come from, and how they are written.

import { compact, fixed, integer, loss, percent } from "./format.js";

const tidy = (value) => compact(value, 3);

export const SECTIONS = [
  {
    id: "training",
    title: "Training",
    charts: [
      {
        id: "loss",
        title: "Loss",
        unit: "nats per token",
        format: loss,
        log: "loss",
        smooth: true,
        series: [{ key: "loss", label: "training" }],
      },
      {
        id: "val",
        title: "Held-out loss",
        unit: "nats per token",
        format: loss,
        log: "loss",
        series: [{ table: "val", key: "loss", label: "held-out", points: true }],
      },
      {
        id: "grad",
        title: "Gradient norm",
        unit: "before clipping",
        log: true,
        smooth: true,
        series: [{ key: "grad_norm", label: "norm" }],
      },
      { id: "lr", title: "Learning rate", zero: true, series: [{ key: "lr", label: "rate" }] },
    ],
  },
  {
    id: "speed",
    title: "Speed",
    charts: [
      {
        id: "toks",
        title: "Throughput",
        unit: "tokens/s, all ranks",
        zero: true,
        format: integer,
        tick: tidy,
        smooth: true,
        series: [{ key: "toks_per_s", label: "tokens/s" }],
      },
      {
        id: "mfu",
        title: "MFU",
        unit: "share of the peak",
        zero: true,
        format: percent,
        tick: percent,
        smooth: true,
        series: [{ key: "mfu", label: "MFU" }],
      },
      {
        id: "step",
        title: "Step time",
        unit: "s",
        zero: true,
        smooth: true,
        series: [{ key: "step_time_s", label: "step" }],
      },
      {
        id: "fetch",
        title: "Fetch time",
        unit: "ms",
        log: true,
        series: [
          { key: "dt_fetch_s", label: "last", factor: 1000 },
          { key: "fetch_p50_ms", label: "p50" },
          { key: "fetch_p95_ms", label: "p95" },
        ],
      },
    ],
  },
  {
    id: "machine",
    title: "Machine",
    charts: [
      {
        id: "memory",
        title: "Memory",
        unit: "GiB",
        zero: true,
        format: fixed(2),
        series: [
          { key: "gpu_mem_alloc", label: "in tensors", factor: 1 / 1024 },
          { key: "gpu_mem_reserved", label: "held by torch", factor: 1 / 1024 },
          { key: "rss_mib", label: "process", factor: 1 / 1024 },
        ],
      },
      {
        id: "util",
        title: "GPU busy",
        unit: "%",
        zero: true,
        top: 100,
        format: fixed(0),
        series: [{ key: "gpu_util_pct", label: "busy" }],
      },
      {
        id: "temp",
        title: "GPU temperature",
        unit: "°C",
        format: fixed(0),
        series: [{ key: "gpu_temp_c", label: "GPU" }],
      },
      {
        id: "fallbacks",
        title: "Fallbacks",
        unit: "calls since the start",
        zero: true,
        top: 4,
        format: integer,
        series: [
          { key: "fb_total_fallbacks", label: "all" },
          { key: "fb_selection_triton_fails", label: "selected", rare: true },
          { key: "fb_compressed_fa2_fails", label: "compressed", rare: true },
          { key: "fb_sliding_fa2_fails", label: "window", rare: true },
        ],
      },
    ],
  },
  {
    id: "attention",
    title: "Attention",
    charts: [
      {
        id: "shares",
        title: "Gate shares",
        unit: "mean over all layers",
        zero: true,
        format: fixed(3),
        series: [
          { key: "share_cmp", label: "cmp" },
          { key: "share_sel", label: "sel" },
          { key: "share_win", label: "win" },
        ],
      },
      {
        id: "entropy",
        title: "Gate entropy",
        unit: "nats; even is 1.10",
        zero: true,
        format: fixed(3),
        top: 1.1,
        series: [
          { key: "entropy_mean", label: "mean" },
          { key: "gate_entropy_min", label: "least" },
        ],
      },
      {
        id: "collapse",
        title: "Gate collapse",
        unit: "share of gates",
        zero: true,
        format: percent,
        tick: percent,
        top: 0.01,
        series: [{ key: "collapse_fraction", label: "collapsed" }],
      },
      {
        id: "blocks",
        title: "Blocks read",
        unit: "per query",
        zero: true,
        format: fixed(2),
        series: [
          { key: "sel_k_mean", label: "mean" },
          { key: "sel_k_max", label: "most" },
        ],
      },
    ],
  },
];

export const LAYER_FIELDS = [
  { key: "entropy_mean", label: "gate entropy, mean", top: Math.log(3), format: fixed(3) },
  { key: "gate_entropy_min", label: "gate entropy, least", top: Math.log(3), format: fixed(3) },
  { key: "share_cmp", label: "share of compressed", top: 1, format: fixed(3) },
  { key: "share_sel", label: "share of selected", top: 1, format: fixed(3) },
  { key: "share_win", label: "share of window", top: 1, format: fixed(3) },
  { key: "max_gate_mean", label: "largest gate, mean", top: 1, format: fixed(3) },
  { key: "collapse_fraction", label: "collapsed gates", top: 1, format: percent },
  { key: "sel_k_mean", label: "blocks read, mean", top: null, format: fixed(2) },
];

// The lines of a chart: colour says the run, and with a single run the series.
export function linesOf(definition, runs, colourOf, smoothing) {
  const single = runs.length === 1;
  const lines = [];
  for (const run of runs) {
    definition.series.forEach((series, index) => {
      const found = column(run.series, series);
      if (!found || (series.rare && found.y.every((value) => !value))) return;
      const rows = !single && definition.series.filter((s) => !s.rare).length > 1;
      lines.push({
        label: single ? series.label : rows ? `${run.name} ${series.label}` : run.name,
        ...(rows ? { row: run.name, name: series.label } : {}),
        colour: colourOf(single ? run.id + lines.length : run.id),
        dash: single ? 0 : Math.min(index, 2),
        points: series.points,
        ...found,
        y: definition.smooth ? smooth(found.y, smoothing) : found.y,
        smoothed: Boolean(definition.smooth && smoothing),
      });
    });
  }
  return lines;
}

function column(tables, series) {
  if (!tables) return null;
  const table = series.table
    ? tables[series.table]
    : tables.training?.columns[series.key]
      ? tables.training
      : tables.progress;
  const values = table?.columns[series.key];
  if (!values) return null;
  const times = (list) =>
    list && series.factor ? list.map((v) => (v === null ? null : v * series.factor)) : list;
  return {
    x: table.step,
    y: times(values.mean),
    low: times(values.low),
    high: times(values.high),
    last: times([values.last ?? null])[0],
  };
}

// The last losses of the curves, so that the head of a run has the same numbers as its charts.
export function lastLosses(tables) {
  const found = {
    loss: column(tables, { key: "loss" })?.last,
    val_loss: column(tables, { table: "val", key: "loss" })?.last,
  };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => Number.isFinite(value)));
}

// An exponential mean that starts without a pull towards zero.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0,
    mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}
