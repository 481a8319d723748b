// Checkpoints, the log of alarms, notes on files, and settings side by side.

import { make, runColour } from "./dom.js";
import { bytes, clock, duration, integer } from "./format.js";

export function filesOf(runs) {
  const many = runs.length > 1;
  return [checkpoints(runs, many), alarmLog(runs, many), notes(runs, many)].filter(Boolean);
}

function card(title, ...children) {
  return make(
    "article",
    { className: "card chart" },
    make("header", {}, make("h3", { textContent: title })),
    ...children,
  );
}

const nameCell = (run, many) =>
  many
    ? [make("td", {}, make("span", { className: "swatch", colour: runColour(run.id) }), ` ${run.name}`)]
    : [];
const nameHead = (many) => (many ? [make("th", { textContent: "run" })] : []);

function checkpoints(runs, many) {
  const rows = runs.flatMap((run) =>
    (run.checkpoints ?? []).slice(0, 50).map((c) =>
      make(
        "tr",
        {},
        ...nameCell(run, many),
        make("td", { className: "number", textContent: integer(c.step) }),
        make("td", { className: "number", textContent: bytes(c.num_bytes) }),
        make("td", {
          className: "number",
          textContent: clock(c.written),
          title: `${duration(run.now - c.written)} ago`,
        }),
      ),
    ),
  );
  const free = runs.filter((run) => run.free_bytes).map((run) => bytes(run.free_bytes))[0];
  const head = make(
    "tr",
    {},
    ...nameHead(many),
    ...["step", "size", "written"].map((text) => make("th", { className: "number", textContent: text })),
  );
  return card(
    "Checkpoints",
    rows.length
      ? make(
          "div",
          { className: "scroll plain" },
          make("table", {}, make("thead", {}, head), make("tbody", {}, rows)),
        )
      : make("p", { className: "soft", textContent: "none yet" }),
    free ? make("p", { className: "facts", textContent: `${free} free on the disk of the run` }) : null,
  );
}

function alarmLog(runs, many) {
  const rows = runs
    .flatMap((run) => (run.alarm_log ?? []).map((a) => ({ run, a })))
    .sort((x, y) => y.a.ts - x.a.ts)
    .map(({ run, a }) =>
      make(
        "tr",
        {},
        ...nameCell(run, many),
        make("td", { className: "number", textContent: clock(a.ts) }),
        make("td", { textContent: `${a.action} ${a.type.replaceAll("_", " ")}` }),
        make("td", { textContent: a.text }),
      ),
    );
  return card(
    "Log of alarms",
    rows.length
      ? make("div", { className: "scroll" }, make("table", {}, make("tbody", {}, rows)))
      : make("p", { className: "soft", textContent: "alarms.jsonl has no entries" }),
  );
}

function notes(runs, many) {
  const items = runs.flatMap((run) =>
    (run.problems ?? []).map((text) => make("li", { textContent: many ? `${run.name}: ${text}` : text })),
  );
  return items.length ? card("Notes on the files", make("ul", { className: "problems" }, items)) : null;
}

export class Settings {
  constructor() {
    this.search = make("input", {
      type: "search",
      placeholder: "find a key or a value",
      ariaLabel: "Find a setting",
      on: { input: () => this.draw() },
    });
    this.only = make("input", { type: "checkbox", checked: true, on: { change: () => this.draw() } });
    this.onlyLabel = make("label", {}, this.only, " only what differs");
    this.body = make("div", { className: "scroll settings" });
    this.node = make(
      "article",
      { className: "card chart wide", id: "settings-table" },
      make("header", {}, make("h3", { textContent: "Config and environment" })),
      make("div", { className: "controls" }, this.search, this.onlyLabel),
      this.body,
    );
  }

  set(data) {
    this.data = data;
    this.onlyLabel.hidden = data.names.length < 2;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const many = this.data.names.length > 1,
      word = this.search.value.toLowerCase();
    const wanted = (row) =>
      (!many || !this.only.checked || row.differs || word) &&
      (!word ||
        row.key.toLowerCase().includes(word) ||
        row.values.some((v) => v?.toLowerCase().includes(word)));
    const rows = ["config", "env"].flatMap((part) =>
      this.data[part]
        .filter(wanted)
        .map((row) =>
          make(
            "tr",
            { className: many && row.differs ? "differs" : "" },
            make("td", { textContent: part === "env" ? `env ${row.key}` : row.key }),
            ...row.values.map((value) => make("td", { textContent: value ?? "–" })),
          ),
        ),
    );
    const head = make(
      "tr",
      {},
      make("th", { textContent: "key" }),
      ...(many
        ? this.data.names.map((name) => make("th", { textContent: name }))
        : [make("th", { textContent: "value" })]),
    );
    const none =
      this.data.config.length + this.data.env.length
        ? many
          ? "the runs do not differ"
          : "no match"
        : "config.yaml and env.json are missing";
    this.body.replaceChildren(
      rows.length
        ? make("table", {}, make("thead", {}, head), make("tbody", {}, rows))
        : make("p", { className: "soft", textContent: none }),
    );
  }
}
