// What the x axis of the charts counts: steps, tokens, or the time since a run's first logged step.

import { compact, duration } from "./format.js";

export const AXES = {
  step: {
    label: "Steps",
    tick: (value) => compact(value, 4),
    format: (value) => `step ${Math.round(value).toLocaleString("en-US")}`,
  },
  tokens: { label: "Tokens", tick: (value) => compact(value), format: (value) => `${compact(value, 4)} tokens` },
  time: { label: "Hours", tick: (value) => compact(value), format: (value) => duration(3600 * value) },
};

// Places of steps on the axis; null for a run that does not tell its tokens or times.
export function toAxis(axis, run, steps) {
  if (axis === "step") return steps;
  if (axis === "tokens") {
    const each = run.metrics?.tokens_per_step;
    return each ? steps.map((step) => step * each) : null;
  }
  const { step, hours } = run.clock ?? {};
  return step?.length ? steps.map((value) => between(step, hours, value)) : null;
}

export function toStep(axis, run, place) {
  if (axis === "step") return place;
  if (axis === "tokens") return place / (run.metrics?.tokens_per_step || 1);
  const { step, hours } = run.clock ?? {};
  return step?.length ? between(hours, step, place) : place;
}

// Steps and hours of a run, from all of its logged steps.
export function clockOf(progress) {
  const first = progress?.ts[0];
  return { step: progress?.step ?? [], hours: (progress?.ts ?? []).map((ts) => (ts - first) / 3600) };
}

// Linear between the points of a curve, and along its first or last piece beyond them.
function between(from, to, value) {
  if (from.length === 1) return to[0];
  let i = from.findIndex((x) => x >= value);
  i = i < 0 ? from.length - 1 : Math.max(i, 1);
  const share = (value - from[i - 1]) / (from[i] - from[i - 1] || 1);
  return Math.max(0, to[i - 1] + share * (to[i] - to[i - 1]));
}
