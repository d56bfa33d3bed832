// From values to the plot: columns and their styles, ranges, ticks, and marks.

import { known } from "./elements.js";
import uPlot from "./vendor/uplot.js";

const [FAINT, FAINTER, PALE] = ["5c", "2b", "70"]; // transparency, behind a colour

/** The input of uPlot: aligned columns, their styles, and which column belongs to which line: `of` are the values, `best`
 * the moving mean where there is one. */
export function columnsOf({ lines, stacked, dots }) {
  const tables = lines.map((line) => [line.x, line.y, ...(line.smooth ? [line.smooth] : []), ...(hasBand(line, dots) ? [line.low, line.high] : [])]);
  const data = tables.length === 1 || stacked ? [lines[0].x, ...tables.flatMap(([, ...rest]) => rest)] : uPlot.join(tables);
  const made = { data, series: [{}], bands: [], of: [], best: [], shows: [false] };
  lines.forEach((line) => addLine(made, line, { stacked, dots }));
  // The top of a stack is drawn first, so that those below it are drawn over it.
  if (stacked) return { ...made, data: [data[0], ...data.slice(1).reverse()], series: [{}, ...made.series.slice(1).reverse()], of: made.of.map((place) => lines.length + 1 - place) };
  return made;
}

const hasBand = (line, dots) => Boolean(line.low) && !dots;

function addLine({ series, bands, of, best, shows }, line, { stacked, dots }) {
  const { colour: stroke, dash: dashes, x, filled, isThin, isMean, isCrowded, smooth } = line;
  const isBack = smooth || isThin || dots;
  const pale = `${stroke}${isThin ? PALE : isCrowded ? FAINTER : FAINT}`;
  const paint = smooth && (isMean || isThin) ? "transparent" : isBack ? pale : stroke; // seeds are raw enough
  of.push(series.length);
  shows.push(!stacked);
  series.push({ stroke: paint, width: stacked ? 0 : isBack ? 1 : isMean ? 2.6 : 1.6, dash: isThin ? [] : dashes, fill: filled, points: { show: !stacked && !isBack && x.length < 30, size: 4.5, fill: stroke }, paths: stacked ? uPlot.paths.stepped({ align: 1 }) : undefined });
  if (smooth) {
    series.push({ stroke: isThin ? pale : stroke, width: isThin ? 1 : isMean ? 2.6 : 2, dash: isThin ? [] : dashes, points: { show: false } });
    shows.push(false);
  }
  best.push(series.length - 1);
  if (!hasBand(line, dots)) return;
  const edge = { stroke: "transparent", width: 0, points: { show: false } };
  bands.push({ series: [series.length + 1, series.length], fill: `${stroke}26` });
  series.push(edge, edge);
  shows.push(false, false);
}

/** The vertical range: from 0 if the values are near it; to 1 for shares that come near it; never empty. */
export function heights(least, most, { unit, caps, stacked, floor, isLog, dots, lines }) {
  if (!known(least)) return isLog ? [0.1, 1] : [0, 1];
  const whiskers = dots ? lines.flatMap(({ low, high }) => [...(low ?? []), ...(high ?? [])]).filter(known) : [];
  const [min, max] = [Math.min(least, ...whiskers), Math.max(most, ...whiskers)];
  if (isLog) return [min / 1.15, max * 1.15];
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
