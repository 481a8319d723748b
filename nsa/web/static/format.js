// Numbers as people read them.

const DASH = "–";

export function compact(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(digits - 1).replace("e+", "e");
  if (size >= 1e6) return `${trim(value / 1e6, digits)}M`;
  if (size >= 1e4) return `${trim(value / 1e3, digits)}k`;
  return trim(value, digits);
}

function trim(value, digits) {
  const size = Math.abs(value);
  if (size < 1) return String(Number(value.toPrecision(digits)));
  const whole = Math.floor(Math.log10(size)) + 1;
  return value
    .toFixed(Math.max(0, digits - whole))
    .replace(/(\.\d*?)0+$/, "$1")
    .replace(/\.$/, "");
}

export const integer = (value) =>
  value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en-US");
export const loss = (value) => (Number.isFinite(value) ? value.toFixed(4) : DASH);
export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : DASH);
export const mib = (value) =>
  Number.isFinite(value)
    ? value >= 1024
      ? `${(value / 1024).toFixed(1)} GiB`
      : `${Math.round(value)} MiB`
    : DASH;
export const bytes = (value) =>
  value < 1048576 ? `${Math.ceil(value / 1024)} KiB` : Number.isFinite(value) ? mib(value / 1048576) : DASH;
export const fixed = (digits) => (value) => (Number.isFinite(value) ? value.toFixed(digits) : DASH);

// The forms of nsa/records/numbers.py; "fixed 3" is fixed(3).
const FORMS = { compact: (value) => compact(value), integer, percent };
export const formOf = (form) => FORMS[form] ?? fixed(Number(form.split(" ")[1]));

// The same two largest units as the terminal monitor: 7 s, 3 min 20 s, 5 h 12 min, 2 d 3 h.
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  const rest = Math.round(seconds);
  if (rest < 60) return `${rest} s`;
  if (rest < 3600) return `${Math.floor(rest / 60)} min ${rest % 60} s`;
  if (rest < 86400) return `${Math.floor(rest / 3600)} h ${Math.floor((rest % 3600) / 60)} min`;
  return `${Math.floor(rest / 86400)} d ${Math.floor((rest % 86400) / 3600)} h`;
}

// In one unit, for narrow places: 7 s, 3 min, 5 h, 2 d.
export function age(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  const [unit, size] = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ].find(([, each]) => seconds >= each) ?? ["s", 1];
  return `${Math.floor(seconds / size)} ${unit}`;
}

export function clock(unix) {
  const at = new Date(1000 * unix);
  return at.toLocaleString(undefined, {
    month: "short",
    day: "numeric",
    hour: "2-digit",
    minute: "2-digit",
    hour12: false,
  });
}
