// Which blocks the queries read: a square for each layer.

import { heatColour, make, sharpen } from "./dom.js";
import { integer } from "./format.js";

export class SelectionMaps {
  // load(step) asks for the map of another step
  constructor(load) {
    this.load = load;
    this.group = "all";
    this.groups = make("select", {
      ariaLabel: "KV head",
      on: {
        change: () => {
          this.group = this.groups.value;
          this.draw();
        },
      },
    });
    this.slider = make("input", {
      type: "range",
      min: 0,
      step: 1,
      ariaLabel: "Step of the map",
      on: { input: () => this.onSlide() },
    });
    this.label = make("span", { className: "number" });
    this.hint = make("span", { className: "hint number" });
    this.title = make("h3", { textContent: "Blocks that queries read" });
    this.scale = make("canvas");
    this.maps = make("div", { className: "maps" });
    this.note = make("p", { className: "facts" });
    this.node = make(
      "article",
      { className: "card chart wide", id: "selection-maps", hidden: true },
      make(
        "header",
        {},
        this.title,
        make("span", { className: "unit", textContent: "vertical: query position, horizontal: block position" }),
        this.hint,
      ),
      make(
        "div",
        { className: "controls" },
        make("label", {}, "Step ", this.slider),
        this.label,
        make("label", {}, "KV head ", this.groups),
        make("span", { className: "scale" }, "0%", this.scale, "100% of the blocks"),
      ),
      this.maps,
      this.note,
    );
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
      this.groups.replaceChildren(
        make("option", { value: "all", textContent: "all" }),
        ...Array.from({ length: count }, (_, i) => make("option", { value: i, textContent: i })),
      );
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
    for (let x = 0; x < 90; x += 1) {
      context.fillStyle = heatColour(Math.sqrt(x / 90));
      context.fillRect(x, 0, 1, 10);
    }
    this.maps.style.gridTemplateColumns = `repeat(${columnsFor(this.data.reads_pct.length, this.maps.clientWidth)}, minmax(0, 220px))`;
    const layers = this.data.reads_pct.map((groups) => this.cells(groups));
    while (this.maps.children.length > layers.length) this.maps.lastChild.remove();
    layers.forEach((cells, layer) => {
      const figure = this.maps.children[layer] ?? this.maps.appendChild(this.figure(layer));
      paint(figure.firstChild, cells);
    });
  }

  figure(layer) {
    const canvas = make("canvas", {
      role: "img",
      ariaLabel: `Blocks read in layer ${layer}`,
      on: {
        pointermove: (event) => this.onMove(event, layer),
        pointerleave: () => {
          this.hint.textContent = "";
        },
      },
    });
    return make("figure", {}, canvas, make("figcaption", { textContent: `layer ${layer}` }));
  }

  // [queries][blocks] shares of one KV head, or their mean.
  cells(groups) {
    const chosen = this.group === "all" ? groups : [groups[Number(this.group)]];
    const { bins } = this.data;
    return Array.from({ length: bins }, (_, q) =>
      Array.from(
        { length: bins },
        (_, k) => chosen.reduce((sum, group) => sum + (group[q]?.[k] ?? 0), 0) / chosen.length / 100,
      ),
    );
  }

  onMove(event, layer) {
    const box = event.currentTarget.getBoundingClientRect();
    const { bins, num_blocks, block_tokens } = this.data;
    const at = (share) => Math.min(bins - 1, Math.max(0, Math.floor(share * bins)));
    const q = at((event.clientY - box.top) / box.height),
      k = at((event.clientX - box.left) / box.width);
    const tokens = (bin) =>
      `${integer(Math.ceil((bin * num_blocks) / bins) * block_tokens)}–${integer(Math.ceil(((bin + 1) * num_blocks) / bins) * block_tokens - 1)}`;
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
  cells.forEach((row, q) =>
    row.forEach((share, k) => {
      if (k > q) return;
      context.fillStyle = heatColour(Math.sqrt(share));
      context.fillRect(k, q, 1, 1);
    }),
  );
}
