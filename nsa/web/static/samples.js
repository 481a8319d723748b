// Texts that the model generated: a card for each run, the newest text first.

import { make, runColour } from "./dom.js";
import { clock, integer } from "./format.js";

const NONE = "none yet: nsa train writes one when the run has done its last step (samples.jsonl)";

export class Samples {
  constructor() {
    this.chosen = new Map(); // run: index of the sample; the newest without an entry
    this.node = make("div", { className: "fit" });
  }

  // runs: [{ id, name, samples, problems }]
  set(runs) {
    this.runs = runs;
    this.draw();
  }

  draw() {
    const many = this.runs.length > 1;
    this.node.replaceChildren(...this.runs.map((run) => this.card(run, many)));
  }

  card(run, many) {
    const samples = run.samples ?? [];
    const index = Math.min(this.chosen.get(run.id) ?? samples.length - 1, samples.length - 1);
    const sample = samples[index];
    const swatch = make("span", { className: "swatch", colour: runColour(run.id) });
    return make(
      "article",
      { className: "card chart sample" },
      make(
        "header",
        {},
        many ? swatch : null,
        make("h3", { textContent: many ? run.name : "Generated text" }),
        samples.length > 1 ? this.steps(run, samples, index) : null,
        sample ? make("span", { className: "unit", textContent: whenOf(sample, samples.length > 1) }) : null,
      ),
      sample ? textOf(sample) : make("p", { className: "soft", textContent: NONE }),
      ...(run.problems ?? []).map((text) => make("p", { className: "facts", textContent: text })),
    );
  }

  steps(run, samples, index) {
    const select = make(
      "select",
      {
        ariaLabel: "Step of the sample",
        on: {
          change: () => {
            this.chosen.set(run.id, select.selectedIndex);
            this.draw();
            this.node.querySelectorAll("article")[this.runs.indexOf(run)].querySelector("select").focus();
          },
        },
      },
      samples.map((s, i) =>
        make("option", { textContent: `step ${integer(s.step)}`, selected: i === index }),
      ),
    );
    return select;
  }
}

function whenOf({ step, ts, prompt }, chosen) {
  if (step === null) return "of the last step (sample.txt)";
  return [chosen ? null : `step ${integer(step)}`, clock(ts), prompt ? "the prompt is grey" : null]
    .filter(Boolean)
    .join(", ");
}

const textOf = ({ prompt, text }) =>
  make(
    "div",
    { className: "scroll text", tabIndex: 0, role: "group", ariaLabel: "Generated text" },
    prompt ? make("span", { className: "prompt", title: "the prompt", textContent: prompt }) : null,
    make("span", { textContent: text }),
  );
