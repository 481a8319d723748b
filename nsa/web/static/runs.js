// The head of the page: how each run stands, and what rings.

import { make, runColour } from "./dom.js";
import { age, compact, duration, integer, loss, mib, percent } from "./format.js";

export function runCard(run, { shown, many, onToggle }) {
  const colour = runColour(run.id);
  const swatch = many
    ? make("button", {
        className: `swatch${shown ? "" : " off"}`,
        type: "button",
        colour,
        title: shown ? "Hide its curves" : "Show its curves",
        ariaLabel: `${shown ? "Hide" : "Show"} the curves of ${run.name}`,
        ariaPressed: String(shown),
        on: { click: onToggle },
      })
    : null;
  return make(
    "article",
    { className: "card run", id: `run-${run.id}` },
    make(
      "div",
      { className: "run-head" },
      swatch,
      make("span", { className: `pill ${run.level}`, textContent: run.verdict, title: verdictHint(run) }),
      make("span", { className: "name", textContent: run.name }),
      make("span", { className: "path soft", title: run.folder }, make("bdi", { textContent: run.folder })),
    ),
    run.steps ? progress(run, colour) : null,
    run.status === "absent" ? null : make("div", { className: "tiles" }, tiles(run)),
    facts(run),
  );
}

function verdictHint(run) {
  return run.alarms?.length ? run.alarms.map((alarm) => alarm.text).join("\n") : `status: ${run.status}`;
}

function progress(run, colour) {
  const share = Math.min(1, run.step / run.steps);
  const fill = make("div", { className: "fill", colour });
  fill.style.width = `${100 * share}%`;
  const left = run.ended ? "" : Number.isFinite(run.eta_s) ? `, ${duration(run.eta_s)} left` : "";
  return make(
    "div",
    { className: "progress" },
    make("span", {
      className: "number",
      textContent: `${integer(run.step)} of ${integer(run.steps)} steps (${percent(share)})${left}`,
    }),
    make(
      "div",
      {
        className: "track",
        role: "progressbar",
        ariaValueNow: (100 * share).toFixed(1),
        ariaLabel: "Progress",
      },
      fill,
    ),
  );
}

function tiles(run) {
  const isGpu = run.gpu_mem_alloc !== null && run.gpu_mem_alloc !== undefined;
  const late = run.ranks?.some((rank) => rank.late);
  return [
    tile("Loss", run.loss, loss),
    tile("Held-out", run.val_loss, loss),
    tile("Tokens/s", run.toks_per_s, integer),
    tile("MFU", run.mfu, percent),
    tile("Step", run.step_time_s, (value) => compact(value), "s"),
    tile("Last beat", run.beat_age_s, age, "ago", late ? "bad" : ""),
    tile("Gradient", run.grad_norm, (value) => compact(value)),
    tile(
      "Fetch",
      run.dt_fetch_s === null ? null : 1000 * run.dt_fetch_s,
      (value) => compact(value),
      "ms",
      run.dt_fetch_s > run.limits?.fetch_s ? "warn" : "",
    ),
    tile(isGpu ? "GPU memory" : "Memory", isGpu ? run.gpu_mem_reserved : run.rss_mib, mib),
    isGpu
      ? tile(
          "GPU busy",
          run.gpu_util_pct,
          (value) => `${Math.round(value)}%`,
          run.gpu_temp_c ? `${run.gpu_temp_c} °C` : "",
        )
      : null,
    tile(
      "Gate entropy",
      run.entropy_mean,
      (value) => value.toFixed(2),
      "",
      run.entropy_mean !== null && run.entropy_mean < run.limits?.gate_entropy_low ? "warn" : "",
    ),
    tile("Fallbacks", run.fallbacks, integer, "", run.fallbacks ? "warn" : ""),
  ];
}

function tile(label, value, format, unit = "", level = "") {
  const known = value !== null && value !== undefined && Number.isFinite(value);
  return make(
    "div",
    { className: "tile" },
    make("div", { className: "label", textContent: label }),
    make(
      "div",
      { className: `value ${known ? level : "none"}` },
      known ? format(value) : "not measured",
      known && unit ? make("small", { textContent: unit }) : null,
    ),
  );
}

function facts(run) {
  if (!run.metrics) return null;
  const m = run.metrics;
  const words = [
    `${compact(m.num_params)} parameters`,
    `${m.device}, ${m.dtype}`,
    `${m.world_size} ${m.world_size === 1 ? "rank" : "ranks"}`,
    `${integer(m.tokens_per_step)} tokens a step`,
    `sequence ${integer(m.seq_len)}`,
  ];
  if (run.checkpoints.length) words.push(`last checkpoint: step ${integer(run.checkpoints[0].step)}`);
  if (m.resumed_at) words.push(`resumed at ${integer(m.resumed_at)}`);
  if (m.spikes) words.push(`${m.spikes} loss spikes`);
  if (m.data_fallback) words.push(`on random tokens: ${m.data_fallback}`);
  if (run.halt) words.push(`.HALT: ${run.halt}`);
  if (run.problems.length) words.push(`${run.problems.length} notes on its files`);
  return make("p", { className: "facts", textContent: words.join(" · ") });
}

export function alarmRows(runs) {
  return runs.flatMap((run) =>
    byType(run.alarms ?? []).map(({ alarm, others }) =>
      make(
        "div",
        { className: `alarm ${alarm.halting ? "bad" : "warn"}`, role: "alert" },
        make("b", { textContent: (runs.length > 1 ? `${run.name}: ` : "") + alarm.type.replaceAll("_", " ") }),
        alarm.text,
        others ? ` (and ${others} more)` : "",
        alarm.advice ? make("div", { className: "advice", textContent: alarm.advice }) : null,
      ),
    ),
  );
}

// One row for each kind: when a run stops, all of its ranks fall silent.
function byType(alarms) {
  const found = new Map();
  for (const alarm of alarms) {
    if (found.has(alarm.type)) found.get(alarm.type).others += 1;
    else found.set(alarm.type, { alarm, others: 0 });
  }
  return [...found.values()];
}
