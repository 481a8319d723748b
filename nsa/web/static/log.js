// The end of a run's log: follows it while the box is at its end, and stays put while somebody reads.

import { make } from "./dom.js";
import { age, bytes } from "./format.js";

const MOST_LINES = 2000; // kept while somebody reads further up
const NEAR_PX = 8;

export class LogTail {
  // onRun(): another run is chosen
  constructor(onRun) {
    this.runs = make("select", { ariaLabel: "Run of the log", hidden: true, on: { change: () => onRun() } });
    this.filter = make("input", {
      type: "search",
      placeholder: "only lines with",
      ariaLabel: "Show only lines with this text",
      on: { input: () => this.sift() },
    });
    this.count = make("span", { className: "number", role: "status" });
    this.toEnd = make("button", {
      type: "button",
      textContent: "To the end",
      hidden: true,
      on: { click: () => this.follow() },
    });
    this.file = make("span", { className: "unit" });
    this.hint = make("span", { className: "hint number" });
    this.note = make("p", { className: "facts" });
    this.box = make("div", {
      className: "scroll log",
      tabIndex: 0,
      role: "log",
      ariaLabel: "Last lines of the log",
      ariaLive: "off",
      on: { scroll: () => this.look() },
    });
    this.node = make(
      "article",
      { className: "card chart wide", id: "log-tail" },
      make("header", {}, make("h3", { textContent: "Log" }), this.file, this.hint),
      make("div", { className: "controls" }, this.runs, this.filter, this.count, this.toEnd),
      this.box,
      this.note,
    );
    this.clear("");
  }

  // Which runs can be chosen.
  offer(runs) {
    const names = runs.map((run) => run.name).join("\n");
    if (names === this.names) return;
    this.names = names;
    this.runs.hidden = runs.length < 2;
    this.runs.replaceChildren(...runs.map((run) => make("option", { value: run.id, textContent: run.name })));
  }

  get run() {
    return Number(this.runs.value || 0);
  }

  // data: of /api/log; a line is [its place in the file, text]. now: Unix time of the server
  set(data, now) {
    const source = `${this.run} ${data.file} ${data.id}`;
    if (source !== this.source || data.size < this.size) this.clear(source);
    this.size = data.size ?? 0;
    const fresh = data.lines.filter(([place]) => place > this.last);
    if (fresh.length) {
      // More came than one answer holds.
      if (this.last >= 0 && fresh.length === data.lines.length)
        this.box.append(make("div", { className: "soft", textContent: "[lines in between are not shown]" }));
      this.last = fresh.at(-1)[0];
      this.box.append(...fresh.map(([, text]) => make("div", { textContent: text || " " })));
    }
    const most = this.atEnd ? data.lines.length : MOST_LINES;
    while (this.box.childElementCount > most) this.box.firstChild.remove();
    this.file.textContent = data.file ?? "";
    this.hint.textContent = data.file
      ? `${bytes(data.size)}, written ${age(Math.max(0, now - data.written))} ago`
      : "";
    this.note.textContent = data.problem || (data.lines.length ? "" : "The log is empty.");
    this.note.hidden = !this.note.textContent;
    this.box.hidden = !data.lines.length;
    this.sift();
  }

  clear(source) {
    this.source = source;
    this.size = 0;
    this.last = -1;
    this.atEnd = true;
    this.box.replaceChildren();
  }

  // Hide lines without the text of the filter.
  sift() {
    const word = this.filter.value.toLowerCase();
    let shown = 0;
    for (const line of this.box.children) {
      line.hidden = word !== "" && !line.textContent.toLowerCase().includes(word);
      shown += line.hidden ? 0 : 1;
    }
    const all = this.box.childElementCount;
    this.count.textContent = word ? `${shown} of ${all} lines` : all ? `last ${all} lines` : "";
    if (this.atEnd) this.follow();
  }

  follow() {
    this.box.scrollTop = this.box.scrollHeight;
    this.look();
  }

  look() {
    this.atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - NEAR_PX;
    this.toEnd.hidden = this.atEnd;
  }
}
