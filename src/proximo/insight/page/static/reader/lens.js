// What-if view: the same stored step under other algorithms, and a table that compares them.

import { element, known, oneLine, share, signed } from "../elements.js";

/** Selection of the algorithm; the run's own comes first and is marked. */
export function lensChoice({ own, five, algorithms }, current, go) {
  const option = ({ name, label, title }) =>
    element("option", { value: name, selected: name === current, title }, label + (name === own ? " · this run" : ""));
  const choose = (event) => go({ as: event.target.value === own ? null : event.target.value });
  const part = (label, keep) => element("optgroup", { label }, ...algorithms.filter(keep).map(option));
  return element(
    "label", { class: "lens" }, element("span", { class: "faint" }, "as "),
    element("select", { "data-lens": current, onchange: choose },
      part("the run's own", ({ name }) => name === own),
      part("the five", ({ name }) => name !== own && five.includes(name)),
      part("other algorithms", ({ name }) => name !== own && !five.includes(name))),
  );
}

/** The next of the run's own algorithm and the five, for the key that cycles through them. */
export function nextLens({ own, five }, current) {
  const round = [...new Set([own, ...five])];
  const next = round[(round.indexOf(current) + 1) % round.length];
  return next === own ? null : next;
}

/** The algorithm's title and idea, the assumptions made, and its formula. */
export function lensWords(algorithm) {
  const notes = algorithm.notes.map((note) => element("li", {}, oneLine(note)));
  const many = notes.length === 1 ? "1 assumption" : `${notes.length} assumptions`;
  return element(
    "details", { class: "about" },
    element("summary", {}, element("strong", {}, algorithm.label), ` ${algorithm.title}. `,
      element("span", { class: "faint" }, algorithm.idea),
      notes.length ? element("span", { class: "badge warn" }, many) : null),
    notes.length ? element("ul", { class: "warn" }, ...notes) : null,
    element("pre", {}, algorithm.formula.join("\n")),
  );
}

const HEADS = [
  ["algorithm", "", ""],
  ["policy loss", "number", "policy loss of the step under this algorithm"],
  ["no gradient", "number", "share of the tokens with a nonzero advantage whose gradient is blocked"],
  ["clipped", "number", "mean share of the gradient that clipping or a soft gate takes"],
  ["flips", "number", "share of tokens that are blocked here but not under the run's own algorithm, or the reverse"],
  ["A > 0 / A < 0", "", "shares of the gradient, in percent: on tokens with positive and with negative advantage"],
  ["by length", "", "shares of the gradient, in percent: on the shortest, middle and longest third of completions"],
  ["cosine", "number", "between this gradient with respect to log-probs and the run's own"],
];

/** One row per algorithm; a click selects it. */
export function lensTable({ table }, { own, algorithms }, current, go) {
  const heads = HEADS.map(([name, kind, title]) => element("th", { class: kind, title }, name));
  const rest = algorithms.length - table.length;
  const more = () => go({ lens: "all" });
  return element(
    "div", { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...table.map((row) => line(row, own, current, go)))),
    rest > 0 ? element("button", { type: "button", class: "chip", onclick: more }, `show ${rest} more algorithms`) : null,
  );
}

function line(row, own, current, go) {
  const isOwn = row.name === own;
  const look = () => go({ as: isOwn ? null : row.name });
  const name = element("button", { type: "button", class: "into", onclick: look }, row.label);
  const head = element("th", { scope: "row" }, name, isOwn ? element("span", { class: "badge" }, "this run") : null);
  const number = (name, say, title) =>
    element("td", { class: "number", title, "data-name": name, "data-value": row[name] }, say(row[name]));
  const turned = `${row.closed} are blocked only here, ${row.opened} only under the run's own`;
  return element(
    "tr", { class: row.name === current ? "opened" : "", "data-as": row.name, title: row.notes.join("; ") }, head,
    number("policy_loss", signed), number("blocked", share), number("held_back", share),
    number("flips", isOwn ? () => "–" : share, turned),
    element("td", {}, parts([row.positive, row.negative], ["up", "down"])),
    element("td", {}, parts(row.thirds, ["third first", "third", "third last"])),
    number("cosine", (value) => (known(value) ? value.toFixed(3).replace("-", "−") : "–")),
  );
}

/** Shares of a whole as one bar with its numbers. */
function parts(shares, kinds) {
  if (!shares || !shares.every(known)) return element("span", { class: "faint" }, "–");
  const bar = shares.map((value, place) => {
    const words = value >= 0.12 ? String(Math.round(100 * value)) : "";
    const piece = element("span", { class: kinds[place], title: share(value) }, words);
    piece.style.flexGrow = value;
    return piece;
  });
  return element("span", { class: "parts" }, ...bar);
}
