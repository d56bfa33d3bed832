// The card of a token: why its gradient passes or not, in words, in numbers, and as a point on the gate's curve.

import { STATES } from "./channels.js";
import { calm, drawn, element, known, oneLine, quoted, ratio, share, short, signed } from "../elements.js";
import { flip } from "./rows.js";

/** The card's place: for the token under the pointer, or else for the selected one. */
export class CardPlace {
  constructor(root, reader) {
    Object.assign(this, { root, reader, telling: null });
    this.askWhy = calm(100, (row, token) => reader.guarded(() => this.why(row, token)));
  }

  row(number) {
    return this.reader.siblings.find((sibling) => sibling.row.row === number)?.row;
  }

  tell(row, token) {
    if (token === null && this.reader.picked) ({ row, token } = this.reader.picked);
    const found = this.row(row);
    if (!found || token === null || token >= found.pieces.length) {
      this.telling = null;
      return this.root.replaceChildren(element("p", { class: "faint hint" }, "Point at a token, or press n."));
    }
    this.telling = { row, token };
    this.draw(found, null);
    this.askWhy(row, token);
  }

  draw(row, words) {
    const { about, step, go } = this.reader;
    const own = about.algorithms.find(({ name }) => name === about.own).label;
    const isFocused = document.activeElement === this.root.querySelector(".close");
    const close = element("button", { type: "button", class: "close", "aria-label": "close", onclick: () => go({ row: null, token: null }) }, "×");
    this.root.replaceChildren(close, tokenCard(row, this.telling.token, step.algorithm, own, words));
    if (isFocused) close.focus();
  }

  async why(row, token) {
    const { turn } = this.reader;
    const words = await this.reader.ask("/api/why", { ...this.reader.asked, row, token });
    const found = this.row(row);
    const isStill = turn === this.reader.turn && this.telling?.row === row && this.telling.token === token;
    if (isStill && found) this.draw(found, words);
  }
}

/** `own` is the name of the run's own algorithm; `words` are requested from the server and may come later. */
function tokenCard(row, token, algorithm, own, words) {
  const at = (name) => row[name]?.[token];
  const state = at("state");
  const takesPart = state !== "idle" && state !== "outside";
  const place = ` id ${at("token")} · token ${token} of ${row.size} · row ${row.row}`;
  const mark = `token gate ${state}${STATES[state]?.blocked ? " blocked" : ""}`;
  return element(
    "div", { class: "card", "data-row": row.row, "data-token": token, "data-state": state },
    element("p", { class: "piece" },
      quoted(oneLine(row.pieces[token]) || "part of a character", { class: "mono" }),
      element("span", { class: "faint" }, place)),
    element("p", { class: "fate" },
      element("span", { class: mark }, STATES[state]?.label ?? state),
      element("span", { class: "faint" }, ` under ${algorithm.label}`)),
    words?.turn && !words.words.startsWith(words.turn) ? element("p", { class: "faint" }, oneLine(words.turn)) : null,
    element("p", { class: "words", "aria-live": "polite" }, words ? oneLine(words.words) : "…"),
    words?.own ? ownWords(words.own, own, flip(row.own?.[token], state)) : null,
    takesPart ? curve(algorithm.curve, at("advantage"), Math.log(at("ratio")), at("through")) : null,
    numbers(at, takesPart),
  );
}

function ownWords(words, own, turn) {
  const label = element("strong", {}, `${turn ? "It flips. " : ""}${own}, the run's own: `);
  return element("p", { class: `own ${turn}` }, label, oneLine(words));
}

/** The known numbers; for a token that is not trained on, none that an update would give it. */
function numbers(at, takesPart) {
  const lines = [
    ["log-prob, sampler", "sampler", short],
    ["old policy", "old", short],
    ["before the update", "current", short],
    ["reference", "reference", short],
    ["ratio of the token", "token_ratio", ratio, takesPart],
    ["ratio that is clipped", "ratio", ratio, takesPart],
    ["advantage", "advantage", signed],
    ["weight", "weight", short, takesPart],
    ["gradient kept", "through", share, takesPart],
    ["mismatch correction", "correction", short, takesPart],
    ["gradient on the log-prob", "gradient", signed, takesPart],
    ["gradient from the KL", "kl_gradient", signed, takesPart],
    ["sampler gap", "gap", signed],
    ["entropy", "entropy", short],
    ["KL to the reference", "kl", short],
    ["value", "value", short],
    ["return", "return", short],
  ];
  const line = ([label, name, say]) =>
    element("tr", {}, element("th", { scope: "row" }, label), element("td", { class: "number" }, say(at(name), 5)));
  const there = lines.filter(([, name, , isKnown = true]) => isKnown && known(at(name)));
  return element("table", { class: "numbers" }, ...there.map(line));
}

const [WIDE, HIGH, FOOT] = [260, 84, 18];

/** Share of the gradient that passes the gate, over the ratio; the point is this token. */
function curve({ log_ratio: places, positive, negative }, advantage, place, through) {
  if (!advantage || !Number.isFinite(place)) return null;
  const [first, last] = [places[0], places[places.length - 1]];
  const top = Math.max(1, ...positive, ...negative);
  const x = (value) => 4 + ((Math.min(Math.max(value, first), last) - first) / (last - first)) * (WIDE - 8);
  const y = (value) => HIGH - FOOT - (Math.min(value, top) / top) * (HIGH - FOOT - 10);
  const line = (values, kind) => {
    const steps = values.map((value, at) => `${at ? "L" : "M"}${x(places[at]).toFixed(1)},${y(value).toFixed(1)}`);
    return drawn("path", { class: kind, d: steps.join("") });
  };
  const label = (value, anchor) =>
    drawn("text", { x: x(value), y: HIGH - 4, "text-anchor": anchor }, ratio(Math.exp(value)));
  const isUp = advantage > 0;
  const words = "share of the gradient that is kept, over the ratio";
  const picture = drawn(
    "svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "curve", role: "img", "aria-label": words },
    drawn("line", { class: "axis", x1: 4, x2: WIDE - 4, y1: y(0), y2: y(0) }),
    drawn("line", { class: "axis dotted", x1: x(0), x2: x(0), y1: y(top), y2: y(0) }),
    line(isUp ? negative : positive, "other"), line(isUp ? positive : negative, isUp ? "up" : "down"),
    drawn("circle", { cx: x(place), cy: y(through), r: 4 }),
    label(first, "start"), label(0, "middle"), label(last, "end"),
  );
  const caption = element("figcaption", { class: "faint" }, `${words}, for A ${isUp ? ">" : "<"} 0`);
  return element("figure", {}, picture, caption);
}
