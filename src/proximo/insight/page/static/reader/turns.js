// Episodes as conversations: each turn is a block, with what it earned and what failed in it.

import { element, known, oneLine, quoted, signed } from "../elements.js";

const NAMES = { assistant: "reply", user: "environment", tool: "tool", system: "system" };

/** Turns by their tokens: results of several calls are written at once and share theirs. */
export function segments(turns) {
  const found = [];
  for (const turn of turns) {
    const last = found.at(-1);
    if (last?.start === turn.start && last.end === turn.end && last.role === turn.role) last.turns.push(turn);
    else found.push({ start: turn.start, end: turn.end, role: turn.role, turns: [turn] });
  }
  const replies = found.filter(({ role }) => role === "assistant").length;
  let number = 0;
  return found.map((each, place) => {
    if (each.role === "assistant") number += 1;
    const calls = found[place + 1]?.role === "tool" ? found[place + 1].turns.length : 0;
    return { ...each, number, replies, calls: each.role === "assistant" ? calls : 0 };
  });
}

/** The block of a turn: its head, and the place for its tokens. */
export function turnBlock(segment) {
  const text = element("div", { class: "said" });
  const root = element("section", { class: `turn ${kind(segment.role)}`, "data-role": segment.role, "aria-label": label(segment) }, head(segment), text);
  return { root, text };
}

/** Styles exist for these roles only; a role may be any text. */
const kind = (role) => (role === "assistant" ? "reply" : role === "tool" ? "tool" : "answer");

function label({ role, number, replies, turns }) {
  if (role === "assistant") return `reply ${number} of ${replies}`;
  if (role === "tool" && turns.length > 1) return `${turns.length} results of tools`;
  return role === "tool" ? "result of a tool" : oneLine(NAMES[role] ?? role);
}

function head(segment) {
  const { role, calls, turns } = segment;
  const earned = turns.map(({ reward }) => reward).filter(known);
  const total = earned.reduce((sum, each) => sum + each, 0);
  const failed = turns.filter((turn) => turn.failed);
  return element(
    "header", {},
    element("strong", {}, label(segment)),
    role === "assistant" ? null : element("span", { class: "faint" }, "not sampled"),
    calls ? element("span", { class: "faint" }, calls === 1 ? "calls a tool" : `makes ${calls} calls`) : null,
    earned.length ? element("span", { class: `earned${total ? "" : " faint"}` }, `earned ${signed(total)}`) : null,
    ...failed.map((turn) => element("span", { class: "badge bad", title: oneLine(turn.failed) }, "failed: ", quoted(oneLine(turn.failed).slice(0, 60)))),
  );
}

/** A prompt as a conversation. */
export function conversation(messages) {
  return messages.map(({ role, text }) =>
    element("section", { class: "turn answer", "data-role": role },
      element("header", {}, element("strong", {}, oneLine(NAMES[role] && role !== "user" ? NAMES[role] : role))),
      element("div", { class: "said" }, quoted(text))));
}
