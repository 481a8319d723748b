// How far back the queries read: bars over the distance, in blocks.

import { make, runColour, sharpen, variable } from "./dom.js";
import { ticks } from "./scale.js";

export class Distances {
  constructor() {
    this.canvas = make("canvas", { role: "img" });
    this.legend = make("div", { className: "legend" });
    this.hint = make("span", { className: "hint number" });
    this.plot = make("div", { className: "plot" }, this.canvas);
    this.node = make(
      "article",
      { className: "card chart", id: "distances", hidden: true },
      make(
        "header",
        {},
        make("h3", { textContent: "Distance of reads" }),
        make("span", { className: "unit", textContent: "blocks back" }),
        this.hint,
      ),
      this.legend,
      this.plot,
    );
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.hint.textContent = "";
    });
  }

  // runs: [{ id, name, selection }]
  set(runs) {
    this.runs = runs.filter((run) => run.selection?.distance_pct);
    this.node.hidden = !this.runs.length;
    this.draw();
  }

  bars() {
    return this.runs.map((run) => {
      const { distance_pct: layers, edges } = run.selection;
      const rows = layers.flat();
      const labels = edges
        .map((edge, i) => (i < 3 ? String(edge) : `${edges[i - 1] + 1}–${edge}`))
        .concat("first");
      const mean = labels.map((_, i) => rows.reduce((sum, row) => sum + (row[i] ?? 0), 0) / rows.length);
      return {
        colour: runColour(run.id),
        name: run.name,
        labels,
        mean,
        low: labels.map((_, i) => Math.min(...rows.map((row) => row[i] ?? 0))),
        high: labels.map((_, i) => Math.max(...rows.map((row) => row[i] ?? 0))),
      };
    });
  }

  draw() {
    const width = this.plot.clientWidth,
      height = this.plot.clientHeight;
    if (!this.runs?.length || !width) return;
    const context = sharpen(this.canvas, width, height);
    const sets = (this.drawn = this.bars());
    const labels = sets.map((s) => s.labels).sort((a, b) => b.length - a.length)[0];
    const most = Math.max(...sets.flatMap((s) => s.high), 1);
    const left = 40,
      bottom = height - 22,
      room = (width - left - 8) / labels.length;
    this.box = { left, room, labels };
    const y = (value) => bottom - (value / (1.05 * most)) * (bottom - 8);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(0, most, 4)) {
      context.strokeStyle = variable("--grid");
      context.beginPath();
      context.moveTo(left, Math.round(y(value)) + 0.5);
      context.lineTo(width - 8, Math.round(y(value)) + 0.5);
      context.stroke();
      context.fillStyle = variable("--soft");
      context.fillText(`${value}%`, left - 6, y(value));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const skip = room < 34 ? 2 : 1;
    labels.forEach((label, i) => {
      if (i % skip === 0 || label === "first") context.fillText(label, left + (i + 0.5) * room, bottom + 7);
    });
    const bar = Math.min(26, (room * 0.76) / sets.length);
    sets.forEach((set, n) =>
      set.mean.forEach((value, i) => {
        const place = set.labels[i] === "first" ? labels.length - 1 : i;
        const x = left + (place + 0.5) * room + (n - sets.length / 2) * bar;
        context.fillStyle = set.colour;
        context.globalAlpha = 0.85;
        context.fillRect(x + 0.5, y(value), bar - 1, bottom - y(value));
        context.globalAlpha = 1;
        context.strokeStyle = variable("--soft");
        context.beginPath();
        context.moveTo(x + bar / 2, y(set.low[i]));
        context.lineTo(x + bar / 2, y(set.high[i]));
        context.stroke();
      }),
    );
    this.legend.replaceChildren(
      ...(sets.length > 1
        ? sets.map((set) => {
            const swatch = make("i", {});
            swatch.style.borderTopColor = set.colour;
            return make("span", {}, swatch, set.name);
          })
        : []),
      make("span", {
        className: "row",
        textContent: "bars: mean over layers and KV heads, lines: minimum to maximum",
      }),
    );
    this.canvas.setAttribute(
      "aria-label",
      `Distance of reads: ${sets[0].labels.map((label, i) => `${label}: ${sets[0].mean[i].toFixed(1)}%`).join(", ")}`,
    );
  }

  onMove(event) {
    if (!this.box) return;
    const i = Math.floor(
      (event.clientX - this.canvas.getBoundingClientRect().left - this.box.left) / this.box.room,
    );
    const label = this.box.labels[i];
    if (label === undefined) return;
    const words = this.drawn.map((set) =>
      set.labels.includes(label) ? `${set.mean[set.labels.indexOf(label)].toFixed(1)}%` : "–",
    );
    this.hint.textContent = `${label === "first" ? "first block" : `${label} back`}: ${words.join(", ")}`;
  }
}
