// Numbers of curves: the moving mean, the mean over seeds, whether a curve is flat, and ticks of a logarithmic axis.

import { known } from "../elements.js";

const [FEW, WIDEST] = [20, 51];

/** The window of the moving mean: as chosen, or by the number of points. 1 is no smoothing, as for few points. */
export function windowOf(points, chosen) {
  if (points < FEW) return 1;
  const wide = chosen ?? Math.min(Math.max(5, Math.round(points / 15)), WIDEST);
  return wide > 1 ? wide + ((wide + 1) % 2) : 1;
}

/** The mean of the values around each place, fewer at the ends; a missing value stays missing. */
export function movingMean(values, wide) {
  const half = (wide - 1) / 2;
  const [sums, counts] = [new Float64Array(values.length + 1), new Float64Array(values.length + 1)];
  values.forEach((value, place) => {
    sums[place + 1] = sums[place] + (known(value) ? value : 0);
    counts[place + 1] = counts[place] + (known(value) ? 1 : 0);
  });
  return values.map((value, place) => {
    if (!known(value)) return value;
    const [from, to] = [Math.max(place - half, 0), Math.min(place + half + 1, values.length)];
    return (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

/** The mean over lines, at the steps that all have: its steps, places on the axis and values. */
export function meanOf(lines) {
  const others = lines.slice(1).map(({ steps, x, y }) => new Map(steps.map((step, at) => [step, [x[at], y[at]]])));
  const made = { steps: [], x: [], y: [] };
  lines[0].steps.forEach((step, at) => {
    const found = [[lines[0].x[at], lines[0].y[at]], ...others.map((other) => other.get(step))];
    if (!found.every((each) => each && known(each[1]))) return;
    made.steps.push(step);
    ["x", "y"].forEach((name, place) => made[name].push(found.reduce((sum, each) => sum + each[place], 0) / found.length));
  });
  return made;
}

/** Whether each line has the same value all along, up to rounding; a few points are not enough to tell. */
export function isFlat(lines, least = 5) {
  return lines.length > 0 && lines.every(({ y }) => {
    const values = y.filter(known);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return values.length >= least && high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  });
}

/** Ticks of a logarithmic axis: powers of ten, or 1, 2, 5 of each where there are few powers; for a narrow range, even
 * distances. */
export function logTicks(low, high) {
  const powers = Array.from({ length: Math.floor(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, place) => Math.floor(Math.log10(low)) + place);
  const within = (digits) => powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`))).filter((value) => value >= low && value <= high);
  const found = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]].map(within).find((ticks) => ticks.length >= 3) ?? even(low, high);
  return found.length > 8 ? found.filter((_, place) => place % Math.ceil(found.length / 8) === 0) : found;
}

function even(low, high) {
  const power = Math.floor(Math.log10((high - low) / 3));
  const step = [1, 2, 5, 10].map((digit) => Number(`${digit}e${power}`)).findLast((size) => (high - low) / size >= 3) ?? (high - low) / 3;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}
