// A step's groups as rows, with their rollouts as cells coloured by reward; filters, orders and search results.

import { element, known, oneLine, quoted, ratio, share, short, signed } from "../elements.js";

const MOST = 300; // groups in the table at first

/** Filters `keep` rollouts. Orders sort groups `by` a number, largest first, which each cell then shows (`say`). */
export const SHOWS = [
  { name: "truncated", label: "truncated", title: "cut off at the token limit", keep: (row) => row.truncated },
  { name: "unscored", label: "unscored", title: "without a reward because a grader failed", keep: (row) => row.reward === null },
  {
    name: "dead", label: "dead", title: "all advantages of the group are 0",
    keep: (row, group) => group.fate === "dead",
  },
  { name: "duplicates", label: "duplicates", title: "identical to another completion of the group", keep: (row) => row.duplicate !== null },
  {
    name: "clipped", label: "most clipped", title: "share of the tokens with a nonzero advantage whose gradient is blocked",
    by: (row) => row.blocked_share, say: (row) => share(row.blocked_share),
  },
  {
    name: "ratio", label: "highest ratio", title: "farthest from 1, above or below",
    by: (row) => row.ratio_most && Math.abs(Math.log(row.ratio_most)), say: (row) => ratio(row.ratio_most),
  },
  {
    name: "longest", label: "longest", title: "by number of tokens",
    by: (row) => row.length, say: (row) => row.length.toLocaleString("en"),
  },
  { name: "best", label: "best", title: "by reward", by: (row) => row.reward, say: (row) => short(row.reward) },
  {
    name: "worst", label: "worst", title: "by reward",
    by: (row) => (row.reward === null ? null : -row.reward), say: (row) => short(row.reward),
  },
  {
    name: "gap", label: "sampler gap", title: "largest difference of a log-prob between learner and sampler",
    by: (row) => row.gap_most && Math.abs(row.gap_most), say: (row) => signed(row.gap_most, 2),
  },
  {
    name: "kl", label: "KL", title: "mean distance to the reference",
    by: (row) => row.kl_mean, say: (row) => short(row.kl_mean),
  },
];

/** Groups with the rows that match `show` and a search (`hits`), in order. */
export function shown(step, name, matches) {
  const show = SHOWS.find((each) => each.name === name);
  const isAsked = (row, group) => (show?.keep?.(row, group) ?? true) && (matches?.has(row.row) ?? true);
  const members = Map.groupBy(step.rows, (row) => row.group);
  const found = step.groups.map((group) => {
    const rows = members.get(group.group);
    const hits = rows.filter((row) => isAsked(row, group));
    const values = show?.by ? hits.map(show.by).filter(known) : [];
    return { group, rows, hits: new Set(hits.map((row) => row.row)), most: Math.max(...values) };
  });
  const groups = found.filter(({ hits, most }) => hits.size && (!show?.by || Number.isFinite(most)));
  return { show, groups: show?.by ? groups.sort((one, other) => other.most - one.most) : groups };
}

/** The table of groups, in a narrow form next to an open group. */
export function groupTable(step, { show, groups }, { narrow, open, go }) {
  if (!groups.length) return element("p", { class: "faint" }, "No rollout of this step matches.");
  const scale = rewardScale(step.rows);
  const line = (each) => (narrow ? narrowLine : wideLine)(each, { show, scale, open, go });
  const body = element("tbody", {}, ...groups.slice(0, MOST).map(line));
  const rest = groups.slice(MOST);
  const more = element("button", { type: "button", class: "chip" }, `${rest.length} more groups`);
  more.addEventListener("click", () => (body.append(...rest.map(line)), more.remove()));
  const table = element("table", { class: narrow ? "groups narrow" : "groups" }, narrow ? null : heads(show), body);
  return element("div", { class: "scroll" }, table, rest.length ? more : null);
}

function heads(show) {
  const inside = show?.by ? `rollouts by reward, with ${show.label}` : "rollouts by reward";
  const names = [["group"], ["prompt"], ["wanted"], [inside], ["mean", "number"], ["no gradient", "number"], [""]];
  return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) => element("th", { class: kind }, name))));
}

function wideLine(each, context) {
  const { group } = each;
  const made = narrowLine(each, context);
  const prompt = element("div", {}, quoted(oneLine(group.prompt)));
  made.lastChild.before(
    element("td", { class: "prompt", title: oneLine(group.problem) }, prompt),
    element("td", { class: "mono wanted" }, quoted(oneLine(group.answer))),
  );
  made.append(
    element("td", { class: "number" }, short(group.reward)),
    element("td", { class: "number" }, share(group.blocked_share)),
    element("td", { class: "note" }, group.why),
  );
  return made;
}

function narrowLine({ group, rows, hits }, { show, scale, open, go }) {
  const into = () => go({ group: group.group, row: null, token: null });
  const name = element("button", { type: "button", class: "into", title: group.why, onclick: into }, `${group.group}`);
  const cells = rows.map((row) => cell(row, scale(row.reward), hits.has(row.row), show, go));
  const classes = `group ${group.fate}${String(group.group) === open ? " opened" : ""}`;
  const attributes = { class: classes, "data-group": group.group };
  return element("tr", attributes, element("th", { scope: "row" }, name), element("td", { class: "cells" }, ...cells));
}

function cell(row, { side, amount }, isHit, show, go) {
  const words = [
    `sibling ${row.sibling}`, `reward ${short(row.reward)}`, `${row.length} tokens`,
    row.truncated ? "truncated" : "", row.fate === "trained" ? "" : row.fate,
    row.duplicate === null ? "" : `same text as #${row.duplicate}`,
    row.blocked ? `${row.blocked} tokens without a gradient` : "",
  ].filter(Boolean).join(", ");
  const isOrdered = show?.by && known(show.by(row));
  const text = isOrdered ? show.say(row) : row.reward === null ? "?" : short(row.reward, 2);
  const classes = ["cell", side, isHit ? "" : "miss", row.truncated ? "truncated" : ""].filter(Boolean).join(" ");
  const made = element("button", {
    type: "button", class: classes, title: words, "aria-label": words, "data-row": row.row,
    onclick: () => go({ group: row.group, row: row.row, token: 0 }),
  }, text);
  made.style.setProperty("--v", amount.toFixed(3));
  return made;
}

/** Colour scale from the step's lowest reward to its highest. */
function rewardScale(rows) {
  const rewards = rows.map((row) => row.reward).filter(known);
  const low = rewards.reduce((least, each) => Math.min(least, each), Infinity);
  const high = rewards.reduce((most, each) => Math.max(most, each), -Infinity);
  return (reward) => {
    if (reward === null) return { side: "unknown", amount: 0 };
    const place = high > low ? (2 * (reward - low)) / (high - low) - 1 : 0;
    return { side: place < 0 ? "down" : "up", amount: Math.abs(place) };
  };
}

/** The buttons that filter and order. */
export function showButtons(step, current, go) {
  const groups = new Map(step.groups.map((group) => [group.group, group]));
  const button = ({ name, label, title, keep, by }) => {
    const count = step.rows.filter((row) => (by ? known(by(row)) : keep(row, groups.get(row.group)))).length;
    const isPressed = current === name;
    return element("button", {
      type: "button", class: "chip", "data-show": name, title, "aria-pressed": String(isPressed),
      disabled: !count && !isPressed, onclick: () => go({ show: isPressed ? null : name }),
    }, label, by || !count ? null : element("span", { class: "count" }, String(count)));
  };
  const words = (text) => element("span", { class: "faint" }, text);
  const [filters, orders] = [SHOWS.filter(({ keep }) => keep), SHOWS.filter(({ by }) => by)];
  return element("div", {}, words("only"), ...filters.map(button), words("first"), ...orders.map(button));
}
