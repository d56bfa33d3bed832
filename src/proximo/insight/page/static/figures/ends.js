// What is drawn over the lines: dots with whiskers, a shape for each colour, and names at the lines' ends.

import { known } from "../elements.js";
import { mark } from "./shapes.js";

const [APART, ROW, CHARACTER, SIZE] = [90, 12, 6.3, 11]; // pixels
const font = (size) => `${size}px system-ui, sans-serif`;
const ruler = document.createElement("canvas").getContext("2d");

/** Room for the names to the right of a chart, and the number of characters that fit in it. */
export function roomFor({ lines, stacked }, width) {
  const labelled = named(lines);
  if (stacked || labelled.length < 2 || labelled.length > 10) return { room: 18, letters: 0 }; // half of the last tick
  const most = Math.floor((0.24 * width) / CHARACTER);
  const names = fitting(labelled, most);
  const letters = Math.min(Math.max(...names.map((name) => name.length)), most);
  ruler.font = font(SIZE);
  const wide = names.map((name) => ruler.measureText(name.slice(0, letters)).width); // letters such as m and @ are
  return { room: 18 + Math.max(CHARACTER * letters, ...wide), letters };
}

/** Names of lines; without the run's, which colour and mark tell, if some would be cut. */
export function fitting(lines, letters) {
  const names = lines.map(({ label, end }) => end ?? label);
  if (names.every((name) => name.length <= letters)) return names;
  return names.map((name, place) => (name.endsWith(` · ${lines[place].line}`) ? lines[place].line : name));
}

const named = (lines) => lines.filter(({ isThin }) => !isThin);

/** Draw over the lines of a plot. */
export function drawOver(plot, spec, { of, best }, { letters, ink, shorten }) {
  if (spec.stacked) return;
  const { ctx } = plot;
  const places = spec.lines.map((_, place) => pointsOf(plot, of[place], best[place]));
  const many = named(spec.lines);
  const apart = spec.dots ? Math.min(...places.map(closest)) / devicePixelRatio : 0;
  ctx.save();
  clip(plot);
  spec.lines.forEach((line, place) => {
    const own = many.indexOf(line);
    if (spec.dots) drawDots(plot, line, places[place], aside(own, many.length, apart), many.length <= 4);
    else if (many.length > 1 && !line.isThin) drawShapes(ctx, line, places[place]);
  });
  ctx.restore();
  if (letters) drawNames(plot, many.map((line) => [line, places[spec.lines.indexOf(line)].at(-1)]).filter(([, end]) => end), { letters, ink, shorten });
}

function clip({ ctx, bbox }) {
  const room = 8 * devicePixelRatio;
  ctx.beginPath();
  ctx.rect(bbox.left - room, bbox.top - room, bbox.width + 2 * room, bbox.height + 2 * room);
  ctx.clip();
}

/** Points of a line within the plot, in pixels, with their index. */
function pointsOf(plot, column, best) {
  const [xs, ys] = [plot.data[0], plot.data[best] ?? plot.data[column]];
  const { min, max } = plot.scales.x;
  const found = [];
  xs.forEach((x, at) => known(ys[at]) && x >= min && x <= max && found.push({ at, value: x, x: plot.valToPos(x, "x", true), y: plot.valToPos(ys[at], "y", true) }));
  return found;
}

/** A shape now and then, and at the end. */
function drawShapes(ctx, { shade, colour }, points) {
  const ratio = devicePixelRatio; // asked once: thousands of points would ask the browser each
  let last = -Infinity;
  points.forEach(({ x, y }, place) => {
    if (x - last < APART * ratio && place < points.length - 1) return;
    last = x;
    mark(ctx, shade, colour, x, y, 3.6 * ratio);
  });
}

/** How far the dots of a line are moved aside, so that they do not hide one another, nor reach the next ones. */
export const aside = (own, count, apart) => Math.min(4, (0.6 * apart) / Math.max(count - 1, 1)) * (own - (count - 1) / 2);

/** The least distance between the points of a line. */
const closest = (points) => points.slice(1).reduce((least, { x }, place) => Math.min(least, x - points[place].x), Infinity);

/** Dots with their intervals; lines next to one another are moved aside a little. */
function drawDots(plot, line, points, moved, hasWhiskers) {
  const { ctx } = plot;
  const ratio = devicePixelRatio;
  const shift = line.isThin ? 0 : moved * ratio;
  ctx.strokeStyle = line.colour;
  ctx.lineWidth = 1.3 * ratio;
  const at = new Map(line.x.map((x, place) => [x, place]));
  for (const { value, x, y } of points) {
    const place = at.get(value);
    if (hasWhiskers && !line.isThin && known(line.low?.[place]) && known(line.high?.[place])) whisker(ctx, x + shift, ...[line.low[place], line.high[place]].map((end) => plot.valToPos(end, "y", true)), 3 * ratio);
    mark(ctx, line.shade, line.isThin ? `${line.colour}80` : line.colour, x + shift, y, (line.isThin ? 2.2 : 4) * ratio);
  }
}

function whisker(ctx, x, low, high, half) {
  ctx.beginPath();
  ctx.moveTo(x, low);
  ctx.lineTo(x, high);
  for (const y of [low, high]) ctx.moveTo(x - half, y), ctx.lineTo(x + half, y);
  ctx.stroke();
}

/** Heights at least this far apart, within the limits, near the wanted ones and in their order. */
export function spread(wanted, apart, low, high) {
  const order = wanted.map((y, place) => [y, place]).sort((one, other) => one[0] - other[0]);
  const made = [];
  let floor = low;
  for (const [y, place] of order) (made[place] = Math.max(y, floor)), (floor = made[place] + apart);
  let ceiling = high;
  for (const [, place] of order.toReversed()) (made[place] = Math.min(made[place], ceiling)), (ceiling = made[place] - apart);
  return made;
}

function drawNames(plot, ends, { letters, ink, shorten }) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const heights = spread(ends.map(([, { y }]) => y), ROW * ratio, bbox.top + 4 * ratio, bbox.top + bbox.height - 4 * ratio);
  ctx.save();
  ctx.font = font(SIZE * ratio);
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  const names = fitting(ends.map(([line]) => line), letters);
  ends.forEach(([{ shade, colour }], place) => {
    const x = bbox.left + bbox.width + 10 * ratio;
    mark(ctx, shade, colour, x - 3 * ratio, heights[place], 3 * ratio);
    ctx.fillStyle = ink;
    ctx.fillText(shorten(names[place], letters), x + 3 * ratio, heights[place]);
  });
  ctx.restore();
}
