// The lines of the charts. Which charts there are comes from the server: nsa/records/numbers.py.

import { formOf } from "./format.js";

// From /api/charts: the sections with their charts, and what the picture by layer can show.
export function chartTable({ charts, layers }) {
  const titles = [...new Set(charts.map((chart) => chart.section))];
  return {
    sections: titles.map((title) => ({
      id: title.toLowerCase(),
      title,
      charts: charts.filter((chart) => chart.section === title).map(withForms),
    })),
    layers: layers.map(withForms),
  };
}

// Ticks are short, whatever the legend says; only percents are percents everywhere.
const withForms = (definition) => ({
  ...definition,
  format: formOf(definition.form),
  tick: formOf(definition.form === "percent" ? "percent" : "compact"),
});

// The lines of a chart: colour says the run, and with a single run the series.
// placesOf(run, steps): where on the x axis they are.
export function linesOf(definition, runs, colourOf, smoothing, placesOf) {
  const single = runs.length === 1;
  const lines = [];
  for (const run of runs) {
    definition.series.forEach((series, index) => {
      const found = column(run.series, series);
      const x = found && placesOf(run, found.steps);
      if (!x || (series.rare && found.y.every((value) => !value))) return;
      const rows = !single && definition.series.filter((s) => !s.rare).length > 1;
      lines.push({
        label: single ? series.label : rows ? `${run.name} ${series.label}` : run.name,
        ...(rows ? { row: run.name, name: series.label } : {}),
        colour: colourOf(single ? run.id + lines.length : run.id),
        dash: single ? 0 : Math.min(index, 2),
        points: series.table === "val",
        ...found,
        x,
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
    list?.map((v) => (v === null ? null : v * series.factor));
  return {
    steps: table.step,
    y: times(values.mean),
    low: times(values.low),
    high: times(values.high),
    last: times([values.last ?? null])[0],
  };
}

// The last losses of the curves, so that the head of a run has the same numbers as its charts.
export function lastLosses(tables) {
  const found = {
    loss: column(tables, { key: "loss", factor: 1 })?.last,
    val_loss: column(tables, { table: "val", key: "loss", factor: 1 })?.last,
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
