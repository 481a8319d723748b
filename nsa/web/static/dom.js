// Elements from data: text always goes in as text, never as markup.

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "colour") node.style.setProperty(value.property ?? "background", value.value ?? value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const runColour = (id) => variable(`--run-${id % 6}`);

// A canvas with as many pixels as the screen has, in units of CSS pixels.
export function sharpen(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// From the lightest to the darkest of four colours; share is 0 to 1.
export function heatColour(share) {
  const stops = heatStops();
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const mix = stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (place - low)));
  return `rgb(${mix.join(",")})`;
}

let known = { theme: null, stops: null };
function heatStops() {
  const theme = document.documentElement.dataset.theme;
  if (known.theme !== theme) known = { theme, stops: [0, 1, 2, 3].map((i) => rgb(variable(`--heat-${i}`))) };
  return known.stops;
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}
