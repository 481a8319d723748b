// Which blocks the queries read: a square for each layer, and how far back they look.

import { heatColour, make, runColour, sharpen, variable } from "./dom.js";
import { integer } from "./format.js";
import { ticks } from "./scale.js";

export class SelectionMaps {
  // load(step) asks for the map of another step
  constructor(load) {
    this.load = load;
    this.group = "all";
    this.groups = make("select", { ariaLabel: "KV head", on: { change: () => { this.group = this.groups.value; this.draw(); } } });
    this.slider = make("input", { type: "range", min: 0, step: 1, ariaLabel: "Step of the map", on: { input: () => this.onSlide() } });
    this.label = make("span", { className: "number" });
    this.hint = make("span", { className: "hint number" });
    this.title = make("h3", { textContent: "Blocks that queries read" });
    this.scale = make("canvas");
    this.maps = make("div", { className: "maps" });
    this.note = make("p", { className: "facts" });
    this.node = make("article", { className: "card chart wide", id: "selection-maps", hidden: true },
      make("header", {}, this.title, make("span", { className: "unit", textContent: "down: the query's place, across: the block's place" }), this.hint),
      make("div", { className: "controls" }, make("label", {}, "Step ", this.slider), this.label, make("label", {}, "KV head ", this.groups),
        make("span", { className: "scale" }, "0%", this.scale, "100% of the blocks")),
      this.maps, this.note);
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  set(data, name) {
    this.data = data;
    this.node.hidden = !data?.reads_pct;
    if (this.node.hidden) return;
    this.title.textContent = name ? `Blocks that queries read: ${name}` : "Blocks that queries read";
    this.slider.max = data.steps.length - 1;
    this.slider.value = data.steps.indexOf(data.step);
    this.label.textContent = integer(data.step);
    const count = data.reads_pct[0].length;
    if (this.groups.options.length !== count + 1)
      this.groups.replaceChildren(make("option", { value: "all", textContent: "all" }), ...Array.from({ length: count }, (_, i) => make("option", { value: i, textContent: i })));
    this.note.textContent = `${data.num_blocks} blocks of ${data.block_tokens} tokens, in ${data.bins} bins. Every query reads the first block, its own and the one before; the others are chosen.`;
    this.draw();
  }

  onSlide() {
    const step = this.data.steps[Number(this.slider.value)];
    this.label.textContent = integer(step);
    this.load(step);
  }

  draw() {
    if (!this.data?.reads_pct) return;
    const context = sharpen(this.scale, 90, 10);
    for (let x = 0; x < 90; x += 1) { context.fillStyle = heatColour(Math.sqrt(x / 90)); context.fillRect(x, 0, 1, 10); }
    this.maps.style.gridTemplateColumns = `repeat(${columnsFor(this.data.reads_pct.length, this.maps.clientWidth)}, minmax(0, 220px))`;
    const layers = this.data.reads_pct.map((groups) => this.cells(groups));
    while (this.maps.children.length > layers.length) this.maps.lastChild.remove();
    layers.forEach((cells, layer) => {
      const figure = this.maps.children[layer] ?? this.maps.appendChild(this.figure(layer));
      paint(figure.firstChild, cells);
    });
  }

  figure(layer) {
    const canvas = make("canvas", { role: "img", ariaLabel: `Blocks read in layer ${layer}`, on: {
      pointermove: (event) => this.onMove(event, layer), pointerleave: () => { this.hint.textContent = ""; } } });
    return make("figure", {}, canvas, make("figcaption", { textContent: `layer ${layer}` }));
  }

  // [queries][blocks] shares of one KV head, or their mean.
  cells(groups) {
    const chosen = this.group === "all" ? groups : [groups[Number(this.group)]];
    const { bins } = this.data;
    return Array.from({ length: bins }, (_, q) => Array.from({ length: bins }, (_, k) =>
      chosen.reduce((sum, group) => sum + (group[q]?.[k] ?? 0), 0) / chosen.length / 100));
  }

  onMove(event, layer) {
    const box = event.currentTarget.getBoundingClientRect();
    const { bins, num_blocks, block_tokens } = this.data;
    const at = (share) => Math.min(bins - 1, Math.max(0, Math.floor(share * bins)));
    const q = at((event.clientY - box.top) / box.height), k = at((event.clientX - box.left) / box.width);
    const tokens = (bin) => `${integer(Math.ceil((bin * num_blocks) / bins) * block_tokens)}–${integer(Math.ceil(((bin + 1) * num_blocks) / bins) * block_tokens - 1)}`;
    const share = this.cells(this.data.reads_pct[layer])[q][k];
    this.hint.textContent = `layer ${layer}: queries ${tokens(q)} read ${(100 * share).toFixed(0)}% of the blocks at ${tokens(k)}`;
  }
}

// As many as fit, and where possible so that the last row is full.
function columnsFor(count, width) {
  const most = Math.max(1, Math.min(count, Math.floor((width + 10) / 110)));
  for (let columns = most; columns >= most / 2; columns -= 1) if (count % columns === 0) return columns;
  return most;
}

function paint(canvas, cells) {
  const bins = cells.length;
  canvas.width = canvas.height = bins;
  const context = canvas.getContext("2d");
  cells.forEach((row, q) => row.forEach((share, k) => {
    if (k > q) return;
    context.fillStyle = heatColour(Math.sqrt(share));
    context.fillRect(k, q, 1, 1);
  }));
}

export class Distances {
  constructor() {
    this.canvas = make("canvas", { role: "img" });
    this.legend = make("div", { className: "legend" });
    this.hint = make("span", { className: "hint number" });
    this.plot = make("div", { className: "plot" }, this.canvas);
    this.node = make("article", { className: "card chart", id: "distances", hidden: true },
      make("header", {}, make("h3", { textContent: "Distance of reads" }), make("span", { className: "unit", textContent: "blocks back" }), this.hint),
      this.legend, this.plot);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => { this.hint.textContent = ""; });
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
      const labels = edges.map((edge, i) => (i < 3 ? String(edge) : `${edges[i - 1] + 1}–${edge}`)).concat("first");
      const mean = labels.map((_, i) => rows.reduce((sum, row) => sum + (row[i] ?? 0), 0) / rows.length);
      return { colour: runColour(run.id), name: run.name, labels, mean, low: labels.map((_, i) => Math.min(...rows.map((row) => row[i] ?? 0))), high: labels.map((_, i) => Math.max(...rows.map((row) => row[i] ?? 0))) };
    });
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!this.runs?.length || !width) return;
    const context = sharpen(this.canvas, width, height);
    const sets = this.drawn = this.bars();
    const labels = sets.map((s) => s.labels).sort((a, b) => b.length - a.length)[0];
    const most = Math.max(...sets.flatMap((s) => s.high), 1);
    const left = 40, bottom = height - 22, room = (width - left - 8) / labels.length;
    this.box = { left, room, labels };
    const y = (value) => bottom - (value / (1.05 * most)) * (bottom - 8);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(0, most, 4)) {
      context.strokeStyle = variable("--grid");
      context.beginPath(); context.moveTo(left, Math.round(y(value)) + 0.5); context.lineTo(width - 8, Math.round(y(value)) + 0.5); context.stroke();
      context.fillStyle = variable("--soft");
      context.fillText(`${value}%`, left - 6, y(value));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const skip = room < 34 ? 2 : 1;
    labels.forEach((label, i) => { if (i % skip === 0 || label === "first") context.fillText(label, left + (i + 0.5) * room, bottom + 7); });
    const bar = Math.min(26, (room * 0.76) / sets.length);
    sets.forEach((set, n) => set.mean.forEach((value, i) => {
      const place = set.labels[i] === "first" ? labels.length - 1 : i;
      const x = left + (place + 0.5) * room + (n - sets.length / 2) * bar;
      context.fillStyle = set.colour;
      context.globalAlpha = 0.85;
      context.fillRect(x + 0.5, y(value), bar - 1, bottom - y(value));
      context.globalAlpha = 1;
      context.strokeStyle = variable("--soft");
      context.beginPath(); context.moveTo(x + bar / 2, y(set.low[i])); context.lineTo(x + bar / 2, y(set.high[i])); context.stroke();
    }));
    this.legend.replaceChildren(...(sets.length > 1 ? sets.map((set) => {
      const swatch = make("i", {});
      swatch.style.borderTopColor = set.colour;
      return make("span", {}, swatch, set.name);
    }) : []), make("span", { className: "row", textContent: "bars: mean over layers and KV heads, lines: least to most" }));
    this.canvas.setAttribute("aria-label", `Distance of reads: ${sets[0].labels.map((label, i) => `${label}: ${sets[0].mean[i].toFixed(1)}%`).join(", ")}`);
  }

  onMove(event) {
    if (!this.box) return;
    const i = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left - this.box.left) / this.box.room);
    const label = this.box.labels[i];
    if (label === undefined) return;
    const words = this.drawn.map((set) => (set.labels.includes(label) ? `${set.mean[set.labels.indexOf(label)].toFixed(1)}%` : "–"));
    this.hint.textContent = `${label === "first" ? "first block" : `${label} back`}: ${words.join(", ")}`;
  }
}
