// A step's groups as rows, with their rollouts as cells coloured by reward; filters, orders and search results.

import { element, isField, known, oneLine, quoted, ratio, share, short, signed } from "../elements.js";
import { rove } from "../figures/roving.js";

const MOST = 300; // groups in the table at first

/** Filters `keep` rollouts. Orders sort groups `by` a number, largest first, which each cell then shows
 * (`say`): by that of one of their rollouts, or by one of their own (`ofGroup`). */
export const SHOWS = [
  { name: "truncated", label: "truncated", title: "cut off at the token limit", keep: (row) => row.truncated },
  { name: "unscored", label: "unscored", title: "without a reward because a grader failed", keep: (row) => row.reward === null },
  { name: "failed", label: "failed turns", title: "with a failed call of a tool, or a step of the environment that failed", keep: (row) => row.failed > 0 },
  {
    name: "dead", label: "no-signal groups", title: "all advantages of the group are 0: nothing to learn",
    keep: (row, group) => group.fate === "dead",
  },
  { name: "duplicates", label: "duplicates", title: "identical to another completion of the group", keep: (row) => row.duplicate !== null },
  {
    name: "clipped", label: "most clipped first", title: "share of the tokens with a nonzero advantage whose gradient is blocked",
    by: (row) => row.blocked_share, say: (row) => share(row.blocked_share),
  },
  {
    name: "ratio", label: "highest ratio first", title: "farthest from 1, above or below",
    by: (row) => row.ratio_most && Math.abs(Math.log(row.ratio_most)), say: (row) => ratio(row.ratio_most),
  },
  {
    name: "longest", label: "longest first", title: "by number of tokens",
    by: (row) => row.length, say: (row) => row.length.toLocaleString("en"),
  },
  { name: "turns", label: "most turns first", title: "by number of replies", by: (row) => row.replies || null, say: (row) => `${row.replies}` },
  { name: "best", label: "best first", title: "by mean reward", by: (row) => row.reward, ofGroup: (group) => group.reward, say: (row) => short(row.reward) },
  {
    name: "worst", label: "worst first", title: "by mean reward",
    by: (row) => (row.reward === null ? null : -row.reward), ofGroup: (group) => (group.reward === null ? null : -group.reward), say: (row) => short(row.reward),
  },
  {
    name: "gap", label: "sampler gap first", title: "largest difference of a log-prob between learner and sampler",
    by: (row) => row.gap_most && Math.abs(row.gap_most), say: (row) => signed(row.gap_most, 2),
  },
  {
    name: "kl", label: "KL first", title: "mean distance to the reference",
    by: (row) => row.kl_mean, say: (row) => short(row.kl_mean),
  },
];

/** The filters and the order that the address names, such as "truncated worst"; of several orders, the last. */
export function asked(names) {
  const found = (names ?? "").split(" ").map((name) => SHOWS.find((each) => each.name === name)).filter(Boolean);
  return { filters: found.filter(({ keep }) => keep), order: found.findLast(({ by }) => by) ?? null };
}

/** Groups with the rows that all filters and a search keep (`hits`), in order. */
export function shown(step, names, matches) {
  const { filters, order } = asked(names);
  const isAsked = (row, group) => filters.every(({ keep }) => keep(row, group)) && (matches?.has(row.row) ?? true);
  const members = Map.groupBy(step.rows, (row) => row.group);
  const found = step.groups.map((group) => {
    const rows = members.get(group.group);
    const hits = rows.filter((row) => isAsked(row, group));
    const values = order?.ofGroup ? [order.ofGroup(group)] : order ? hits.map(order.by) : [];
    return { group, rows, hits: new Set(hits.map((row) => row.row)), most: Math.max(...values.filter(known)) };
  });
  const groups = found.filter(({ hits, most }) => hits.size && (!order || Number.isFinite(most)));
  return { show: order, groups: order ? groups.sort((one, other) => other.most - one.most) : groups };
}

/** The table of groups, in a narrow form next to an open group. It is one tab stop. */
export function groupTable(step, { show, groups }, { narrow, open, go }) {
  if (!groups.length) return element("p", { class: "faint" }, "No rollout of this step matches.");
  const scale = rewardScale(step.rows);
  const line = (each) => (narrow ? narrowLine : wideLine)(each, { show, scale, open, go });
  const body = element("tbody", {}, ...groups.slice(0, MOST).map(line));
  const rest = groups.slice(MOST);
  const more = element("button", { type: "button", class: "chip" }, `${rest.length} more groups`);
  const lead = () => rove(body, "button", "tr");
  more.addEventListener("click", () => (body.append(...rest.map(line)), more.remove(), lead()));
  lead();
  const table = element("table", { class: narrow ? "groups narrow" : "groups" }, narrow ? null : heads(show), body);
  return element("div", { class: "scroll" }, table, rest.length ? more : null);
}

/** Replace the table. The focus stays at its group, or comes back to the one that was closed (`left`). */
export function refillGroups(place, children, left) {
  const isInside = place.contains(document.activeElement);
  const group = isInside ? document.activeElement.closest("tr")?.dataset.group : isField(document.activeElement) ? null : left;
  place.replaceChildren(...children);
  if (known(group)) place.querySelector(`[data-group="${CSS.escape(group)}"] .into`)?.focus();
}

function heads(show) {
  const inside = show?.by ? `rollouts by reward, with ${show.label.replace(/ first$/, "")}` : "rollouts by reward";
  const names = [["group"], ["prompt"], ["expected", "wanted"], [inside], ["mean", "number"], ["no gradient", "number"], [""]];
  return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) => element("th", { class: kind }, name))));
}

function wideLine({ group, rows, hits }, { show, scale, go }) {
  const into = () => go({ group: group.group, row: null, token: null });
  const name = element("button", { type: "button", class: "into", title: group.why, onclick: into }, `${group.group}`);
  const cells = rows.map((row) => cell(row, scale(row.reward), hits.has(row.row), show, go));
  return element(
    "tr", { class: `group ${group.fate}`, "data-group": group.group }, element("th", { scope: "row" }, name),
    element("td", { class: "prompt", title: oneLine(group.problem) }, element("div", {}, quoted(oneLine(group.prompt)))),
    element("td", { class: "mono wanted" }, quoted(oneLine(group.answer))),
    element("td", { class: "cells" }, ...cells),
    element("td", { class: "number" }, short(group.reward)),
    element("td", { class: "number" }, share(group.blocked_share)),
    element("td", { class: "note" }, group.why),
  );
}

/** Next to an open group, a group is one button, and its cells are a picture. */
function narrowLine({ group, rows, hits }, { scale, open, go }) {
  const isOpen = String(group.group) === open;
  const cells = rows.map((row) => {
    const { side, amount } = scale(row.reward);
    const made = element("span", { class: cellClasses(row, side, hits.has(row.row)) });
    made.style.setProperty("--v", amount.toFixed(3));
    return made;
  });
  const words = `group ${group.group}, mean reward ${short(group.reward)}${group.why ? `, ${group.why}` : ""}`;
  const into = element("button", {
    type: "button", class: "into", title: words, "aria-label": words, "aria-current": isOpen ? "true" : null,
    onclick: () => go({ group: group.group, row: null, token: null }),
  }, element("span", {}, `${group.group}`), element("span", { class: "cells" }, ...cells));
  return element("tr", { class: `group ${group.fate}${isOpen ? " opened" : ""}`, "data-group": group.group }, element("td", {}, into));
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
  const made = element("button", {
    type: "button", class: cellClasses(row, side, isHit), title: words, "aria-label": words, "data-row": row.row,
    onclick: () => go({ group: row.group, row: row.row, token: 0 }),
  }, text);
  made.style.setProperty("--v", amount.toFixed(3));
  return made;
}

const cellClasses = (row, side, isHit) => ["cell", side, isHit ? "" : "miss", row.truncated ? "truncated" : ""].filter(Boolean).join(" ");

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

/** The buttons that filter, and the choice of an order; they combine. Filters that would keep nothing are left out. */
export function showControls(step, names, go) {
  const { filters, order } = asked(names);
  const groups = new Map(step.groups.map((group) => [group.group, group]));
  const to = (filters, order) => go({ show: [...filters, order].filter(Boolean).map(({ name }) => name).join(" ") || null });
  const button = (filter) => {
    const count = step.rows.filter((row) => filter.keep(row, groups.get(row.group))).length;
    const isPressed = filters.includes(filter);
    if (!count && !isPressed) return null;
    const others = filters.filter((each) => each !== filter);
    return element("button", {
      type: "button", class: "chip", "data-show": filter.name, title: filter.title, "aria-pressed": String(isPressed),
      onclick: () => to(isPressed ? others : [...others, filter], order),
    }, filter.label, element("span", { class: "count" }, count.toLocaleString("en")));
  };
  const option = ({ name, label, title, by }) =>
    element("option", { value: name, title, selected: order?.name === name, disabled: !step.rows.some((row) => known(by(row))) }, label);
  const choose = (event) => to(filters, SHOWS.find(({ name }) => name === event.target.value));
  const orders = [element("option", { value: "", selected: !order }, "as sampled"), ...SHOWS.filter(({ by }) => by).map(option)];
  const chips = SHOWS.filter(({ keep }) => keep).map(button).filter(Boolean);
  return [
    chips.length ? element("span", { class: "filters", role: "group", "aria-label": "show only" }, element("span", { class: "faint" }, "only"), ...chips) : null,
    element("label", {}, element("span", { class: "faint" }, "order "), element("select", { "data-order": order?.name ?? "", onchange: choose }, ...orders)),
  ];
}
