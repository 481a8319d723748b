// Gates by layer over time: a picture with a row for each layer.

import { heatColour, make, sharpen, variable } from "./dom.js";
import { nearest } from "./chart.js";
import { compact } from "./format.js";
import { ticks } from "./scale.js";

const EDGE = { left: 30, right: 12, bottom: 22 };

export class LayerHeat {
  // fields: what can be shown, from chartTable; key: what is shown first.
  constructor(run, fields, key, shared) {
    this.shared = shared;
    this.select = make(
      "select",
      {
        ariaLabel: "What is shown by layer",
        on: {
          change: () => {
            this.field = fields[this.select.selectedIndex];
            this.draw();
          },
        },
      },
      fields.map((f) => make("option", { textContent: f.label, selected: f.key === key })),
    );
    this.field = fields.find((f) => f.key === key) ?? fields[0];
    this.hint = make("div", { className: "legend number" });
    this.canvas = make("canvas", { role: "img" });
    this.plot = make("div", { className: "plot heat" }, this.canvas);
    this.title = make("h3", { textContent: "By layer" });
    this.node = make(
      "article",
      { className: "card chart" },
      make("header", {}, this.title, this.select),
      this.hint,
      this.plot,
    );
    this.run = run;
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.hint.textContent = this.words;
      this.shared.onHover(null);
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  set(data, title) {
    this.data = data;
    this.title.textContent = title;
    this.draw();
  }

  rows() {
    return this.data?.fields[this.field.key] ?? [];
  }

  top() {
    if (this.field.top !== null) return this.field.top;
    return Math.max(
      1e-9,
      ...this.rows()
        .flat()
        .filter((value) => value !== null),
    );
  }

  draw() {
    const rows = this.rows();
    this.node.hidden = rows.length === 0;
    const width = this.plot.clientWidth;
    if (!rows.length || !width) return;
    const each = Math.max(9, Math.min(40, Math.floor(212 / rows.length)));
    const height = each * rows.length + EDGE.bottom + 4;
    this.plot.style.height = `${height}px`;
    const context = sharpen(this.canvas, width, height);
    const count = rows[0].length,
      room = width - EDGE.left - EDGE.right,
      top = this.top();
    const gap = each > 10 ? 1 : 0;
    this.box = { each, room, count };
    rows.forEach((row, layer) =>
      row.forEach((value, i) => {
        if (value === null) return;
        context.fillStyle = heatColour(value / top);
        const x = EDGE.left + (room * i) / count;
        context.fillRect(x, each * layer, room / count + 0.6, each - gap);
      }),
    );
    context.fillStyle = variable("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const skip = Math.ceil(11 / each);
    rows.forEach((_, layer) => {
      if (layer % skip === 0) context.fillText(String(layer), EDGE.left - 7, each * (layer + 0.5));
    });
    context.textBaseline = "top";
    context.textAlign = "center";
    const steps = this.data.step;
    for (const step of ticks(steps[0], steps.at(-1), Math.max(2, Math.floor(width / 90)))) {
      const x = EDGE.left + (room * (nearest(steps, step) + 0.5)) / count;
      if (x < width - 14) context.fillText(compact(step, 4), x, each * rows.length + 7);
    }
    const last = rows.map((row) => row.at(-1)).filter((value) => value !== null);
    const words =
      (this.words = `last: from ${this.field.format(Math.min(...last))} to ${this.field.format(Math.max(...last))} over ${rows.length} layers`);
    this.canvas.setAttribute("aria-label", `${this.field.label} by layer, ${words}`);
    this.hint.textContent = words;
  }

  onMove(event) {
    if (!this.box) return;
    const box = this.canvas.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left - EDGE.left) / this.box.room) * this.box.count);
    const layer = Math.floor((event.clientY - box.top) / this.box.each);
    const value = this.rows()[layer]?.[i];
    if (value === undefined || value === null) {
      this.hint.textContent = this.words;
      return;
    }
    this.hint.textContent = `layer ${layer}, step ${this.data.step[i].toLocaleString("en-US")}: ${this.field.format(value)}`;
    this.shared.onHover(this.data.step[i]);
  }
}
