// Every rank as a strip: what it did when, from its heartbeats.

import { make, sharpen, variable } from "./dom.js";
import { age, clock, duration, integer } from "./format.js";

const WORDS = {
  step: "steps",
  evaluate: "evaluation",
  save: "checkpoint",
  start: "start",
  down: "no process",
  slow: "slow step",
  waiting: "since the last beat",
  silent: "silent too long",
  other: "other",
};
export const SPANS = [
  ["whole run", 1e15],
  ["last day", 86400],
  ["last hour", 3600],
  ["last 10 minutes", 600],
];

export class Strips {
  constructor(onSpan) {
    this.span = make(
      "select",
      { ariaLabel: "Time span", on: { change: () => onSpan() } },
      SPANS.map(([label], i) => make("option", { value: i, textContent: label })),
    );
    this.hint = make("span", { className: "hint number" });
    this.body = make("div");
    this.states = make("div", { className: "states" });
    this.node = make(
      "article",
      { className: "card chart wide", id: "strips" },
      make("header", {}, make("h3", { textContent: "Heartbeats" }), this.span, this.hint),
      this.body,
      this.states,
    );
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  get lastS() {
    return SPANS[this.span.selectedIndex][1];
  }

  // runs: [{ id, name, ranks, timeline }]
  set(runs) {
    this.runs = runs.filter((run) => run.timeline?.ranks?.length);
    const many = runs.length > 1;
    const rows = [];
    for (const run of this.runs) {
      if (many) rows.push(make("div", { className: "soft", textContent: run.name }));
      for (const strip of run.timeline.ranks) rows.push(this.row(run, strip));
      rows.push(
        make(
          "div",
          { className: "axis number" },
          make("span", { textContent: clock(run.timeline.begin) }),
          make("span", { textContent: clock(run.timeline.end) }),
        ),
      );
    }
    this.body.replaceChildren(
      ...(rows.length ? rows : [make("p", { className: "soft", textContent: "not measured" })]),
    );
    this.draw();
  }

  row(run, strip) {
    const rank = run.ranks?.find((r) => r.rank === strip.rank);
    const text = !rank
      ? ""
      : run.ended
        ? `step ${integer(rank.step)}`
        : `step ${integer(rank.step)}, ${age(rank.age_s)} ago`;
    const canvas = make("canvas", {
      role: "img",
      ariaLabel: `Rank ${strip.rank}: ${text}`,
      on: {
        pointermove: (event) => this.onMove(event, run.timeline, strip),
        pointerleave: () => {
          this.hint.textContent = "";
        },
      },
    });
    canvas.strip = strip;
    canvas.timeline = run.timeline;
    return make(
      "div",
      { className: "strip-row" },
      make("span", { textContent: `rank ${strip.rank}` }),
      canvas,
      make("span", {
        className: rank?.late ? "late" : "soft number",
        textContent: text,
        title: rank ? `allowed silence: ${duration(rank.allowed_s)}, ${rank.why}` : "",
      }),
    );
  }

  draw() {
    const seen = new Set();
    for (const canvas of this.body.querySelectorAll("canvas")) {
      const width = canvas.clientWidth;
      if (!width) continue;
      const context = sharpen(canvas, width, 16);
      const { begin, end, states } = canvas.timeline;
      for (const [code, from, to] of canvas.strip.segments) {
        seen.add(states[code]);
        context.fillStyle = variable(`--state-${states[code]}`);
        const x = ((from - begin) / (end - begin)) * width;
        context.fillRect(x, 0, Math.max(1, ((to - from) / (end - begin)) * width + 0.5), 16);
      }
    }
    this.states.replaceChildren(
      ...Object.keys(WORDS)
        .filter((state) => seen.has(state))
        .map((state) => {
          const swatch = make("i", { colour: variable(`--state-${state}`) });
          return make("span", {}, swatch, WORDS[state]);
        }),
    );
  }

  onMove(event, timeline, strip) {
    const box = event.currentTarget.getBoundingClientRect();
    const at = timeline.begin + ((event.clientX - box.left) / box.width) * (timeline.end - timeline.begin);
    const found = strip.segments.find(([, from, to]) => from <= at && at <= to);
    this.hint.textContent = found
      ? `${clock(at)}: ${WORDS[timeline.states[found[0]]]}, at most ${duration(found[3])} between beats`
      : `${clock(at)}`;
  }
}
