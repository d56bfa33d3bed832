// The channels that tokens can be coloured by: the value, its scale, and its format.

import { element, known, ratio, share, short, signed } from "../elements.js";

/** The states of a token, in words. A token's gradient passes, is blocked, or is 0. */
export const STATES = {
  open: { label: "open", title: "the full gradient passes", pushes: true },
  soft: { label: "soft", title: "a soft gate or a cap keeps a part of the gradient", pushes: true },
  high: { label: "clipped high", title: "A > 0 and the ratio is above the clip range: no gradient", blocked: true },
  low: { label: "clipped low", title: "A < 0 and the ratio is below the clip range: no gradient", blocked: true },
  dual: { label: "dual", title: "A < 0 and the ratio is above the dual clip: no gradient", blocked: true },
  dropped: { label: "dropped", title: "left out of the update by the algorithm's select", blocked: true },
  rejected: { label: "rejected", title: "left out by the correction of the sampler's mismatch", blocked: true },
  held: { label: "held", title: "held near the old policy by the algorithm's select", pushes: true },
  dead: { label: "no signal", title: "the advantage is exactly 0: no gradient" },
  idle: { label: "idle", title: "the completion is not trained on: unscored, dropped or not run" },
  outside: { label: "outside", title: "not sampled by the policy, or left out of the loss" },
};

const part = (value, whole) => (whole > 0 ? Math.min(value / whole, 1) : 0);
const diverging = (value, [, high]) => ({ side: value < 0 ? "down" : "up", amount: part(Math.abs(value), high) });
const sequential = (value, [low, high]) => ({ side: "more", amount: part(value - low, high - low) });

/** In the order of their keys, 1 to 8. `of` reads the arrays of a row; `shade` says side and strength of the colour;
 * `ends` are the words at the ends of the scale, blue or pale first. */
export const CHANNELS = [
  {
    name: "advantage", label: "advantage", title: "how much better than expected",
    of: (row) => row.advantage, say: signed, shade: diverging, ends: ["worse than expected", "better than expected"],
  },
  {
    name: "ratio", label: "ratio", title: "probability now over probability when sampled, as it is clipped",
    of: (row) => row.ratio, say: ratio, ends: ["less likely now", "likelier now"],
    shade: (value, [, high]) => diverging(Math.log(value), [0, Math.log(high)]),
  },
  {
    name: "gate", label: "gate", title: "what happens to the gradient",
    of: (row) => row.state, say: (value) => STATES[value]?.label ?? "–",
  },
  {
    name: "gradient", label: "gradient", title: "gradient of the policy loss on the log-prob: which way the token is pushed",
    of: (row) => row.gradient, say: signed, ends: ["made less likely", "made likelier"],
    shade: (value, range) => diverging(-value, range), isBackwards: true,
  },
  {
    name: "entropy", label: "entropy", title: "entropy of the policy before the update; when it sampled, if no update ran the row",
    of: (row) => row.entropy, say: short, shade: sequential, ends: ["certain", "uncertain"],
  },
  {
    name: "logprob", label: "log-prob", title: "log-prob of the token before the update",
    of: (row) => row.current, say: short, ends: ["expected", "surprising"], isBackwards: true,
    shade: (value, [low, high]) => ({ side: "more", amount: part(high - value, high - low) }),
  },
  {
    name: "gap", label: "sampler gap", title: "log-prob of the learner minus that of the sampler",
    of: (row) => row.gap, say: signed, shade: diverging, ends: ["higher in the sampler", "higher in the learner"],
  },
  {
    name: "kl", label: "KL", title: "distance to the reference (k3)",
    of: (row) => row.kl, say: short, shade: sequential, ends: ["equal to the reference", "far from it"],
  },
];

export const channelNamed = (name) =>
  CHANNELS.find((each) => each.name === name) ?? CHANNELS.find((each) => each.name === "gradient");

/** Whether the step has values for a channel. */
export const hasChannel = (channel, ranges) => channel.name === "gate" || known(ranges?.[channel.name]?.[1]);

/** The style of a token: classes, and the strength of its colour from 0 to 1. */
export function look(channel, value, state, range, through) {
  if (channel.name === "gate") return { classes: `gate ${state}`, amount: Math.min(Math.abs(1 - (through ?? 0)), 1) };
  if (!known(value) || !known(range?.[1]) || state === "outside") return { classes: "", amount: 0 };
  const { side, amount } = channel.shade(value, range);
  return { classes: amount > 0 ? side : "", amount };
}

/** The scale with its numbers, for the gate all states with their counts; and the meaning of the marks. */
export function legend(channel, { ranges, algorithm }, counts) {
  const made = channel.name === "gate" ? states(counts) : scale(channel, ranges[channel.name], algorithm.band);
  const marks = [["blocked", "no gradient"]];
  if (!algorithm.own) marks.push(["closes", "blocked only here"], ["opens", "passes only here"]);
  const shown = marks.map(([kind, words]) => element("span", { class: `token ${kind}` }, words));
  made.append(element("span", { class: "marks faint" }, ...shown));
  return made;
}

function scale(channel, range, band) {
  if (!known(range?.[1])) return element("div", { class: "legend faint" }, `the step has no ${channel.label}`);
  const isSequential = channel.shade(range[1], range).side === "more";
  const [first, last] = channel.isBackwards ? [range[1], range[0]] : range;
  const ticks = channel.name === "ratio" && band ? band.flatMap((edge) => tick(edge, range)) : [];
  return element(
    "div", { class: "legend" },
    element("span", { class: "faint" }, channel.ends[0]), element("span", {}, channel.say(first)),
    element("span", { class: `bar ${isSequential ? "more" : "both"}` }, ...ticks),
    element("span", {}, channel.say(last)), element("span", { class: "faint" }, channel.ends[1]),
  );
}

/** An edge of the clip range, if it is on the scale. */
function tick(edge, [low, high]) {
  const place = Math.log(edge / low) / Math.log(high / low);
  if (!(place >= 0 && place <= 1)) return [];
  const made = element("span", { class: "tick", title: `the clip range ends at ${ratio(edge)}` });
  made.style.left = `${100 * place}%`;
  return [made];
}

function states(counts) {
  const total = Object.values(counts).reduce((sum, each) => sum + each, 0);
  const entry = ([state, { label, title, blocked }]) => {
    const count = counts[state] ?? 0;
    const sample = element("span", { class: `token gate ${state}${blocked ? " blocked" : ""}` }, label);
    const many = element("span", { class: "faint" }, count ? `${count} · ${share(count / total)}` : "0");
    return element("span", { class: count ? "state" : "state none", title }, sample, many);
  };
  return element("div", { class: "legend" }, ...Object.entries(STATES).map(entry));
}
