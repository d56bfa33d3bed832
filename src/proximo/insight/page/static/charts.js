// Charts on one horizontal axis: they share cursor and zoom, show the values under the cursor, and open a step.

import { element, known, oneLine, share, short } from "./elements.js";
import { logTicks } from "./figures/curves.js";
import { drawOver, roomFor } from "./figures/ends.js";
import { middle } from "./figures/names.js";
import { fillReadout } from "./figures/readout.js";
import { dot } from "./figures/shapes.js";
import { columnsOf, drawMarks, heights, tick } from "./plotting.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 184;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2], [10, 4]];
const ROUND = Array.from({ length: 390 }, (_, place) => Number(`${[1, 2, 5][place % 3]}e${Math.floor(place / 3) - 30}`)); // from tick to tick
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, ...[1, 2, 3, 6, 12, 24, 48, 96, 240, 480, 960].map((hours) => 3600 * hours)];
const STEPS = { step: ROUND.filter((step) => step >= 1), tokens: ROUND, time: CLOCK };
const MOVES = new Set(["mousemove", "mouseleave"]);

export const dash = (number) => DASHES[number % DASHES.length];

/** The page's colours as they are now, light or dark. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A value formatted with its unit. */
export function withUnit(value, unit) {
  if (!known(value)) return "–";
  if (unit === "share") return value > 0.99 && value < 1 ? `${short(100 * value, 4)} %` : share(value);
  if (unit === "s") return `${short(value, 2)} s`;
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : short(value);
}

const pair = (large, small, letters) => `${large}${letters[0]}${small ? ` ${small}${letters[1]}` : ""}`;

/** A duration in seconds, formatted with hours, minutes and seconds. */
export function duration(value) {
  const whole = Math.round(value);
  if (value < 10) return `${short(value, 2)} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(Math.floor(whole / 60), whole % 60, ["m", "s"]);
  return pair(Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), ["h", "m"]);
}

export const AXES = {
  step: { label: "step", title: "steps done", say: (value) => `step ${Math.round(value).toLocaleString("en")}` },
  tokens: { label: "tokens", title: "tokens generated so far", say: (value) => `${Math.round(value).toLocaleString("en")} tokens` },
  time: { label: "time", title: "time spent in steps so far, without evaluations and interruptions", say: duration },
};

/** All charts of a page. The button `whole` resets the zoom; a click calls `onOpen(run, step)`. */
export class Charts {
  constructor(grid, whole, onOpen) {
    Object.assign(this, { grid, whole, onOpen, charts: new Map(), axis: "step", range: [0, 1], zoom: null });
    whole.addEventListener("click", () => this.zoomTo(null));
    this.sizes = new ResizeObserver(() => this.charts.forEach((chart) => chart.fit()));
    this.sizes.observe(grid);
    this.views = new IntersectionObserver((seen) => seen.forEach(({ target, isIntersecting }) => this.charts.get(target.dataset.chart)?.see(isIntersecting)), { rootMargin: "300px" });
  }

  /** Draw these charts in this order; an existing chart only gets its new values. */
  show(specs, axis, range) {
    if (axis !== this.axis) (this.zoom = null), (this.whole.hidden = true);
    Object.assign(this, { axis, range });
    const wanted = new Set(specs.map((spec) => spec.id));
    for (const [id, chart] of this.charts) {
      if (!wanted.has(id)) chart.remove(), this.charts.delete(id);
    }
    specs.forEach((spec, place) => {
      if (!this.charts.has(spec.id)) this.charts.set(spec.id, new Chart(this, spec.id)), this.views.observe(this.charts.get(spec.id).card);
      const chart = this.charts.get(spec.id);
      if (this.grid.children[place] !== chart.card) this.grid.insertBefore(chart.card, this.grid.children[place] ?? null);
      chart.show(spec);
    });
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    const [min, max] = zoom ?? this.range;
    this.charts.forEach((chart) => chart.plot.setScale("x", { min, max }));
    this.whole.hidden = zoom === null;
  }

  /** Zoom in around the cursor, or out to the whole; `by` is the factor of the width. */
  zoomBy(by) {
    const [first] = this.charts.values();
    if (!first) return;
    const { min, max } = first.plot.scales.x;
    const { idx, left } = first.plot.cursor;
    const middleOf = known(idx) && left >= 0 ? first.plot.data[0][idx] : (min + max) / 2;
    const zoom = [Math.max(middleOf - by * (middleOf - min), this.range[0]), Math.min(middleOf + by * (max - middleOf), this.range[1])];
    this.zoomTo(zoom[0] <= this.range[0] && zoom[1] >= this.range[1] ? null : zoom);
  }

  clear() {
    this.sizes.disconnect();
    this.views.disconnect();
    this.charts.forEach((chart) => chart.remove());
    this.charts.clear();
  }
}

class Chart {
  constructor(page, id) {
    Object.assign(this, { page, id, plot: null, made: null, focused: null, isSeen: true, waiting: null });
    this.title = element("h3");
    this.legend = element("div", { class: "legend" });
    this.canvas = element("div", { class: "canvas" });
    this.card = element("figure", { class: "plot", tabindex: "0", role: "group", "data-chart": id, onkeydown: (event) => this.onKey(event) }, element("figcaption", {}, this.title, this.legend), this.canvas);
  }

  /** A chart that is far from the screen gets new values when it comes near: a page may have sixty of them. */
  see(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && this.waiting) this.show(this.waiting);
  }

  show(spec) {
    if ((this.waiting = this.plot && !this.isSeen ? spec : null)) return;
    this.spec = spec;
    this.columns = columnsOf(spec);
    const made = JSON.stringify([spec.title, spec.note, spec.unit, this.page.axis, spec.isLog, spec.lines.map((line) => [line.key, line.label, line.colour, line.dash, line.isThin, Boolean(line.low), Boolean(line.smooth)])]);
    if (made !== this.made) {
      this.made = made;
      this.build();
    } else {
      const { min, max } = this.plot.scales.x;
      this.plot.batch(() => {
        this.plot.setData(this.columns.data, false);
        this.plot.setScale("x", this.page.zoom ? { min, max } : { min: this.page.range[0], max: this.page.range[1] });
      });
      this.tell();
    }
    this.card.dataset.points = String(this.columns.data[0].length);
  }

  build() {
    const { spec } = this;
    this.plot?.destroy();
    this.title.replaceChildren(oneLine(spec.title), spec.note ? element("span", { class: "note", title: spec.note }, spec.note) : "");
    const isAlone = spec.lines.length === 1 && !spec.names;
    this.values = spec.lines.map(() => element("b"));
    this.card.classList.toggle("alone", isAlone);
    this.card.dataset.scale = spec.isLog ? "log" : "linear";
    const entries = spec.lines.map((line, place) => (line.isThin ? null : entry(line, this.values[place], isAlone)));
    this.legend.replaceChildren(...entries.filter(Boolean));
    [this.at, this.readout] = [element("span", { class: "at" }), element("div", { class: "readout", hidden: true })];
    this.ends = roomFor(spec, this.width);
    this.plot = new uPlot(this.options(), this.columns.data, this.canvas);
    this.plot.over.append(this.at, this.readout);
    this.plot.over.addEventListener("mousedown", (event) => (this.pressed = event.clientX));
    this.plot.over.addEventListener("click", (event) => Math.abs(event.clientX - this.pressed) < 4 && this.open());
    this.tell();
  }

  options() {
    const [ink, rule] = [colour("faint"), colour("line")];
    const font = "11px system-ui, sans-serif";
    const common = { stroke: ink, font, ticks: { show: false }, grid: { stroke: rule, width: 1 } };
    return {
      width: this.width, height: HEIGHT, padding: [8, this.ends.room, 0, 0], legend: { show: false }, focus: { alpha: 0.3 },
      series: this.columns.series,
      bands: this.columns.bands,
      scales: { x: { time: false, range: (_, min, max) => [min, max], min: this.start[0], max: this.start[1] }, y: { distr: this.spec.isLog ? 3 : 1, range: (_, min, max) => heights(min, max, this.spec) } },
      axes: [
        { ...common, size: 24, gap: 4, grid: { show: false }, space: 64, values: (_, splits, __, ___, step) => splits.map((value) => (this.page.axis === "time" ? duration(value) : tick(value, step))), incrs: STEPS[this.page.axis] },
        { ...common, size: (_, values) => 12 + 6.2 * Math.max(5, ...(values ?? []).map((text) => text.length)), gap: 5, space: 30, incrs: ROUND, ...(this.spec.isLog ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits } : {}), values: (_, splits, __, ___, step) => splits.map((value) => this.tickOf(value, this.spec.isLog ? value / 10 : step)) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false }, focus: { prox: this.spec.lines.length > 1 ? 14 : -1 },
        points: { size: 6, show: (plot, number) => (this.columns.shows[number] ? pointed(plot, number, this.columns.series) : null) },
        dataIdx: (plot, number, index) => latest(plot.data[number], index),
        bind: { dblclick: () => () => null },
        sync: { key: "proximo", scales: ["x", null], filters: { pub: (type) => MOVES.has(type), sub: (type) => MOVES.has(type) } },
      },
      hooks: {
        setCursor: [() => this.tell()],
        setSeries: [(_, number) => (this.focused = number)],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => (drawMarks(plot, this.spec), drawOver(plot, this.spec, this.columns, { ...this.ends, ink: colour("ink"), shorten: (text, most) => middle(oneLine(text), most) }))],
      },
    };
  }

  tickOf(value, step) {
    return this.spec.unit === "share" ? `${tick(100 * value, 100 * step)}%` : tick(value, step);
  }

  get start() {
    return this.page.zoom ?? this.page.range;
  }

  get width() {
    return Math.max(this.card.clientWidth, 200);
  }

  fit() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({ width: this.width, height: HEIGHT });
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.page.zoomTo(zoom);
  }

  /** The values under the cursor, or the last ones. */
  tell() {
    if (!this.plot || !this.values) return;
    const { idx, idxs, left } = this.plot.cursor;
    const isAt = known(idx) && left >= 0;
    const entries = this.spec.lines.map((line, place) => {
      const column = this.columns.of[place];
      const values = this.plot.data[column];
      const index = isAt ? idxs?.[column] : last(values);
      const below = this.spec.stacked && place > 0 && known(index) ? this.plot.data[this.columns.of[place - 1]][index] : 0;
      const value = known(index) && known(values[index]) ? values[index] - below : null;
      this.values[place].textContent = withUnit(value, this.spec.unit);
      return [line, this.values[place].textContent, value];
    });
    this.legend.classList.toggle("now", isAt);
    const x = isAt ? this.plot.data[0][idx] : null;
    const place = isAt ? AXES[this.page.axis].say(x) : "last values";
    this.said = `${oneLine(this.spec.title)}, ${place}: ${entries.map(([line, text]) => (this.spec.names || entries.length > 1 ? `${oneLine(line.label)} ${text}` : `${oneLine(line.run ?? "")} ${text}`)).join(", ")}`;
    this.card.setAttribute("aria-label", this.said);
    if (isAt) this.tag(x, left);
    this.at.hidden = !isAt;
    this.readout.hidden = !isAt || entries.length < 2;
    if (!this.readout.hidden) fillReadout(this.readout, entries, place, left, this.plot.over.clientWidth);
  }

  /** Label of the cursor's position. */
  tag(x, left) {
    const { step } = this.stepAt(x);
    const place = AXES[this.page.axis].say(x);
    this.at.textContent = this.page.axis === "step" || step === null ? place : `${place} · step ${step}`;
    this.at.style.left = `${Math.min(Math.max(left, 34), Math.max(this.plot.over.clientWidth - 34, 34))}px`;
  }

  /** Run and step under the cursor: of the line in focus, or of the first. */
  stepAt(x) {
    const own = this.spec.lines.filter(({ run }) => run !== null);
    const focused = this.spec.lines[this.columns.of.indexOf(this.focused)];
    const line = focused && focused.run !== null ? focused : own[0];
    if (!line || !line.x.length) return { run: null, step: null };
    const index = line.x.reduce((best, value, at) => (Math.abs(value - x) < Math.abs(line.x[best] - x) ? at : best), 0);
    return { run: line.run, step: line.steps[index] };
  }

  open() {
    const { idx } = this.plot.cursor;
    if (!known(idx)) return;
    const { run, step } = this.stepAt(this.plot.data[0][idx]);
    if (run !== null && step !== null) this.page.onOpen(run, step);
  }

  /** Arrows move the cursor of all charts, Enter opens the step. */
  onKey(event) {
    const [xs, { idx }] = [this.plot.data[0], this.plot.cursor];
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const index = Math.min(Math.max((idx ?? (move > 0 ? -1 : xs.length)) + move, 0), xs.length - 1);
      this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: 8 }, true, true);
      this.page.onSaid?.(this.said);
      event.preventDefault();
    } else if (event.key === "Enter") this.open();
  }

  remove() {
    this.page.views.unobserve(this.card);
    this.plot?.destroy();
    this.card.remove();
  }
}

function entry(line, value, isAlone) {
  const swatch = element("i", { class: line.dash.length ? "swatch dashed" : "swatch" });
  swatch.style.color = line.colour;
  return element("span", { class: "entry", title: oneLine(line.label) }, ...(isAlone ? [] : [dot(line.shade), line.dash.length ? swatch : null, element("bdi", {}, middle(oneLine(line.label), 28))]), value);
}

function pointed(plot, number, series) {
  const made = element("div", { class: "u-cursor-pt" });
  made.style.background = series[number].stroke;
  made.style.width = made.style.height = "6px";
  made.style.marginLeft = made.style.marginTop = "-3px";
  return made;
}

/** The last known value at or before an index; the first one if there is none. */
function latest(values, index) {
  for (let at = index; at >= 0; at--) if (known(values[at])) return at;
  return Math.max(values.findIndex(known), 0);
}

function last(values) {
  let index = values.length - 1;
  while (index >= 0 && !known(values[index])) index--;
  return index < 0 ? null : index;
}
