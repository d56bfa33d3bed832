// From values to the plot: columns and their styles, ranges, ticks, and marks.

import { known } from "./elements.js";
import uPlot from "./vendor/uplot.js";

/** The input of uPlot: aligned columns, their styles, and which column belongs to which line. */
export function columnsOf({ lines, stacked }) {
  const tables = lines.map((line) => [line.x, line.y, ...(line.low ? [line.low, line.high] : [])]);
  const data = tables.length === 1 || stacked ? [lines[0].x, ...tables.flatMap(([, ...rest]) => rest)] : uPlot.join(tables);
  const [series, bands, of, shows] = [[{}], [], [], [false]];
  for (const { colour: stroke, dash: dashes, low, x, filled } of lines) {
    of.push(series.length);
    shows.push(!stacked);
    series.push({ stroke, width: stacked ? 0 : 1.6, dash: dashes, fill: filled, points: { show: stacked ? false : x.length < 30, size: 4.5, fill: stroke }, paths: stacked ? uPlot.paths.stepped({ align: 1 }) : undefined });
    if (!low) continue;
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    bands.push({ series: [series.length + 1, series.length], fill: `${stroke}26` });
    series.push(edge, edge);
    shows.push(false, false);
  }
  // The top of a stack is drawn first, so that those below it are drawn over it.
  if (stacked) return { data: [data[0], ...data.slice(1).reverse()], series: [series[0], ...series.slice(1).reverse()], bands, of: of.map((place) => lines.length + 1 - place), shows };
  return { data, series, bands, of, shows };
}

/** The vertical range: from 0 if the values are near it; to 1 for shares that come near it; never empty. */
export function heights(min, max, { unit, caps, stacked, floor }) {
  if (!known(min)) return [0, 1];
  const near = (caps ?? []).map((cap) => cap.y).filter((y) => y <= 3 * max);
  const [low, high] = [min, Math.max(max, ...near)];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const isFlat = high - low <= 1e-9 * size; // a constant, or its rounding
  if (unit === "share" && low >= 0 && high <= 1) {
    if (high <= 0.5) return [0, 1.12 * high || 1];
    return [low > 0.9 && !isFlat ? low - (1 - low) * 0.1 : 0, 1];
  }
  const room = isFlat ? 0.1 * size || 0.5 : 0.08 * (high - low);
  if (known(floor) && low >= floor) return [floor, high + room];
  return [stacked || (low >= 0 && low <= 0.6 * high) ? 0 : low - room, high + room];
}

/** A tick label, with enough digits to differ from its neighbours. */
export function tick(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (step >= 1e5) return `${Number((value / 1e6).toPrecision(6))}M`;
  if (step >= 1e3 || size >= 1e5) return `${Number((value / 1e3).toPrecision(6))}k`;
  if (size < 1e-3) {
    const digits = Math.max(0, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9));
    const [mantissa, power] = value.toExponential(digits).split("e-");
    return `${Number(mantissa)}e−${power}`.replace("-", "−");
  }
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  return value.toFixed(Math.min(digits, 10)).replace("-", "−");
}

/** Limits as dashed lines, and marked steps as marks on the axis. */
export function drawMarks(plot, { caps = [], marks = [] }) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  for (const { y, label, colour: stroke } of caps) {
    const height = plot.valToPos(y, "y", true);
    if (!(height >= bbox.top && height <= bbox.top + bbox.height)) continue;
    ctx.strokeStyle = ctx.fillStyle = stroke;
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, height);
    ctx.lineTo(bbox.left + bbox.width, height);
    ctx.stroke();
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.fillText(label, bbox.left + bbox.width, height + 12 * ratio);
  }
  for (const { x, colour: fill } of marks) {
    const place = plot.valToPos(x, "x", true);
    if (!(place >= bbox.left && place <= bbox.left + bbox.width)) continue;
    ctx.fillStyle = fill;
    ctx.beginPath();
    ctx.moveTo(place, bbox.top + bbox.height - 7 * ratio);
    ctx.lineTo(place - 4 * ratio, bbox.top + bbox.height);
    ctx.lineTo(place + 4 * ratio, bbox.top + bbox.height);
    ctx.fill();
  }
  ctx.restore();
}
