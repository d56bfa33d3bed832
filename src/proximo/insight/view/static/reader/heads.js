// The top of the reader: the step's bar, an open group's header, and the channel selection.

import { CHANNELS, hasChannel, legend } from "./channels.js";
import { calm, element, oneLine, quoted, refill, short } from "../elements.js";
import { lensChoice } from "./lens.js";

const HELP = [
  ["1 … 8", "colour by advantage, ratio, gate, gradient, entropy, log-prob, sampler gap, KL"],
  ["n  p", "next and previous token whose gradient is blocked; if there is none, the one that stands out most"],
  ["← →", "previous and next token"],
  ["↑ ↓", "previous and next completion"],
  ["[  ]", "previous and next group"],
  ["<  >", "previous and next step"],
  ["a", "next algorithm: the run's own and the five"],
  ["w", "show spaces and special tokens"],
  ["/", "search"],
  ["Esc", "back to the step"],
];
const NOWHERE = { group: null, row: null, token: null };
export const ELSEWHERE = { ...NOWHERE, pass: null }; // another step may have fewer

/** The existing steps before and after one, which itself need not exist. */
export function besides(steps, step) {
  const number = Number(step);
  return [steps.findLast((each) => each < number), steps.find((each) => each > number)];
}

export function button(text, { onclick, ...attributes }) {
  return element("button", { type: "button", class: "chip", ...attributes, onclick }, ...[text].flat());
}

/** Steps, lens, pass, search and help. Its fields are kept, so that typing is not disturbed when the page changes. */
export class Bar {
  constructor(go) {
    this.go = go;
    const find = calm(250, () => this.root.isConnected && this.go({ find: this.find.value || null }));
    const words = "find in prompts and completions";
    this.find = element("input", { type: "search", placeholder: words, "aria-label": words, oninput: find });
    const jump = () => this.go({ step: this.jump.value, ...ELSEWHERE });
    this.jump = element("input", { type: "number", min: 1, class: "jump", "aria-label": "step", onchange: jump });
    this.steps = element("span", { class: "steps" });
    this.rest = element("span", { class: "rest" });
    const keys = HELP.flatMap(([names, meaning]) => [element("dt", {}, names), element("dd", {}, meaning)]);
    const help = element("details", { class: "help" }, element("summary", {}, "keys"), element("dl", {}, ...keys));
    this.root = element("div", { class: "bar" }, this.steps, this.rest, this.find, help);
  }

  /** `step` is null if it cannot be read; the links to other steps are still shown. */
  draw(about, step, state) {
    const [before, after] = besides(about.steps, state.step);
    const arrow = (text, title, number) =>
      button(text, { title, disabled: number === undefined, onclick: () => this.go({ step: number, ...ELSEWHERE }) });
    if (document.activeElement !== this.find) this.find.value = state.find ?? "";
    if (document.activeElement !== this.jump) this.jump.value = state.step;
    const last = element("span", { class: "faint" }, `of ${about.steps.at(-1) ?? "–"}`);
    const [back, on] = [arrow("‹", "previous step, key <", before), arrow("›", "next step, key >", after)];
    refill(this.steps, [back, "step ", this.jump, last, on]);
    const lens = lensChoice(about, step?.algorithm.name ?? about.own, this.go);
    refill(this.rest, step ? [lens, ...this.passes(step), updates(step)] : [lens]);
  }

  passes(step) {
    if (step.passes < 2) return [];
    const option = (number) => element("option", { value: number, selected: number === step.pass }, String(number));
    const choose = (event) => this.go({ pass: event.target.value });
    const all = Array.from({ length: step.passes }, (_, number) => option(number));
    const select = element("select", { onchange: choose }, ...all);
    return [element("label", {}, element("span", { class: "faint" }, "pass "), select)];
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

/** The header of an open group: its name, its prompt, and links to the same problem at other steps. */
export function groupHead(group, summary, [before, after], go) {
  const to = (other) => go({ group: other.group.group, row: null, token: null });
  const arrow = (text, title, other) => button(text, { title, disabled: !other, onclick: () => to(other) });
  const cut = group.prompt_cut ? `… ${group.prompt_cut.toLocaleString("en")} characters before this\n` : "";
  return element(
    "header", { class: "grouphead" },
    element("h2", {},
      arrow("‹", "previous group, key [", before), ` group ${group.group} `, arrow("›", "next group, key ]", after),
      button("all groups", { title: "key Esc", onclick: () => go(NOWHERE) }),
      summary?.why ? element("span", { class: "badge warn" }, summary.why) : null),
    element("details", { class: "asked", open: group.prompt.length <= 200 },
      element("summary", {}, "prompt ", quoted(oneLine(group.problem), { class: "faint" })),
      element("pre", {}, cut, quoted(group.prompt))),
    element("div", { class: "times" }),
  );
}

/** The same problem at other steps, with the rewards of its completions. */
export function times(found, group, go) {
  const chip = (each) =>
    button(`step ${each.step} · ${short(each.reward, 2)}`, {
      class: each.step === group.step && each.group === group.group ? "chip opened" : "chip",
      title: `${each.rows} completions, mean reward ${short(each.reward)}`,
      onclick: () => go({ step: each.step, ...ELSEWHERE, group: each.group }),
    });
  return [element("span", { class: "faint" }, "this problem at other steps"), ...found.map(chip)];
}

/** The channels with their keys, and the legend of the selected one. */
export function channelBar(channel, step, counts, isSpaced, { go, toggleSpaces }) {
  const one = (each, place) => {
    const isThere = hasChannel(each, step.ranges);
    return button([element("kbd", {}, String(place + 1)), each.label], {
      "data-channel": each.name, "aria-pressed": String(each === channel), disabled: !isThere,
      title: isThere ? each.title : `the step has no ${each.label}: ${each.title}`,
      onclick: () => go({ channel: each.name }),
    });
  };
  const spaces = button([element("kbd", {}, "w"), "spaces"], {
    "aria-pressed": String(isSpaced), title: "show spaces and special tokens", onclick: toggleSpaces,
  });
  return [
    element("div", { class: "channels", role: "group", "aria-label": "colour by" }, ...CHANNELS.map(one), spaces),
    legend(channel, step, counts),
  ];
}
