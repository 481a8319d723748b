// Ranges and ticks of an axis.

export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.75);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const m of [1, 2, 5])
      if (m * 10 ** power >= low * 0.999 && m * 10 ** power <= high * 1.001) found.push(m * 10 ** power);
  return found.length > 7
    ? found.filter((_, i) => i % Math.ceil(found.length / 7) === 0)
    : found.length > 1
      ? found
      : ticks(low, high, 4);
}

// The range of an axis: the bulk of the values, and the extremes where they do not squash it.
export function range(lines, { zero = false, top = null, log = false } = {}) {
  const values = [];
  let least = Infinity,
    most = -Infinity;
  for (const line of lines) {
    for (let i = 0; i < line.y.length; i += 1) {
      const value = line.y[i];
      if (value === null || (log && value <= 0)) continue;
      values.push(value);
      const low = line.low?.[i] ?? value,
        high = line.high?.[i] ?? value;
      if (!log || low > 0) least = Math.min(least, low);
      most = Math.max(most, high, value);
    }
  }
  if (!values.length) return null;
  values.sort((a, b) => a - b);
  least = Math.min(least, values[0]);
  let low = values[Math.floor(0.005 * (values.length - 1))],
    high = values[Math.ceil(0.985 * (values.length - 1))];
  const span = high - low;
  if (log) {
    low = least;
    high = most;
  } else {
    if (least >= low - 1.5 * span) low = least;
    if (most <= high + 1.5 * span) high = most;
    if (zero) low = Math.min(0, low);
    if (top !== null) high = Math.max(top, high);
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.05 || 0.5;
    high += margin;
    if (!(zero && low === 0)) low = low >= 0 && low - margin < 0 ? 0 : low - margin;
  }
  if (log && low === high) {
    low /= 1.2;
    high *= 1.2;
  }
  return [low, high];
}
