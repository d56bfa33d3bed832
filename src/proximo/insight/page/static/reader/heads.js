// The head of an open group: its prompt, the same problem at other steps, and the channel selection.

import { ELSEWHERE, NOWHERE, button } from "./bar.js";
import { CHANNELS, hasChannel, legend } from "./channels.js";
import { element, known, oneLine, quoted, short } from "../elements.js";
import { conversation } from "./turns.js";

const SHORT = 200; // characters of a prompt that is shown at once

/** The header of an open group: its name, its prompt, and links to the same problem at other steps. */
export function groupHead(group, summary, [before, after], go) {
  const to = (other) => go({ group: other.group.group, row: null, token: null });
  const arrow = (text, title, other) => button(text, { title, "aria-label": title, disabled: !other, onclick: () => to(other) });
  return element(
    "header", { class: "grouphead" },
    element("h2", {},
      arrow("‹", "previous group, key [", before), ` group ${group.group} `, arrow("›", "next group, key ]", after),
      button("all groups", { title: "key Esc", onclick: () => go(NOWHERE) }),
      summary?.why ? element("span", { class: "badge warn" }, summary.why) : null),
    element("details", { class: "asked", open: group.prompt.length <= SHORT },
      element("summary", {}, "prompt ", quoted(oneLine(group.problem), { class: "faint" })), ...asked(group)),
    element("div", { class: "times" }),
  );
}

/** A conversation as its messages; and as the chat template writes it. */
function asked(group) {
  const cut = group.prompt_cut ? `… ${group.prompt_cut.toLocaleString("en")} characters before this\n` : "";
  const whole = element("pre", {}, cut, quoted(group.prompt));
  if (!group.messages?.length) return [whole];
  const written = element("details", { class: "written" }, element("summary", { class: "faint" }, "as the chat template writes it"), whole);
  return [element("div", { class: "chat" }, ...conversation(group.messages)), written];
}

/** The same problem at other steps as a strip: a bar for each, as high as the mean reward of its completions. */
export function times(found, group, go) {
  const rewards = found.map(({ reward }) => reward).filter(known);
  const [low, high] = [Math.min(0, ...rewards), Math.max(...rewards, 0)];
  const bar = (each) => {
    const isHere = each.step === group.step && each.group === group.group;
    const words = `step ${each.step}: mean reward ${short(each.reward)} of ${each.rows} completions`;
    const height = known(each.reward) && high > low ? (each.reward - low) / (high - low) : 0;
    const fill = element("span", { class: known(each.reward) ? "fill" : "fill unknown" });
    fill.style.height = `${Math.max(8, 100 * height)}%`;
    return element("button", {
      type: "button", class: isHere ? "time opened" : "time", title: words, "aria-label": words, "aria-current": isHere ? "step" : null,
      "data-step": each.step, onclick: () => go({ step: each.step, ...ELSEWHERE, group: each.group }),
    }, element("span", { class: "column" }, fill), element("small", {}, String(each.step)));
  };
  const ends = [found[0], found.at(-1)].map(({ reward }) => short(reward, 2));
  const words = `this problem at ${found.length} steps, mean reward ${ends.join(" to ")}`;
  return [element("span", { class: "faint" }, words), element("div", { class: "strip", role: "group", "aria-label": words }, ...found.map(bar))];
}

/** The channels with their keys, and the legend of the selected one. */
export function channelBar(channel, step, counts, style, { go, toggleSpaces, toggleMarkdown }) {
  const one = (each, place) => {
    const isThere = hasChannel(each, step.ranges);
    return button([element("kbd", {}, String(place + 1)), each.label], {
      "data-channel": each.name, "aria-pressed": String(each === channel), disabled: !isThere,
      title: isThere ? each.title : `the step has no ${each.label}: ${each.title}`,
      onclick: () => go({ channel: each.name }),
    });
  };
  const spaces = button([element("kbd", {}, "w"), "spaces"], {
    "aria-pressed": String(Boolean(style.spaces)), title: "show spaces and special tokens", onclick: toggleSpaces,
  });
  const prose = button([element("kbd", {}, "m"), "Markdown"], {
    "aria-pressed": String(style.text === "markdown"), "data-text": "markdown", onclick: toggleMarkdown,
    title: "show texts as Markdown with formulas, instead of coloured tokens",
  });
  return [
    element("div", { class: "channels", role: "group", "aria-label": "colour by" }, ...CHANNELS.map(one), spaces, prose),
    legend(channel, step, counts),
  ];
}
