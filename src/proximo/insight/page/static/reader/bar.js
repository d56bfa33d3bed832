// The reader's one bar of controls: run, step, what-if view, pass, search, filters, order, and what can be saved.

import { calm, element, oneLine, refill, short } from "../elements.js";
import { shortNames } from "../figures/names.js";
import { showControls } from "./groups.js";
import { lensChoice } from "./lens.js";

const WIDEST = 44; // letters of a run's name in the menu
const HELP = [
  ["1 … 8", "colour by advantage, ratio, gate, gradient, entropy, log-prob, sampler gap, KL"],
  ["n  p", "next and previous token whose gradient is blocked; if there is none, the one that stands out most"],
  ["← →", "previous and next token"],
  ["↑ ↓", "previous and next completion"],
  ["Home End", "first and last token of the completion"],
  ["[  ]", "previous and next group"],
  ["<  >", "previous and next step"],
  ["a", "next algorithm: the run's own and the five"],
  ["w", "show spaces and special tokens"],
  ["m", "show texts as Markdown, with formulas"],
  ["/", "search"],
  ["?", "these keys"],
  ["Esc", "back to the step"],
];
export const NOWHERE = { group: null, row: null, token: null };
export const ELSEWHERE = { ...NOWHERE, pass: null }; // another step may have fewer

/** The existing steps before and after one, which itself need not exist. */
export function besides(steps, step) {
  const number = Number(step);
  return [steps.findLast((each) => each < number), steps.find((each) => each > number)];
}

export function button(text, { onclick, ...attributes }) {
  return element("button", { type: "button", class: "chip", ...attributes, onclick }, ...[text].flat());
}

/** Its fields are kept, so that typing is not disturbed when the page changes. `save(kind)` saves what is shown. */
export class Bar {
  constructor(go, save) {
    this.go = go;
    const find = calm(250, () => this.root.isConnected && this.go({ find: this.find.value || null }));
    const words = "find in prompts and completions";
    this.find = element("input", { type: "search", placeholder: "find", title: words, "aria-label": words, oninput: find });
    this.everywhere = button("all steps", { title: "search all steps of the run", onclick: () => this.go({ all: this.isEverywhere ? null : 1 }) });
    const jump = () => this.go({ step: this.jump.value, ...ELSEWHERE });
    this.jump = element("input", { type: "number", min: 1, class: "jump", "aria-label": "step", onchange: jump });
    const [run, steps, rest, shows] = ["which", "steps", "rest", "shows"].map((name) => element("span", { class: name }));
    Object.assign(this, { run, steps, rest, shows });
    const searching = element("span", { class: "searching" }, this.find, this.everywhere);
    const keys = HELP.flatMap(([names, meaning]) => [element("dt", {}, names), element("dd", {}, meaning)]);
    this.help = menu("help", "keys", element("dl", {}, ...keys));
    this.root = element("div", { class: "bar", role: "toolbar", "aria-label": "reader" }, run, steps, rest, searching, shows, saving(save), this.help);
  }

  /** `step` is null if it cannot be read; the links to other steps are still shown. */
  draw(about, step, state, runs) {
    const [before, after] = besides(about.steps, state.step);
    const arrow = (text, title, number) =>
      button(text, { title, "aria-label": title, disabled: number === undefined, onclick: () => this.go({ step: number, ...ELSEWHERE }) });
    if (document.activeElement !== this.find) this.find.value = state.find ?? "";
    if (document.activeElement !== this.jump) this.jump.value = state.step;
    const isPart = about.stored > about.steps.length; // a copy has some steps only
    const last = element("span", { class: "faint" }, isPart ? `${about.steps.length} of ${about.stored} in this copy` : `of ${about.steps.at(-1) ?? "–"}`);
    const [back, on] = [arrow("‹", "previous step, key <", before), arrow("›", "next step, key >", after)];
    refill(this.steps, [back, "step ", this.jump, last, on]);
    const lens = lensChoice(about, step?.algorithm.name ?? about.own, this.go);
    refill(this.rest, step ? [lens, ...this.passes(step), updates(step)] : [lens]);
    refill(this.shows, step ? showControls(step, state.show, this.go).filter(Boolean) : []);
    this.isEverywhere = Boolean(state.all);
    this.everywhere.setAttribute("aria-pressed", String(this.isEverywhere));
    this.drawRun(state, runs);
  }

  /** The run that is read, and the others to switch to: the step stays, as far as it exists there. */
  drawRun(state, runs) {
    const names = runs.some(({ name }) => name === state.run) ? runs.map(({ name }) => name) : [state.run, ...runs.map(({ name }) => name)];
    const brief = names.some((name) => name.length > WIDEST) ? shortNames(names, WIDEST) : null; // two long names would be cut alike
    const option = (name) => element("option", { value: name, title: oneLine(name), selected: name === state.run }, oneLine(brief?.get(name) ?? name));
    const choose = (event) => this.go({ run: [event.target.value, ...state.runs.filter((each) => each !== state.run && each !== event.target.value)], as: null, ...ELSEWHERE });
    const select = element("select", { title: `the run that is read: ${oneLine(state.run)}`, "aria-label": "run", "data-run": state.run, onchange: choose }, ...names.map(option));
    refill(this.run, [select]);
  }

  passes(step) {
    if (step.passes < 2) return [];
    const option = (number) => element("option", { value: number, selected: number === step.pass }, String(number));
    const choose = (event) => this.go({ pass: event.target.value });
    const all = Array.from({ length: step.passes }, (_, number) => option(number));
    const select = element("select", { onchange: choose }, ...all);
    return [element("label", {}, element("span", { class: "faint" }, "pass "), select)];
  }

  clear() {
    for (const place of [this.steps, this.rest, this.shows]) place.replaceChildren();
  }
}

function updates(step) {
  const line = (update, number) =>
    `update ${number}: policy loss ${short(update.policy_loss)}, gradient norm ${short(update.gradient_norm)}` +
    (update.skipped ? `, skipped: ${update.skipped}` : "");
  const skipped = step.updates.filter((update) => update.skipped).length;
  const many = step.updates.length === 1 ? "1 update" : `${step.updates.length} updates`;
  const words = step.value_only ? `${many} of the value model only` : many + (skipped ? `, ${skipped} skipped` : "");
  return element("span", { class: skipped ? "warn" : "faint", title: step.updates.map(line).join("\n") }, words);
}

/** A button that opens a small window below it. */
function menu(kind, label, content) {
  const made = element("details", { class: `menu ${kind}` }, element("summary", {}, label), content);
  made.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !made.open) return;
    made.open = false;
    made.firstChild.focus();
    event.stopPropagation();
  });
  document.addEventListener("click", (event) => made.contains(event.target) || (made.open = false));
  return made;
}

function saving(save) {
  const kinds = [["copy", "copy the text"], ["jsonl", "download as JSONL"], ["svg", "download as SVG"], ["png", "download as PNG"]];
  const made = menu("save", "save", element("div", { class: "choices" }, ...kinds.map(([kind, words]) =>
    button(words, { "data-save": kind, onclick: () => ((made.open = false), save(kind)) }))));
  return made;
}
