// The lines of each panel: their values, colours and places on the axis. Seeds of one arm are thin, their mean is bold.

import { colour, dash } from "../charts.js";
import { isNumber, phases, seconds } from "../following.js";
import { PANELS, everyPanel, isRun } from "../panels.js";
import { meanOf, movingMean, windowOf } from "./curves.js";
import { COLOURS } from "./names.js";
import { shadesOf } from "./phases.js";

const MOST = 2000; // points of a line
const BANDS = 2; // runs with bands; more would hide one another
const FEW = 3; // lines whose raw values are drawn clearly behind their moving means

export function panelsOf(tab, runs) {
  if (tab === "all") return everyPanel(runs);
  const stages = runs.filter((run) => !isRun(run));
  if (tab !== "overview" || !stages.length) return PANELS[tab];
  return [...PANELS.overview.map((panel) => ofSome(panel, isRun)), ...everyPanel(stages).map((panel) => ofSome(panel, (run) => !isRun(run)))];
}

/** A panel for some of the runs only: what stages and reinforcement learning call accuracy is not the same. */
const ofSome = (panel, isOne) => ({ ...panel, when: (run) => isOne(run) && (!panel.when || panel.when(run)) });

/** What is the same for all runs, or depends on which they are. */
const fixed = (value, runs) => (typeof value === "function" ? value(runs.map(({ run }) => run)) : value);

export function rangeOf(specs) {
  const ends = specs.flatMap(({ lines }) => lines.flatMap(({ x }) => [x[0], x[x.length - 1]]));
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return isNumber(low) && high > low ? [low, high] : isNumber(low) ? [low - 1, high + 1] : [0, 1];
}

/** A panel as one chart, or as one per run if values are stacked. `arms` are names by arm; `smooth` is the window of the
 * moving mean, undefined for one that suits the number of points. */
export function specsOf(panel, runs, axis, arms, smooth) {
  if (panel.stacked) return runs.flatMap((shown) => stackOf(panel, shown, axis, runs.length > 1));
  const found = runs.flatMap((shown) => linesOf(panel, shown.run, runs.length > 1).map((line) => ({ ...shown, ...line, called: shown.label, label: line.label, ...valuesOf(panel, line, shown.run, axis, beginOf(shown.run, runs)) }))).filter(({ x }) => x.length);
  if (!found.length) return [];
  const labels = [...new Set(found.map(({ label }) => label))];
  const count = new Set(found.map(({ run }) => run)).size;
  const lines = found.map((line) => styleOf(line, labels, count));
  const means = meansOf(lines, labels, arms);
  const seeds = new Set(means.flatMap(({ of }) => of));
  const [thin, others] = [lines.filter(({ key }) => seeds.has(key)), lines.filter(({ key }) => !seeds.has(key))];
  const bold = [...others, ...means].map((line) => ({ ...line, smooth: panel.dots ? null : smoothOf(line, smooth) }));
  const behind = thin.map((line) => ({ ...line, isThin: true, smooth: panel.dots ? null : smoothOf(line, smooth) }));
  return [{ ...panel, unit: fixed(panel.unit, runs), note: fixed(panel.note, runs), lines: [...behind, ...bold.map((line) => ({ ...line, isCrowded: bold.length > FEW }))], names: count > 1, caps: capsOf(panel, runs), marks: marksOf(panel, runs, axis) }];
}

/** One run with several lines has a colour for each; several runs have a colour each, and a dash for each line. */
function styleOf({ run, arm, shade, turn, label, called, x, y, steps, low, high }, labels, count) {
  const own = count === 1 && labels.length > 1 ? `s${(labels.indexOf(label) % COLOURS) + 1}` : shade;
  return {
    run: run.name, arm, key: `${run.name}\n${label}`, line: label, shade: own, colour: colour(own), x, y, steps,
    label: count === 1 ? label : labels.length > 1 ? `${called} · ${label}` : called,
    dash: dash(count === 1 ? 0 : labels.indexOf(label) + turn * labels.length), low: count > BANDS ? null : low, high,
  };
}

/** The mean of each arm with several runs; `of` are the keys of its lines. */
function meansOf(lines, labels, arms) {
  const groups = Map.groupBy(lines, ({ arm, line }) => `${arm}\n${line}`);
  return [...groups.values()].filter((group) => group.length > 1).map((group) => {
    const [{ arm, line, shade, colour: paint, dash: dashes }] = group;
    const name = `${arms.get(arm)} (${group.length} seeds)`;
    return { ...meanOf(group), run: null, arm, line, shade, colour: paint, dash: dashes, low: null, isMean: true, end: labels.length > 1 ? `${arms.get(arm)} · ${line}` : arms.get(arm), key: `mean\n${arm}\n${line}`, of: group.map(({ key }) => key), label: labels.length > 1 ? `${name} · ${line}` : name };
  }).filter(({ x }) => x.length);
}

const smoothed = new WeakMap(); // moving means by values, with their window

function smoothOf({ y }, chosen) {
  const wide = windowOf(y.length, chosen);
  if (wide <= 1) return null;
  if (smoothed.get(y)?.wide !== wide) smoothed.set(y, { wide, mean: movingMean(y, wide) });
  return smoothed.get(y).mean;
}

function linesOf(panel, run, isMany) {
  if (panel.when && !panel.when(run)) return [];
  const lines = panel.lines.filter((line) => (!line.when || line.when(run)) && !(line.inner && isMany));
  if (isMany || !panel.each?.when(run)) return lines;
  const names = new Set(run.trained.slice(-20).flatMap((row) => Object.keys(row).filter((key) => key.startsWith(panel.each.prefix))));
  return [...lines, ...[...names].map((name) => ({ label: name.slice(panel.each.prefix.length), of: name }))];
}

/** The first step to draw: a fork next to its parent begins where they part. */
const beginOf = (run, runs) => (run.fork && runs.some((other) => other.run.name === run.fork.run) ? run.fork.step : 0);

/** The values of a line, found once for as long as the run has no new rows: other runs may have. */
function valuesOf(panel, line, run, axis, begin) {
  const key = JSON.stringify([panel.id, line.label, axis, begin]);
  if (!run.drawn.has(key)) run.drawn.set(key, foundIn(panel, line, run, axis, begin));
  return run.drawn.get(key);
}

function foundIn(panel, line, run, axis, begin) {
  const value = typeof line.of === "function" ? line.of : (row) => row[line.of];
  const rows = run[line.from ?? panel.from ?? "trained"].filter((row) => row.step >= begin && isNumber(value(row)));
  const hasBand = line.low && rows.some((row) => isNumber(row[line.low]) && row[line.low] !== row[line.high]);
  const kept = thinned(rows, value);
  const column = (of) => kept.map((row) => { const found = of(row); return isNumber(found) ? found : null; });
  const places = { x: kept.map((row) => run.place(row.step, axis)), y: column(value), steps: kept.map((row) => row.step) };
  return hasBand ? { ...places, low: column((row) => row[line.low]), high: column((row) => row[line.high]) } : { ...places, low: null };
}

/** For many rows, the lowest and highest of each interval, so that no spike is lost. */
export function thinned(rows, value) {
  if (rows.length <= MOST) return rows;
  const kept = [];
  const size = (2 * rows.length) / (MOST - 2);
  for (let start = 0; start < rows.length; start += size) {
    const stretch = rows.slice(Math.floor(start), Math.floor(start + size));
    let [low, high] = [0, 0];
    stretch.forEach((row, at) => {
      if (value(row) < value(stretch[low])) low = at;
      if (value(row) > value(stretch[high])) high = at;
    });
    kept.push(...[...new Set([Math.min(low, high), Math.max(low, high)])].map((at) => stretch[at]));
  }
  if (kept[kept.length - 1] !== rows[rows.length - 1]) kept.push(rows[rows.length - 1]);
  return kept;
}

function capsOf(panel, runs) {
  const limits = [...new Set(panel.cap ? runs.map(({ run }) => panel.cap(run)).filter((limit) => limit > 0) : [])];
  return limits.map((limit) => ({ y: limit, label: `at most ${limit.toLocaleString("en")}`, colour: colour("faint") }));
}

function marksOf(panel, runs, axis) {
  const at = (run, step, shade) => ({ x: run.place(step, axis), colour: colour(shade) });
  return runs.flatMap(({ run }) => {
    const kept = panel.kept?.(run);
    return [...(panel.marks ? run.trained.filter(panel.marks) : []).map((row) => at(run, row.step, "bad")), ...(isNumber(kept) ? [at(run, kept, "good")] : [])];
  });
}

function stackOf(panel, { run, label }, axis, isNamed) {
  const rows = thinned(run.timed, seconds);
  const names = [...new Set(rows.flatMap((row) => phases(row).map(([name]) => name)))];
  if (!rows.length || !names.length) return [];
  const below = rows.map(() => 0);
  const places = { x: rows.map((row) => run.place(row.step, axis)), steps: rows.map((row) => row.step), run: run.name, low: null, dash: [] };
  const shades = shadesOf(names, COLOURS);
  const lines = names.map((name, number) => {
    rows.forEach((row, at) => (below[at] += isNumber(row[name]) ? row[name] : 0));
    const shade = shades[number];
    return { ...places, key: name, label: name, shade, colour: colour(shade), filled: colour(shade), y: [...below] };
  });
  return [{ ...panel, id: isNamed ? `${panel.id}:${run.name}` : panel.id, title: isNamed ? `${panel.title} · ${label}` : panel.title, lines }];
}
