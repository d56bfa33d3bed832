// The page of charts: the verdict, a table, the charts of the selected runs, and what stays the same in one line.

import { AXES, Charts, withUnit } from "./charts.js";
import { element, known, oneLine } from "./elements.js";
import { isFlat } from "./figures/curves.js";
import { panelsOf, rangeOf, specsOf } from "./figures/lines.js";
import { armNames } from "./figures/names.js";
import { partings } from "./figures/parting.js";
import { rove } from "./figures/roving.js";
import { figureTable, leadOf, phaseTable, profilesOf } from "./figures/tables.js";
import { Timeline } from "./timeline/timeline.js";

/** A page of charts; `show` is called again whenever a run has new rows or the selection changes. */
export class ChartPage {
  constructor(main, onOpen) {
    this.lead = element("div", { class: "verdicts" });
    this.figures = element("div", { class: "figures scroll", tabindex: "0", role: "region", "aria-label": "last values" });
    this.grid = element("div", { class: "plots" });
    this.flat = element("p", { class: "flat", hidden: true });
    this.empty = element("p", { class: "faint" });
    this.said = element("p", { class: "unseen", "aria-live": "polite" });
    this.unfolded = new Set();
    this.hint = element("p", { class: "faint hint" });
    const whole = element("button", { type: "button", class: "whole", hidden: true }, "show the whole run");
    this.timeline = new Timeline();
    main.replaceChildren(this.lead, this.figures, this.timeline.node, whole, this.grid, this.flat, this.empty, this.hint, this.said);
    this.charts = new Charts(this.grid, whole, onOpen);
    this.charts.onSaid = (text) => (this.said.textContent = text);
  }

  /** `runs` have a colour, a short name and an arm each; `smooth` is the window of the moving mean. */
  show(tab, runs, { axis, smooth, isLog }) {
    this.shown = [tab, runs, { axis, smooth, isLog }];
    const placed = runs.filter(({ run }) => axis === "step" || (axis === "tokens" ? run.hasTokens : run.hasTime));
    const arms = armNames(runs);
    const specs = panelsOf(tab, placed.map(({ run }) => run)).flatMap((panel) => specsOf(panel, placed, axis, arms, smooth)).map((spec) => ({ ...spec, isLog: isLog && isAboveZero(spec) }));
    const flat = specs.filter((spec) => !spec.stacked && isFlat(spec.lines));
    const drawn = specs.filter((spec) => !flat.includes(spec) || this.unfolded.has(spec.id));
    this.lead.replaceChildren(...(tab === "overview" ? [...leadOf(runs), ...partings(runs)] : []));
    this.figures.replaceChildren(...(tab === "performance" ? [...phaseTable(runs), ...profilesOf(runs)] : tab === "overview" ? figureTable(runs) : []));
    this.figures.hidden = !this.figures.childElementCount;
    this.showFlat(flat);
    this.timeline.show(tab === "performance" ? runs : []);
    this.hint.textContent = `${runs.length && runs.every(({ run }) => run.about?.stage) ? "" : "Click: open a step's rollouts. "}Drag: zoom in; Esc: zoom out. All keys: ?`;
    this.empty.textContent = specs.length ? "" : this.reason(runs, placed, axis);
    this.charts.show(drawn, axis, rangeOf(specs));
    rove(this.grid, ".plot");
    window.proximo.charts = Object.fromEntries([...this.charts.charts].map(([id, chart]) => [id, shownBy(chart, axis)]));
  }

  /** Panels whose values stay the same, as buttons that draw them. */
  showFlat(specs) {
    this.flat.hidden = !specs.length;
    const key = JSON.stringify(specs.map((spec) => [spec.id, this.unfolded.has(spec.id), valuesOf(spec)]));
    if (this.flat.dataset.key === key) return;
    this.flat.dataset.key = key;
    const button = (spec) => element("button", { type: "button", "data-flat": spec.id, title: spec.note, "aria-expanded": String(this.unfolded.has(spec.id)), onclick: () => this.toggle(spec.id) }, oneLine(spec.title), element("b", {}, valuesOf(spec)));
    this.flat.replaceChildren("The same at every step: ", ...specs.map(button));
    rove(this.flat, "button");
  }

  toggle(id) {
    if (!this.unfolded.delete(id)) this.unfolded.add(id);
    this.show(...this.shown);
    this.flat.querySelector(`[data-flat="${CSS.escape(id)}"]`)?.focus();
  }

  reason(runs, placed, axis) {
    if (runs.some(({ run }) => run.reading)) return "";
    if (!placed.length && runs.length) return `No run here has recorded ${AXES[axis].label}: choose another axis.`;
    return runs.length ? "Nothing to show yet." : "Select a run on the left.";
  }

  clear() {
    this.charts.clear();
    window.proximo.charts = {};
  }
}

const isAboveZero = ({ lines, stacked }) => !stacked && lines.every(({ y, low }) => [y, low ?? []].every((values) => values.every((value) => !known(value) || value > 0)));

/** The constant values of a panel, each once. */
const valuesOf = ({ lines, unit }) => [...new Set(lines.map(({ y }) => withUnit(y.find(known), unit)))].join(", ");

/** What is on the screen, for tests and the browser's console. */
function shownBy({ spec, plot, columns }, axis) {
  const column = (place) => plot.data[place];
  const lines = spec.lines.map(({ run, label, colour: shown, shade, isThin, isMean, smooth, low, high }, place) => {
    const at = columns.of[place];
    return { run, label, colour: shown, shade, isThin: Boolean(isThin), isMean: Boolean(isMean), x: column(0), y: column(at), smooth: smooth ? column(columns.best[place]) : null, low, high };
  });
  return { axis, lines, isLog: Boolean(spec.isLog), get range() { return [plot.scales.x.min, plot.scales.x.max]; }, marks: (spec.marks ?? []).map(({ x }) => x), caps: (spec.caps ?? []).map(({ y }) => y) };
}
