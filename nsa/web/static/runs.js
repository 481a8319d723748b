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
    run.next ? nextStep(run) : null,
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

// What to do with a run that stopped before its last step.
function nextStep({ next }) {
  const start = next.command ? "start it again, where it was started, with" : "start it again with its command";
  const from =
    next.checkpoint === null
      ? "No checkpoint is there: it begins at step 1 again."
      : next.again > 0
        ? `It goes on from the checkpoint of step ${integer(next.checkpoint)}: ${integer(next.again)} steps are done again.`
        : `It goes on from the checkpoint of step ${integer(next.checkpoint)}; no step is lost.`;
  const log = make("a", { href: "#log", textContent: "log" });
  const look = ["look at the end of its ", log, " and at dmesg (out of memory?), then "];
  return make(
    "div",
    { className: "next" },
    next.why ? `${capital(next.why)}. Next: ` : "Next: ",
    ...(next.why ? look : []),
    start,
    next.command ? make("code", { tabIndex: 0, ariaLabel: "Command that resumes the run", textContent: next.command }) : ". ",
    from,
  );
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function tiles(run) {
  const isGpu = run.gpu_mem_alloc !== null && run.gpu_mem_alloc !== undefined;
  const late = run.ranks?.some((rank) => rank.late);
  return [
    tile("Loss", run.loss, loss, "", "", "of the last logged update, not smoothed; nats per token"),
    tile("Held-out", run.val_loss, loss, "", "", "of the last evaluation; nats per token"),
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

function tile(label, value, format, unit = "", level = "", title = null) {
  const known = value !== null && value !== undefined && Number.isFinite(value);
  return make(
    "div",
    { className: "tile", title },
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
    byType(alarmsOf(run)).map(({ alarm, others }) =>
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

// That a run died is in its card, with what to do.
const alarmsOf = (run) =>
  (run.alarms ?? []).filter((alarm) => !(run.next?.why && alarm.type === "heartbeat_stall"));

// One row for each kind: when a run stops, all of its ranks fall silent.
function byType(alarms) {
  const found = new Map();
  for (const alarm of alarms) {
    if (found.has(alarm.type)) found.get(alarm.type).others += 1;
    else found.set(alarm.type, { alarm, others: 0 });
  }
  return [...found.values()];
}
