// A line chart over steps, tokens or time: mean lines, least-to-largest bands, a crosshair that all charts share.

import { make, sharpen, variable } from "./dom.js";
import { logTicks, range, ticks } from "./scale.js";

const EDGE = { left: 52, right: 12, top: 8, bottom: 22 };
const LEGEND_LINE = 22; // px, as in style.css
const DASHES = [[], [6, 4], [2, 3]];

export class Chart {
  // shared: { axis, hover, range, extent, onHover(place), onZoom(range), onReset() }; places are on the axis
  constructor(definition, shared) {
    this.definition = definition;
    this.shared = shared;
    this.lines = [];
    this.canvas = make("canvas");
    this.overlay = make("canvas", { tabIndex: 0, role: "img" });
    this.empty = make("div", { className: "empty", textContent: "not measured" });
    this.enlarger = button("Enlarge", `Enlarge ${definition.title}`, () => this.enlarge());
    const csv = button("CSV", `Download ${definition.title} as CSV`, () => this.download());
    const actions = make("div", { className: "actions" }, csv, this.enlarger);
    this.plot = make("div", { className: "plot" }, this.canvas, this.overlay, this.empty);
    this.entries = make("div", { className: "entries" });
    this.more = make("button", {
      className: "more",
      type: "button",
      ariaExpanded: "false",
      on: { click: () => this.unfold() },
    });
    this.legend = make("div", { className: "legend fits" }, this.entries, this.more);
    this.hint = make("span", { className: "hint number" });
    this.node = make(
      "article",
      { className: "card chart", id: `chart-${definition.id}` },
      make(
        "header",
        {},
        make("h3", { textContent: definition.title }),
        make("span", { className: "unit", textContent: definition.unit }),
        this.hint,
      ),
      this.legend,
      this.plot,
      actions,
    );
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // As wide as the page, and back.
  enlarge(large = !this.node.classList.contains("large")) {
    this.node.classList.toggle("large", large);
    this.enlarger.textContent = large ? "Shrink" : "Enlarge";
    this.draw();
  }

  // What is drawn: the points of the range that is shown, with the ends of their bands.
  download() {
    if (!this.x) return;
    const link = make("a", {
      href: URL.createObjectURL(new Blob([csvOf(this.lines, this.x)], { type: "text/csv" })),
      download: `${this.definition.id}.csv`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may read it later
  }

  // lines: [{ label, colour, dash, steps, x, y, low, high, points }]
  set(lines) {
    this.lines = lines.filter((line) => line.y.some((value) => value !== null));
    this.draw();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (!width) return;
    this.size = { width, height };
    const context = sharpen(this.canvas, width, height);
    this.empty.hidden = this.lines.length > 0;
    this.y = this.lines.length ? range(this.lines, { ...this.definition, log: this.isLog() }) : null;
    if (!this.y) {
      this.drawOverlay();
      fitLegends([this]);
      return;
    }
    this.x = this.shared.range ?? this.shared.extent ?? extent(this.lines);
    this.drawAxes(context);
    context.save();
    context.beginPath();
    context.rect(EDGE.left, EDGE.top - 1, width - EDGE.left - EDGE.right, height - EDGE.top - EDGE.bottom + 2);
    context.clip();
    for (const line of this.lines) this.drawLine(context, line);
    context.restore();
    this.drawOverlay();
    fitLegends([this]);
  }

  isLog() {
    return this.definition.log || (this.definition.log_switch && this.shared.logLoss);
  }

  px(step) {
    const [low, high] = this.x;
    return EDGE.left + ((step - low) / (high - low || 1)) * (this.size.width - EDGE.left - EDGE.right);
  }

  py(value) {
    let [low, high] = this.y;
    if (this.isLog())
      [low, high, value] = [Math.log(low), Math.log(high), Math.log(Math.max(value, this.y[0] / 10))];
    const room = this.size.height - EDGE.top - EDGE.bottom;
    return EDGE.top + (1 - (value - low) / (high - low || 1)) * room;
  }

  drawAxes(context) {
    const { width, height } = this.size;
    const bottom = height - EDGE.bottom;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = variable("--soft");
    context.strokeStyle = variable("--grid");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const format = this.definition.tick;
    for (const value of this.isLog() ? logTicks(...this.y) : ticks(...this.y, 4)) {
      const y = Math.round(this.py(value)) + 0.5;
      if (y < EDGE.top - 2 || y > bottom + 1) continue;
      context.beginPath();
      context.moveTo(EDGE.left, y);
      context.lineTo(width - EDGE.right, y);
      context.stroke();
      context.fillText(format(value), EDGE.left - 7, y);
    }
    context.textBaseline = "top";
    for (const step of ticks(...this.x, Math.max(2, Math.floor(width / 90)))) {
      const x = this.px(step);
      if (x < EDGE.left - 1 || x > width - EDGE.right + 1) continue;
      context.textAlign = x > width - EDGE.right - 14 ? "right" : x < EDGE.left + 8 ? "left" : "center";
      context.fillText(this.shared.axis.tick(step), x, bottom + 7);
    }
  }

  drawLine(context, line) {
    context.strokeStyle = line.colour;
    context.fillStyle = line.colour;
    if (line.low) this.drawBand(context, line);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.setLineDash(DASHES[line.dash ?? 0]);
    context.beginPath();
    let pen = false;
    for (let i = 0; i < line.x.length; i += 1) {
      if (line.y[i] === null) {
        pen = false;
        continue;
      }
      const x = this.px(line.x[i]),
        y = this.py(line.y[i]);
      if (pen) context.lineTo(x, y);
      else context.moveTo(x, y);
      pen = true;
    }
    context.stroke();
    context.setLineDash([]);
    if (line.points || line.x.length === 1)
      for (let i = 0; i < line.x.length; i += 1)
        if (line.y[i] !== null) {
          context.beginPath();
          context.arc(this.px(line.x[i]), this.py(line.y[i]), 2.5, 0, 7);
          context.fill();
        }
    this.drawClipped(context, line);
  }

  drawBand(context, line) {
    context.globalAlpha = 0.18;
    let start = 0;
    while (start < line.x.length) {
      while (start < line.x.length && line.low[start] === null) start += 1;
      let end = start;
      while (end < line.x.length && line.low[end] !== null) end += 1;
      if (end > start) {
        context.beginPath();
        for (let i = start; i < end; i += 1) context.lineTo(this.px(line.x[i]), this.py(line.high[i]));
        for (let i = end - 1; i >= start; i -= 1) context.lineTo(this.px(line.x[i]), this.py(line.low[i]));
        context.fill();
      }
      start = end + 1;
    }
    context.globalAlpha = 1;
  }

  // A small mark at the upper edge where something lies above it.
  drawClipped(context, line) {
    let last = -100;
    for (let i = 0; i < line.x.length; i += 1) {
      const value = line.high?.[i] ?? line.y[i];
      if (value === null || value <= this.y[1]) continue;
      const x = Math.max(this.px(line.x[i]), EDGE.left + 5);
      if (x - last < 9) continue;
      last = x;
      context.beginPath();
      context.moveTo(x, EDGE.top);
      context.lineTo(x - 4, EDGE.top + 6);
      context.lineTo(x + 4, EDGE.top + 6);
      context.fill();
    }
  }

  drawOverlay() {
    if (!this.size) return;
    const context = sharpen(this.overlay, this.size.width, this.size.height);
    const hover = this.y ? this.shared.hover : null;
    const inside = hover !== null && this.x && hover >= this.x[0] && hover <= this.x[1];
    if (this.drag) {
      context.fillStyle = variable("--run-0");
      context.globalAlpha = 0.12;
      const from = Math.min(...this.drag),
        to = Math.max(...this.drag);
      context.fillRect(from, EDGE.top, to - from, this.size.height - EDGE.top - EDGE.bottom);
      context.globalAlpha = 1;
    }
    if (inside) this.drawCrosshair(context, hover);
    this.hint.textContent = inside ? this.shared.axis.format(hover) : "";
    this.readOut(inside ? hover : null);
  }

  drawCrosshair(context, hover) {
    const x = Math.round(this.px(hover)) + 0.5;
    context.strokeStyle = variable("--soft");
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(x, EDGE.top);
    context.lineTo(x, this.size.height - EDGE.bottom);
    context.stroke();
    context.globalAlpha = 1;
    for (const line of this.lines) {
      const i = nearest(line.x, hover);
      if (line.y[i] === null) continue;
      context.fillStyle = line.colour;
      context.beginPath();
      context.arc(this.px(line.x[i]), Math.max(this.py(line.y[i]), EDGE.top), 3, 0, 7);
      context.fill();
    }
  }

  // The legend has the value at the crosshair, with a band also its ends; or else the last number
  // that was logged, as the head of the run does. What the curve makes of it is called smoothed.
  readOut(hover) {
    const format = this.definition.format;
    const words = [];
    const parts = this.lines.map((line) => {
      const i = hover === null ? lastKnown(line.y) : nearest(line.x, hover);
      const has = line.low && line.low[i] !== null && line.high[i] > line.low[i] && hover !== null;
      const drawn = format(line.y[i]) + (has ? ` (${format(line.low[i])} to ${format(line.high[i])})` : "");
      const last = hover === null && Number.isFinite(line.last) ? `${format(line.last)}, ` : "";
      const text = line.smoothed ? `${last}smoothed ${drawn}` : last ? format(line.last) : drawn;
      words.push(`${line.label} ${text}`);
      const swatch = make("i", { className: `dash-${line.dash ?? 0}` });
      swatch.style.borderTopColor = line.colour;
      return {
        row: line.row,
        span: make("span", { className: "entry" }, swatch, line.name ?? line.label, make("b", { textContent: text })),
      };
    });
    this.entries.replaceChildren(...inRows(parts));
    this.overlay.setAttribute("aria-label", `${this.definition.title}: ${words.join(", ") || "not measured"}`);
  }

  // Entries of the legend that lie below its first line.
  numBelow() {
    const bottom = this.entries.getBoundingClientRect().top + LEGEND_LINE + 2;
    const entries = [...this.entries.querySelectorAll(".entry")];
    return entries.filter((entry) => entry.getBoundingClientRect().bottom > bottom).length;
  }

  // What the button of the legend says.
  label(count) {
    const open = this.legend.classList.contains("open");
    const text = open ? "less" : `+${count} more`;
    if (this.more.textContent === text) return;
    this.more.textContent = text;
    this.more.title = `${open ? "Fold" : "Show"} the legend of ${this.definition.title}`;
  }

  unfold(open = !this.legend.classList.contains("open")) {
    this.legend.classList.toggle("open", open);
    this.more.ariaExpanded = String(open);
    fitLegends([this]);
  }

  listen() {
    const stepAt = (event) => {
      const x = event.clientX - this.overlay.getBoundingClientRect().left;
      const share = (x - EDGE.left) / (this.size.width - EDGE.left - EDGE.right);
      return this.x[0] + Math.min(Math.max(share, 0), 1) * (this.x[1] - this.x[0]);
    };
    const offset = (event) => event.clientX - this.overlay.getBoundingClientRect().left;
    this.overlay.addEventListener("pointermove", (event) => {
      if (!this.x || !this.y) return;
      if (this.drag) this.drag[1] = offset(event);
      this.shared.onHover(stepAt(event));
    });
    this.overlay.addEventListener("pointerleave", () => {
      if (!this.drag) this.shared.onHover(null);
    });
    this.overlay.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.y) return;
      this.overlay.setPointerCapture(event.pointerId);
      this.drag = [offset(event), offset(event)];
      this.dragFrom = stepAt(event);
    });
    this.overlay.addEventListener("pointerup", (event) => {
      if (!this.drag) return;
      const wide = Math.abs(this.drag[1] - this.drag[0]) > 8;
      this.drag = null;
      if (wide) this.shared.onZoom([this.dragFrom, stepAt(event)].sort((a, b) => a - b));
      else this.drawOverlay();
    });
    this.overlay.addEventListener("dblclick", () => this.shared.onReset());
    this.overlay.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (event.key === "Escape") {
      this.enlarge(false);
      this.shared.onHover(null);
      this.shared.onReset();
      return;
    }
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !this.y) return;
    event.preventDefault();
    const [low, high] = this.x;
    const from = this.shared.hover ?? high;
    this.shared.onHover(Math.min(Math.max(from + (way * (high - low)) / 100, low), high));
  }
}

// A legend has one line, and a button that counts what does not fit into it. All of them together:
// measuring after a change makes the browser lay out the page again. While the pointer moves, a
// button that is there stays.
export function fitLegends(charts, { hovers = false } = {}) {
  // The button takes room itself: first without it.
  if (!hovers) for (const chart of charts) chart.legend.classList.add("fits");
  const numBelow = (chart) => (chart.lines.length > 1 ? chart.numBelow() : 0);
  const count = (chart) => chart.label(chart.below);
  for (const chart of charts) chart.below = numBelow(chart);
  const tight = charts.filter((chart) => chart.below);
  tight.forEach(count);
  const changed = tight.filter((chart) => chart.legend.classList.contains("fits"));
  for (const chart of changed) chart.legend.classList.remove("fits");
  for (const chart of changed) chart.below = numBelow(chart);
  changed.forEach(count);
}

function button(textContent, title, click) {
  return make("button", { type: "button", textContent, title, on: { click } });
}

// One row for each point of each line; a number that is not there is an empty cell.
function csvOf(lines, [low, high]) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const rows = lines.flatMap((line) =>
    line.steps.flatMap((step, i) =>
      line.x[i] < low || line.x[i] > high
        ? []
        : [[quoted(line.label), step, line.y[i] ?? "", line.low?.[i] ?? "", line.high?.[i] ?? ""].join(",")],
    ),
  );
  return ["line,step,value,least,largest", ...rows, ""].join("\n");
}

// Several series of several runs: a row for each run.
function inRows(parts) {
  const rows = new Map();
  for (const { row, span } of parts) {
    if (row === undefined) rows.set(span, span);
    else
      (rows.get(row) ?? rows.set(row, make("span", { className: "row" }, `${row} `)).get(row)).append(
        span,
        " ",
      );
  }
  return rows.values();
}

function extent(lines) {
  const firsts = lines.map((line) => line.x[0]),
    lasts = lines.map((line) => line.x.at(-1));
  const low = Math.min(...firsts),
    high = Math.max(...lasts);
  return low < high ? [low, high] : [low - 1, high + 1];
}

export function nearest(sorted, value) {
  let low = 0,
    high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

function lastKnown(values) {
  for (let i = values.length - 1; i > 0; i -= 1) if (values[i] !== null) return i;
  return 0;
}
