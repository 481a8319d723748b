// The page: asks for what is new every two seconds, and hands it to the parts.

import { AXES, clockOf, toAxis, toStep } from "./axis.js";
import { Chart, fitLegends } from "./chart.js";
import { chartTable, lastLosses, linesOf } from "./charts.js";
import { make, runColour } from "./dom.js";
import { Distances } from "./distances.js";
import { filesOf, Settings } from "./files.js";
import { LayerHeat } from "./layers.js";
import { LogTail } from "./log.js";
import { Strips } from "./ranks.js";
import { alarmRows, runCard } from "./runs.js";
import { Samples } from "./samples.js";
import { SelectionMaps } from "./selection.js";

const EVERY_MS = 2000;
const LAYER_POINTS = 160;

const state = {
  runs: [],
  now: 0,
  data: new Map(),
  hidden: new Set(),
  versions: new Map(),
  samplesAt: new Map(),
  settingsAt: "",
  filesKey: "",
  focus: 0,
};
const shared = {
  axis: AXES.step,
  hover: null,
  range: null,
  extent: null,
  logLoss: false,
  onHover(place) {
    shared.hover = place;
    requestAnimationFrame(() => {
      charts.forEach((chart) => chart.drawOverlay());
      fitLegends(charts, { hovers: true });
    });
  },
  onZoom(range) {
    shared.range = range;
    showLoss(zoomed());
  },
  onReset() {
    if (shared.range) {
      shared.range = null;
      showLoss(zoomed());
    }
  },
};
let axis = "step";
const placesOf = (run, steps) => toAxis(axis, run, steps);
const $ = (id) => document.getElementById(id);
const charts = [];
let heats = [],
  layerFields = [];
const distances = new Distances();
const maps = new SelectionMaps((step) => showLoss(loadSelection(state.focus, step)));
const strips = new Strips(() => showLoss(loadTimelines().then(drawStrips)));
const settings = new Settings();
const samples = new Samples();
const log = new LogTail(() => showLoss(loadLog()));
const heatPlace = make("div", { className: "fit wide" });
const focusSelect = make("select", {
  ariaLabel: "Run of the maps",
  on: {
    change: () => {
      state.focus = Number(focusSelect.value);
      showLoss(loadSelection(state.focus));
    },
  },
});

async function build() {
  const { sections, layers } = chartTable(await ask("charts"));
  layerFields = layers;
  for (const section of sections) {
    const grid = make("div", { className: "grid" });
    for (const definition of section.charts) {
      const chart = new Chart(definition, shared);
      charts.push(chart);
      grid.append(chart.node);
    }
    if (section.id === "attention") {
      grid.append(heatPlace, maps.node);
      maps.node.querySelector(".controls").append(focusSelect);
    }
    add(section.id, section.title, grid);
  }
  add("ranks", "Ranks", strips.node);
  add("samples", "Samples", samples.node);
  add("log", "Log", log.node);
  add("files", "Files", make("div", { className: "fit", id: "file-cards" }));
  add("settings", "Settings", settings.node);
}

function add(id, title, content) {
  $("body").append(make("section", { id, ariaLabel: title }, make("h2", { textContent: title }), content));
  $("sections").append(make("a", { href: `#${id}`, textContent: title }));
}

async function ask(path, query = {}) {
  const response = await fetch(`/api/${path}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (response.status === 401) {
    location.assign("/");
    throw new Error("token");
  }
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

const shownRuns = () =>
  state.runs
    .filter((run) => !state.hidden.has(run.id))
    .map((run) => ({ ...run, ...(state.data.get(run.id) ?? {}) }));
const dataOf = (id) => state.data.get(id) ?? state.data.set(id, {}).get(id);
// About one for each pixel: more would only draw over each other.
const points = () =>
  Math.min(800, Math.max(150, Math.max(...charts.map((chart) => chart.plot.clientWidth)) - 60));
const windowQuery = (run) => {
  if (!shared.range) return {};
  const [from, to] = shared.range.map((place) => toStep(axis, { ...run, ...dataOf(run.id) }, place));
  return { from: Math.floor(from), to: Math.ceil(to) };
};

async function look() {
  const answer = await ask("runs");
  state.runs = answer.runs;
  state.now = answer.now;
  if (!state.runs.some((run) => run.id === state.focus)) state.focus = 0;
  drawHead();
  const stale = state.runs.filter((run) => state.versions.get(run.id) !== run.version);
  await Promise.all(stale.map((run) => loadRun(run)));
  for (const run of state.runs) if (!shared.range) Object.assign(run, lastLosses(dataOf(run.id).series));
  if (stale.length) drawHead();
  await Promise.all([loadTimelines(), loadSamples(), loadLog()]);
  const settingsAt = JSON.stringify(
    state.runs.map((run) => [run.metrics?.config_file, run.status, run.metrics?.resumed_at]),
  );
  if (settingsAt !== state.settingsAt) {
    settings.set(await ask("settings"));
    state.settingsAt = settingsAt;
  }
  if (stale.length) drawCharts();
  drawStrips();
  drawFiles();
  const reading = state.runs.some((run) => run.reading);
  link("live", reading ? "reading" : `live ${new Date().toLocaleTimeString(undefined, { hour12: false })}`);
}

async function loadRun(run) {
  const data = dataOf(run.id),
    query = { run: run.id, ...windowQuery(run) },
    range = shared.range;
  const [series, layers] = await Promise.all([
    ask("series", { ...query, points: points() }),
    ask("layers", { ...query, points: LAYER_POINTS }),
  ]);
  if (shared.range !== range) return; // zoomed since: these are the points of another range
  [data.series, data.layers] = [series, layers];
  if (!range) data.clock = clockOf(series.progress);
  const last = data.selection?.steps.at(-1);
  const follows = !data.selection || data.selection.step === last;
  if (run.maps !== null && follows && run.maps !== last)
    data.selection = await ask("selection", { run: run.id });
  state.versions.set(run.id, run.version);
}

async function loadSelection(id, step) {
  dataOf(id).selection = await ask("selection", { run: id, ...(step === undefined ? {} : { step }) });
  drawSelection();
}

async function loadTimelines() {
  const cells = Math.min(1000, Math.max(120, Math.round(document.body.clientWidth / 3)));
  await Promise.all(
    state.runs.map(async (run) => {
      dataOf(run.id).timeline = await ask("timeline", { run: run.id, last_s: strips.lastS, cells });
    }),
  );
}

// Only of runs with a new one: samples come at the end of a run.
async function loadSamples() {
  const stale = state.runs.filter((run) => state.samplesAt.get(run.id) !== run.samples);
  await Promise.all(
    stale.map(async (run) => {
      dataOf(run.id).samples = run.samples ? await ask("samples", { run: run.id }) : { samples: [] };
      state.samplesAt.set(run.id, run.samples);
    }),
  );
  if (stale.length) drawSamples();
}

const drawSamples = () =>
  samples.set(
    state.runs
      .filter((run) => !state.hidden.has(run.id))
      .map((run) => ({ id: run.id, name: run.name, ...state.data.get(run.id)?.samples })),
  );

async function loadLog() {
  log.offer(state.runs);
  log.set(await ask("log", { run: log.run }), state.now);
}

function drawHead() {
  const many = state.runs.length > 1;
  const focused = document.activeElement?.closest("#runs .run")?.id;
  $("runs").replaceChildren(
    ...state.runs.map((run) =>
      runCard(run, { many, shown: !state.hidden.has(run.id), onToggle: () => toggle(run.id) }),
    ),
  );
  if (focused) $(focused)?.querySelector("button")?.focus();
  $("alarms").replaceChildren(...alarmRows(state.runs));
  const worst = ["bad", "warn", "good"].find((level) => state.runs.some((run) => run.level === level));
  const first = state.runs[0];
  document.title = `${worst === "bad" ? "! " : ""}${many ? `${state.runs.length} runs` : `${first.name}: ${first.verdict}`} - nsa`;
}

function toggle(id) {
  if (!state.hidden.delete(id)) state.hidden.add(id);
  drawHead();
  drawCharts();
  drawSamples();
}

function drawCharts() {
  const runs = shownRuns();
  const smoothing = Number($("smoothing").value);
  shared.extent = extentOf(runs);
  for (const chart of charts) chart.set(linesOf(chart.definition, runs, runColour, smoothing, placesOf));
  drawHeats(runs);
  drawSelection();
}

// All charts have the same range on their axis.
function extentOf(runs) {
  const places = runs.flatMap((run) =>
    Object.values(run.series ?? {}).flatMap((table) =>
      table.step.length ? (placesOf(run, [table.step[0], table.step.at(-1)]) ?? []) : [],
    ),
  );
  const low = Math.min(...places),
    high = Math.max(...places);
  return low < high ? [low, high] : null;
}

function drawHeats(runs) {
  const wanted =
    runs.length === 1
      ? [
          [runs[0], "entropy_mean"],
          [runs[0], "share_sel"],
        ]
      : runs.map((run) => [run, "entropy_mean"]);
  const key = wanted.map(([run, field]) => `${run.id}:${field}`).join();
  if (heatPlace.dataset.key !== key) {
    heats = wanted.map(([run, field]) => new LayerHeat(run, layerFields, field, hoverOf(run.id)));
    heatPlace.replaceChildren(distances.node, ...heats.map((heat) => heat.node));
    heatPlace.dataset.key = key;
  }
  heats.forEach((heat, i) => heat.set(wanted[i][0].layers, runs.length > 1 ? wanted[i][0].name : "By layer"));
}

// The pictures by layer tell steps, whatever the axis of the charts is.
const hoverOf = (id) => ({
  onHover(step) {
    const run = shownRuns().find((r) => r.id === id);
    shared.onHover(step === null || !run ? null : (placesOf(run, [step])?.[0] ?? null));
  },
});

function drawSelection() {
  const runs = shownRuns();
  distances.set(runs);
  focusSelect.hidden = runs.length < 2;
  focusSelect.replaceChildren(
    ...runs.map((run) =>
      make("option", { value: run.id, textContent: run.name, selected: run.id === state.focus }),
    ),
  );
  const run = runs.find((r) => r.id === state.focus) ?? runs[0];
  maps.set(run?.selection, runs.length > 1 ? run?.name : "");
}

// Only when something is new: who scrolls in a table shall not lose the place.
function drawFiles() {
  const key = JSON.stringify(state.runs.map((run) => [run.checkpoints, run.alarm_log, run.problems]));
  if (key === state.filesKey) return;
  state.filesKey = key;
  $("file-cards").replaceChildren(...filesOf(state.runs));
}

const drawStrips = () =>
  strips.set(state.runs.map((run) => ({ ...run, timeline: state.data.get(run.id)?.timeline })));

async function zoomed() {
  $("reset-zoom").hidden = !shared.range;
  drawCharts(); // what is there at once, then with more points
  await Promise.all(state.runs.map((run) => loadRun(run)));
  drawCharts();
}

// What a click asked the server for. Without an answer the page says so, and the next look repairs it.
const showLoss = (asked) => asked.catch(lost);

function lost(error) {
  link("lost", "no answer");
  console.warn(error.message);
}

function link(level, text) {
  $("link").className = `link ${level}`;
  $("link").textContent = text;
}

const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  localStorage.setItem("nsa-theme", name);
  document.documentElement.dataset.theme = name === "auto" ? (system.matches ? "dark" : "light") : name;
  $("theme").textContent = `Theme: ${name}`;
  if (state.runs.length) {
    drawHead();
    drawCharts();
    drawStrips();
  }
}

function listen() {
  $("smoothing").addEventListener("input", drawCharts);
  $("log-loss").addEventListener("change", (event) => {
    shared.logLoss = event.target.checked;
    drawCharts();
  });
  $("axis").addEventListener("change", (event) => {
    const zoom = shared.range;
    shared.range = shared.hover = null;
    axis = event.target.value;
    shared.axis = AXES[axis];
    if (zoom) showLoss(zoomed());
    else drawCharts();
  });
  $("reset-zoom").addEventListener("click", () => shared.onReset());
  $("theme").addEventListener("click", () =>
    setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("nsa-theme") ?? "auto") + 1) % 3]),
  );
  system.addEventListener("change", () => setTheme(localStorage.getItem("nsa-theme") ?? "auto"));
}

async function live() {
  for (;;) {
    if (!document.hidden) {
      try {
        if (!charts.length) await build();
        await look();
      } catch (error) {
        lost(error);
      }
    }
    const soon = state.runs.length === 0 || state.runs.some((run) => run.reading);
    await new Promise((done) => setTimeout(done, soon ? 300 : EVERY_MS));
  }
}

$("axis").append(...Object.entries(AXES).map(([value, { label }]) => make("option", { value, textContent: label })));
listen();
setTheme(localStorage.getItem("nsa-theme") ?? "auto");
live();
