// The time line of one step: who did what when. Lanes of the learner, the sampler, ranks and engines.

import { api } from "../asking.js";
import { colour } from "../charts.js";
import { drawn, element, oneLine, short } from "../elements.js";
import { KINDS } from "../figures/phases.js";

const [WIDTH, NAMES, ROW, BAR, TOP, RIGHT] = [1000, 84, 22, 15, 20, 74];

/** The panel of the first shown run that has a time line. */
export class Timeline {
  constructor() {
    this.node = element("section", { class: "timeline", hidden: true });
    Object.assign(this, { run: null, step: null, newest: null, of: "", asked: "", answered: "" });
  }

  /** `runs` as in a page of charts; none hides it. A chosen step stays; else the newest is shown. */
  async show(runs) {
    const run = runs[0]?.run;
    this.node.hidden ||= !run;
    if (!run) return void (this.asked = "");
    if (run.name !== this.run) Object.assign(this, { run: run.name, step: null });
    this.newest = run.timed.at(-1)?.step;
    this.of = runs.length > 1 ? ` · ${oneLine(run.name)}` : "";
    await this.ask(this.step ?? this.newest);
  }

  async ask(step) {
    const asked = `${this.run}\n${step ?? ""}\n${this.of}`;
    if (asked === this.asked) return;
    this.asked = asked;
    const found = await api("timeline", { run: this.run, step: this.step ?? undefined }).catch(() => ({ steps: [] }));
    if (asked === this.asked) this.draw(found);
  }

  go(step) {
    this.step = step;
    this.ask(step);
  }

  draw(found) {
    this.node.hidden = !found.steps.length;
    if (this.node.hidden) return;
    const [first, last] = found.steps;
    const button = (label, title, step) =>
      element("button", { type: "button", title, disabled: step < first || step > last || step === found.step, onclick: () => this.go(step === last ? null : step) }, label);
    const kinds = [...new Set(found.lanes.flatMap((lane) => lane.bars.map(([kind]) => kind)))];
    this.node.replaceChildren(
      element("h3", {}, `Time line of step ${found.step}${this.of}`, button("‹", "the step before", found.step - 1), button("›", "the next step", found.step + 1), button("newest", "the last step", last),
        element("span", { class: "faint" }, `${short(found.seconds)} s, from the end of the step before to its own end`)),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "time line" }, chart(found)), legend(kinds), ...[queueOf(found)].filter(Boolean).map((text) => element("p", { class: "faint" }, text)));
  }
}

const shade = (kind) => colour(KINDS[kind]?.[0] ?? "faint");

function chart({ lanes, seconds }) {
  const height = TOP + ROW * lanes.length + 4;
  const end = WIDTH - RIGHT;
  const place = (at) => NAMES + ((end - NAMES) * at) / (seconds || 1);
  const marks = ticks(seconds).map((at) => drawn("g", {},
    drawn("line", { x1: place(at), x2: place(at), y1: TOP - 3, y2: height, class: "grid" }),
    drawn("text", { x: place(at), y: TOP - 8, "text-anchor": "middle" }, `${short(at)} s`)));
  const rows = lanes.map((lane, row) => {
    const y = TOP + ROW * row + 4;
    return drawn("g", {},
      drawn("text", { x: NAMES - 8, y: y + 12, "text-anchor": "end" }, oneLine(lane.name).slice(0, 14)),
      drawn("rect", { x: NAMES, y, width: end - NAMES, height: BAR, class: "lane" }),
      ...lane.bars.map(([kind, from, to, numbers]) =>
        drawn("rect", { x: place(from), y, width: Math.max(place(to) - place(from), 0.6), height: BAR, fill: shade(kind) }, drawn("title", {}, words(lane.name, kind, from, to, numbers)))),
      drawn("text", { x: WIDTH, y: y + 12, "text-anchor": "end", class: "idle" }, `idle ${short(lane.idle, 2)} s`));
  });
  return drawn("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `what ${lanes.length} lanes did in ${short(seconds)} s` }, ...marks, ...rows);
}

/** Round positions, five to ten of them. */
function ticks(seconds) {
  const rough = 10 ** Math.floor(Math.log10(seconds || 1));
  const step = [0.1, 0.2, 0.5, 1].map((size) => size * rough).find((size) => seconds / size <= 10) ?? rough;
  return Array.from({ length: Math.floor(seconds / step + 1e-9) + 1 }, (_, number) => number * step);
}

function words(lane, kind, from, to, numbers) {
  const more = Object.entries(numbers).map(([name, value]) => `${oneLine(name)} ${short(value, 6)}`);
  return [`${oneLine(lane)}: ${oneLine(kind)}, ${short(to - from)} s from ${short(from)} s on`, KINDS[kind]?.[1], ...more].filter(Boolean).join("\n");
}

function legend(kinds) {
  const entry = (kind) => {
    const square = drawn("svg", { viewBox: "0 0 10 10", width: 10, height: 10 }, drawn("rect", { width: 10, height: 10, fill: shade(kind) }));
    return element("span", { title: KINDS[kind]?.[1] ?? "" }, square, oneLine(kind));
  };
  return element("p", { class: "legend" }, ...kinds.map(entry));
}

function queueOf({ queue, versions, staleness }) {
  const listed = (counts, say) => Object.entries(counts).sort(([one], [other]) => one - other).map(say).join(", ");
  const active = Object.entries(queue).map(([name, count]) => `${count} ${name.replace("_", " ")}`).join(", ");
  const ages = listed(staleness, ([age, count]) => `${age} (${count})`);
  return [
    active && `At the end of the step: ${active}.`, Object.keys(versions).length ? `Versions in flight: ${listed(versions, ([version, count]) => `${version} (${count})`)}.` : "",
    Object.keys(staleness).some((age) => age !== "0") ? `Age of the trained groups' weights in updates: ${ages}.` : "",
  ].filter(Boolean).join(" ");
}
