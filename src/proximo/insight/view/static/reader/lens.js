// The algorithm lens: the same stored step as other algorithms see it, and all of them beside each other.

import { element, known, oneLine, share, signed } from "../elements.js";

/** Which algorithm to look through; the run's own first and marked. */
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
      part("neighbours", ({ name }) => name !== own && !five.includes(name))),
  );
}

/** The next of the own algorithm and the five, for the key that goes through them. */
export function nextLens({ own, five }, current) {
  const round = [...new Set([own, ...five])];
  const next = round[(round.indexOf(current) + 1) % round.length];
  return next === own ? null : next;
}

/** What the algorithm is, where its view had to assume something, and by which formula it sees. */
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
  ["policy loss", "number", "of the step, as its metrics would have it"],
  ["no gradient", "number", "of the tokens that would push, the share that a clip or another rule stops"],
  ["held back", "number", "what the gate takes away on average, clips and soft gates on one axis"],
  ["flips", "number", "share of tokens that are stopped here and not under the run's own algorithm, or the other way"],
  ["A > 0 / A < 0", "", "where the gradient lies, in percent: on tokens with positive and with negative advantage"],
  ["by length", "", "where the gradient lies, in percent: on the shortest, middle and longest third of completions"],
  ["cosine", "number", "between this gradient with respect to log-probs and the run's own"],
];

/** One row to an algorithm; a click looks through it. */
export function lensTable({ table }, { own, algorithms }, current, go) {
  const heads = HEADS.map(([name, kind, title]) => element("th", { class: kind, title }, name));
  const rest = algorithms.length - table.length;
  const more = () => go({ lens: "all" });
  return element(
    "div", { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...table.map((row) => line(row, own, current, go)))),
    rest > 0 ? element("button", { type: "button", class: "chip", onclick: more }, `and ${rest} neighbours`) : null,
  );
}

function line(row, own, current, go) {
  const isOwn = row.name === own;
  const look = () => go({ as: isOwn ? null : row.name });
  const name = element("button", { type: "button", class: "into", onclick: look }, row.label);
  const head = element("th", { scope: "row" }, name, isOwn ? element("span", { class: "badge" }, "this run") : null);
  const number = (name, say, title) =>
    element("td", { class: "number", title, "data-name": name, "data-value": row[name] }, say(row[name]));
  const turned = `${row.closed} are stopped here alone, ${row.opened} under the run's own alone`;
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
