// The charts of the selected runs: each panel's lines with their values, colours and positions on the axis.

import { AXES, Charts, colour, dash, duration, withUnit } from "./charts.js";
import { element, known, oneLine, quoted, short } from "./elements.js";
import { isNumber, phases, seconds } from "./following.js";
import { PANELS, everyPanel, isRun } from "./panels.js";
import { Timeline } from "./timeline/timeline.js";

const MOST = 2000; // points of a line
const COLOURS = 6;

/** A page of charts; `show` is called again whenever a run has new rows or the selection changes. */
export class ChartPage {
  constructor(main, onOpen) {
    this.figures = element("div", { class: "figures scroll" });
    this.grid = element("div", { class: "plots" });
    this.empty = element("p", { class: "faint" });
    const hint = "Click: open a step's rollouts. Drag: zoom in; Esc: zoom out. Keys: 1 to 6, x, ← → and Enter on a chart.";
    const whole = element("button", { type: "button", class: "whole", hidden: true }, "show the whole run");
    this.timeline = new Timeline();
    main.replaceChildren(this.figures, this.timeline.node, whole, this.grid, this.empty, element("p", { class: "faint hint" }, hint));
    this.charts = new Charts(this.grid, whole, onOpen);
  }

  /** `runs` have a colour each: [run, "s1"]. */
  show(tab, runs, axis) {
    const placed = runs.filter(([run]) => axis === "step" || (axis === "tokens" ? run.hasTokens : run.hasTime));
    const specs = panelsOf(tab, placed.map(([run]) => run)).flatMap((panel) => specsOf(panel, placed, axis));
    this.figures.replaceChildren(...(tab === "performance" ? phaseTable(runs) : tab === "overview" ? figureTable(runs) : []));
    this.timeline.show(tab === "performance" ? runs : []);
    this.empty.textContent = specs.length ? "" : this.reason(runs, placed, axis);
    this.charts.show(specs, axis, rangeOf(specs));
    window.proximo.charts = Object.fromEntries([...this.charts.charts].map(([id, chart]) => [id, shownBy(chart, axis)]));
  }

  reason(runs, placed, axis) {
    if (runs.some(([run]) => run.reading)) return "";
    if (!placed.length && runs.length) return `No run here has recorded ${AXES[axis].label}: choose another axis.`;
    return runs.length ? "Nothing to show yet." : "Select a run on the left.";
  }

  clear() {
    this.charts.clear();
    window.proximo.charts = {};
  }
}

/** What is on the screen, for tests and the browser's console. */
function shownBy({ spec, plot, columns }, axis) {
  const column = (place) => plot.data[place];
  const lines = spec.lines.map(({ run, label, colour: shown, low }, place) => {
    const at = columns.of[place];
    return { run, label, colour: shown, x: column(0), y: column(at), low: low && column(at + 1), high: low && column(at + 2) };
  });
  return { axis, lines, get range() { return [plot.scales.x.min, plot.scales.x.max]; }, marks: (spec.marks ?? []).map(({ x }) => x), caps: (spec.caps ?? []).map(({ y }) => y) };
}

function panelsOf(tab, runs) {
  if (tab === "all") return everyPanel(runs);
  const stages = runs.filter((run) => !isRun(run));
  return tab === "overview" && stages.length ? [...PANELS.overview, ...everyPanel(stages)] : PANELS[tab];
}

function rangeOf(specs) {
  const ends = specs.flatMap(({ lines }) => lines.flatMap(({ x }) => [x[0], x[x.length - 1]]));
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return isNumber(low) && high > low ? [low, high] : isNumber(low) ? [low - 1, high + 1] : [0, 1];
}

/** A panel as one chart, or as one per run if values are stacked. */
function specsOf(panel, runs, axis) {
  if (panel.stacked) return runs.flatMap(([run]) => stackOf(panel, run, axis, runs.length > 1));
  const found = runs.flatMap(([run, shade]) => linesOf(panel, run, runs.length > 1).map((line) => ({ run, shade, ...line, ...valuesOf(panel, line, run, axis, beginOf(run, runs)) }))).filter(({ x }) => x.length);
  if (!found.length) return [];
  const labels = [...new Set(found.map(({ label }) => label))];
  const isOne = new Set(found.map(({ run }) => run)).size === 1;
  const lines = found.map(({ run, shade, label, ...values }) => ({
    ...values, run: run.name, key: `${run.name}\n${label}`,
    label: isOne ? label : labels.length > 1 ? `${run.name} · ${label}` : run.name,
    colour: colour(isOne && labels.length > 1 ? `s${(labels.indexOf(label) % COLOURS) + 1}` : shade),
    dash: dash(isOne ? 0 : labels.indexOf(label)),
  }));
  return [{ ...panel, lines, names: !isOne, caps: capsOf(panel, runs), marks: marksOf(panel, runs, axis) }];
}

function linesOf(panel, run, isMany) {
  if (panel.when && !panel.when(run)) return [];
  const lines = panel.lines.filter((line) => (!line.when || line.when(run)) && !(line.inner && isMany));
  if (isMany || !panel.each?.when(run)) return lines;
  const names = new Set(run.trained.slice(-20).flatMap((row) => Object.keys(row).filter((key) => key.startsWith(panel.each.prefix))));
  return [...lines, ...[...names].map((name) => ({ label: name.slice(panel.each.prefix.length), of: name }))];
}

/** The first step to draw: a fork next to its parent begins where they part. */
const beginOf = (run, runs) => (run.fork && runs.some(([other]) => other.name === run.fork.run) ? run.fork.step : 0);

function valuesOf(panel, line, run, axis, begin) {
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
  const limits = [...new Set(panel.cap ? runs.map(([run]) => panel.cap(run)).filter((limit) => limit > 0) : [])];
  return limits.map((limit) => ({ y: limit, label: `at most ${limit.toLocaleString("en")}`, colour: colour("faint") }));
}

const marksOf = (panel, runs, axis) => (panel.marks ? runs.flatMap(([run]) => run.trained.filter(panel.marks).map((row) => ({ x: run.place(row.step, axis), colour: colour("bad") }))) : []);

function stackOf(panel, run, axis, isNamed) {
  const rows = thinned(run.timed, seconds);
  const names = [...new Set(rows.flatMap((row) => phases(row).map(([name]) => name)))];
  if (!rows.length || !names.length) return [];
  const below = rows.map(() => 0);
  const places = { x: rows.map((row) => run.place(row.step, axis)), steps: rows.map((row) => row.step), run: run.name, low: null, dash: [] };
  const lines = names.map((name, number) => {
    rows.forEach((row, at) => (below[at] += isNumber(row[name]) ? row[name] : 0));
    const shade = colour(`s${(number % COLOURS) + 1}`);
    return { ...places, key: name, label: name, colour: shade, filled: shade, y: [...below] };
  });
  return [{ ...panel, id: isNamed ? `${panel.id}:${run.name}` : panel.id, title: isNamed ? `${panel.title} · ${run.name}` : panel.title, lines }];
}

const lastOf = (rows, key) => rows.findLast((row) => isNumber(row[key]))?.[key];

/** A table with one line per selected run. */
function figureTable(runs) {
  const shown = runs.filter(([run]) => run.trained.length || run.evaluated.length);
  if (!shown.length) return [];
  const columns = [
    ["step", (run) => steps(run)], ["outcome", (run) => withUnit(lastOf(run.trained, "outcome"), "share")], ["held-out", heldOut],
    ["length", (run) => short(lastOf(run.trained, "length"))], ["entropy", (run) => short(lastOf(run.trained, "entropy"))],
    ["tokens", (run) => (run.hasTokens ? withUnit(run.place(Infinity, "tokens")) : "–")], ["time in steps", (run) => (run.hasTime ? duration(run.place(Infinity, "time")) : "–")],
  ];
  const cells = columns.map(([name, say]) => [name, shown.map(([run]) => say(run))]).filter(([, texts]) => texts.some((text) => text !== "–"));
  const rows = shown.map(([run, shade], place) => element("tr", {}, element("th", { scope: "row" }, dot(shade), quoted(oneLine(run.name))), ...cells.map(([, texts]) => element("td", { class: "number" }, texts[place]))));
  return [table(["run", ...cells.map(([name]) => name)], rows)];
}

const steps = (run) => [run.trained.at(-1)?.step || 0, run.about?.settings.steps].filter(known).join(" / ");

function heldOut(run) {
  const [first, last] = [run.evaluated[0], run.evaluated.at(-1)].map((row) => row?.["held_out/accuracy"]);
  if (!known(last)) return "–";
  return run.evaluated.length > 1 && known(first) ? `${withUnit(first, "share")} → ${withUnit(last, "share")}` : withUnit(last, "share");
}

/** Where the time went, over the whole run. */
function phaseTable(runs) {
  const shown = runs.filter(([run]) => run.hasTime);
  if (!shown.length) return [];
  const sums = shown.map(([run]) => {
    const sum = {};
    run.timed.forEach((row) => phases(row).forEach(([name, value]) => (sum[name] = (sum[name] ?? 0) + value)));
    return sum;
  });
  const names = [...new Set(sums.flatMap(Object.keys))];
  const rows = shown.map(([run, shade], place) => {
    const total = run.place(Infinity, "time");
    return element("tr", {}, element("th", { scope: "row" }, dot(shade), quoted(oneLine(run.name))), element("td", { class: "number" }, duration(total)),
      ...names.map((name) => element("td", { class: "number" }, known(sums[place][name]) ? `${duration(sums[place][name])} · ${withUnit(sums[place][name] / total, "share")}` : "–")));
  });
  return [table(["run", "time in steps", ...names], rows)];
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((name, place) => element("th", { class: place ? "number" : "" }, oneLine(name))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

export function dot(shade) {
  const made = element("i", { class: "dot" });
  made.style.color = `var(--${shade})`;
  return made;
}
