// The completions of a group, token by token. Spans are created as they become visible: a group may have 100,000 tokens.

import { STATES, channelNamed, look } from "./channels.js";
import { drawn, element, isField, known, oneLine, quoted, short, signed, visible } from "../elements.js";

const FIRST = 320; // spans of a completion that are created at once
const MORE = 1024; // and that are added when its end becomes visible
const BINS = 240;

/** Unpack numbers: 32-bit floats in base 64. */
export function unpacked(text) {
  const bytes = atob(text);
  const numbers = new Uint8Array(bytes.length);
  for (let place = 0; place < bytes.length; place++) numbers[place] = bytes.charCodeAt(place);
  return new Float32Array(numbers.buffer);
}

/** A completion's arrays by name, and its states as words. */
export function unpackedRow(row, states) {
  const arrays = Object.fromEntries(Object.entries(row.arrays).map(([name, text]) => [name, unpacked(text)]));
  arrays.state = Array.from(arrays.state, (code) => states[code]);
  arrays.own = arrays.own && Array.from(arrays.own, (code) => states[code]);
  return { ...row, ...arrays, specials: new Set(row.specials) };
}

/** Append more tokens to a row. */
export function extended(row, more) {
  const joined = { ...row, pieces: row.pieces.concat(more.pieces) };
  for (const name of Object.keys(more)) {
    if (more[name] instanceof Float32Array) {
      joined[name] = new Float32Array(row[name].length + more[name].length);
      joined[name].set(row[name]);
      joined[name].set(more[name], row[name].length);
    }
  }
  joined.state = row.state.concat(more.state);
  joined.own = row.own?.concat(more.own);
  more.specials.forEach((place) => joined.specials.add(place + row.pieces.length));
  return joined;
}

/** One completion: its answer and reward, its tokens, and the channel drawn over their positions. */
export class Sibling {
  /** `answers` has onPick(row, token), onHover(row, token or null) and onMore(row), which loads missing tokens. */
  constructor(row, target, spaces, answers) {
    Object.assign(this, { row, answers, spaces, spans: [] });
    this.text = element("div", { class: "text", tabindex: "-1" });
    this.spark = drawn("svg", { class: "spark", viewBox: `0 0 ${BINS} 24`, preserveAspectRatio: "none" });
    this.end = element("button", { class: "more", type: "button", onclick: () => this.readOn() }, "");
    this.root = element(
      "article", { class: `sibling ${row.fate}`, "data-row": row.row, "aria-label": `sibling ${row.sibling}` },
      heading(row, target), this.text, this.end, this.spark,
    );
    this.text.addEventListener("click", (event) => this.onToken(event, answers.onPick));
    this.text.addEventListener("mouseover", (event) => this.onToken(event, answers.onHover));
    this.text.addEventListener("mouseleave", () => answers.onHover(row.row, null));
    this.spark.addEventListener("click", (event) => answers.onPick(row.row, this.tokenUnder(event)));
    const onScroll = () => this.nearEnd() && this.grow(this.spans.length + MORE);
    this.text.addEventListener("scroll", onScroll, { passive: true });
  }

  nearEnd() {
    return this.text.scrollTop + this.text.clientHeight * 2 > this.text.scrollHeight;
  }

  onToken(event, answer) {
    const token = event.target.dataset?.token;
    if (token !== undefined) answer(this.row.row, Number(token));
  }

  tokenUnder(event) {
    const box = this.spark.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) / box.width) * this.row.pieces.length);
    return Math.max(0, Math.min(place, this.row.pieces.length - 1));
  }

  /** Create spans up to this number of tokens. */
  grow(count) {
    const { row } = this;
    const until = Math.min(count, row.pieces.length);
    const fragment = document.createDocumentFragment();
    for (let token = this.spans.length; token < until; token++) {
      const span = document.createElement("span");
      span.dataset.token = token;
      span.textContent = this.spelled(token);
      this.spans.push(span);
      this.paintOne(token);
      fragment.append(span);
    }
    this.text.append(fragment);
    const left = row.length - this.spans.length;
    this.end.hidden = left <= 0;
    this.end.textContent = `${left.toLocaleString("en")} more tokens`;
  }

  /** Show loaded tokens first, then load more. */
  readOn() {
    if (this.spans.length < this.row.pieces.length) this.grow(this.spans.length + MORE);
    else this.answers.onMore(this.row);
  }

  extend(more) {
    this.row = extended(this.row, more);
    this.values = this.channel.of(this.row);
    this.grow(this.spans.length + MORE);
    this.drawSpark();
  }

  spelled(token) {
    const piece = this.row.pieces[token];
    if (piece === "") return this.spaces ? "◌" : "\u2009"; // a part of a character that a later token completes
    if (this.row.specials.has(token) && !this.spaces) return "◆";
    const text = visible(piece);
    const ends = text.replaceAll("\n", "↵\n");
    return this.spaces ? ends.replaceAll(" ", "·").replaceAll("\t", "⇥\t") : ends;
  }

  showSpaces(spaces) {
    this.spaces = spaces;
    this.spans.forEach((span, token) => (span.textContent = this.spelled(token)));
  }

  /** Colour every token by a channel. */
  paint(channel, range) {
    Object.assign(this, { channel, range, values: channel.of(this.row) });
    this.spans.forEach((_, token) => this.paintOne(token));
    if (!this.spans.length) this.grow(FIRST);
    this.drawSpark();
  }

  paintOne(token) {
    const { row, channel, values } = this;
    const span = this.spans[token];
    const state = row.state[token];
    const value = values?.[token];
    const { classes, amount } = look(channel, value, state, this.range, row.through[token]);
    const marks = [
      "token", classes, STATES[state]?.blocked ? "blocked" : "", state === "outside" ? "off" : "",
      flip(row.own?.[token], state), row.specials.has(token) ? "special" : "",
      row.pieces[token] === "" ? "part" : "", this.picked === token ? "picked" : "",
    ];
    span.className = marks.filter(Boolean).join(" ");
    span.style.setProperty("--v", amount.toFixed(3));
    span.dataset.state = state;
    span.dataset.value = value;
  }

  /** Select a token and scroll to it if needed; null selects none. */
  pick(token) {
    const before = this.picked;
    this.picked = token;
    if (known(before) && this.spans[before]) {
      this.spans[before].classList.remove("picked");
      this.spans[before].removeAttribute("tabindex");
    }
    this.root.classList.toggle("here", token !== null);
    if (token === null || !(token < this.row.pieces.length)) return known(before) && this.drawSpark();
    if (token >= this.spans.length) this.grow(token + 64);
    const span = this.spans[token];
    span.classList.add("picked");
    span.setAttribute("tabindex", "0");
    if (token !== before) {
      if (!isField(document.activeElement)) span.focus({ preventScroll: true });
      span.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    this.drawSpark();
  }

  /** The largest value of each interval of the text, and a line at the selected token. */
  drawSpark() {
    const { row, channel, range, values } = this;
    this.spark.replaceChildren();
    const count = row.pieces.length;
    if (!values || count < 2) return;
    const bins = Math.min(BINS, count);
    const width = BINS / bins;
    const paths = {};
    for (let bin = 0; bin < bins; bin++) {
      const strongest = this.strongest(Math.floor((bin * count) / bins), Math.floor(((bin + 1) * count) / bins));
      if (strongest === null) continue;
      const { classes, amount } = look(channel, values[strongest], row.state[strongest], range, row.through[strongest]);
      const wide = Math.min(Math.max(width * 0.85, 0.6), 8);
      const height = 22 * amount;
      if (height < 0.5) continue;
      (paths[classes] ??= []).push(`M${(bin + 0.5) * width - wide / 2},23v${-height}h${wide}v${height}z`);
    }
    const bars = Object.entries(paths).map(([classes, path]) => drawn("path", { class: classes, d: path.join("") }));
    this.spark.append(...bars);
    if (known(this.picked)) {
      const place = ((this.picked + 0.5) / count) * BINS;
      this.spark.append(drawn("line", { class: "cursor", x1: place, x2: place, y1: 0, y2: 24 }));
    }
  }

  strongest(from, to) {
    let best = null;
    let most = -1;
    for (let token = from; token < to; token++) {
      const amount = weight(this.channel, this.row, token, this.range);
      if (amount > most) [best, most] = [token, amount];
    }
    return best;
  }
}

/** Whether a token is blocked only under this algorithm, or only under the run's own. */
export function flip(own, state) {
  const [was, is] = [STATES[own], STATES[state]];
  if (was?.pushes && is?.blocked) return "closes";
  return was?.blocked && is?.pushes ? "opens" : "";
}

/** How far a token stands out in a channel. */
function weight(channel, row, token, range) {
  const state = row.state[token];
  if (channel.name === "gate" && !STATES[state]?.blocked && !STATES[state]?.pushes) return 0;
  return look(channel, channel.of(row)?.[token], state, range, row.through[token]).amount;
}

/** The tokens that the keys n and p visit: blocked ones in reading order, otherwise those that stand out most. */
export function stops(rows, channel, ranges) {
  const range = ranges[channel.name];
  const places = [];
  const byValue = ["entropy", "logprob", "gap", "kl"].includes(channel.name);
  for (const row of rows) {
    for (let token = 0; token < row.pieces.length; token++) {
      const isBlocked = STATES[row.state[token]]?.blocked;
      const amount = weight(channel, row, token, range);
      if (amount > 0 || isBlocked) places.push({ row: row.row, token, amount, isBlocked });
    }
  }
  const blocked = places.filter((place) => place.isBlocked);
  if (blocked.length && !byValue) return blocked;
  if (!places.length && channel.name !== "gradient") return stops(rows, channelNamed("gradient"), ranges);
  return places.sort((one, other) => other.amount - one.amount).slice(0, 500);
}

function heading(row, target) {
  const facts = [
    fact("reward", short(row.reward), row.reward === null ? "unscored" : ""),
    row.outcome !== row.reward ? fact("outcome", short(row.outcome)) : null,
    ...Object.entries(row.parts).map(([name, value]) => fact(oneLine(name), short(value))),
    fact("advantage", signed(row.advantage_mean)),
    fact("tokens", row.length.toLocaleString("en")),
    row.blocked ? fact("no gradient", `${row.blocked} of ${row.pushing}`) : null,
    row.duplicate === null ? null : fact("same as", `#${row.duplicate}`),
  ];
  const notes = [row.fate === "trained" ? null : row.fate, row.truncated ? "truncated" : null].filter(Boolean);
  const answer = quoted(oneLine(row.tail) || "empty", { class: "mono" });
  const wanted = [element("span", { class: "faint" }, " expected "), quoted(oneLine(target), { class: "mono" })];
  return element(
    "header", {},
    element("span", { class: "number-in-group" }, `#${row.sibling}`),
    element("span", { class: "answer", title: "end of the completion" }, answer, ...(target ? wanted : [])),
    ...notes.map((note) => element("span", { class: "badge warn" }, note)),
    element("span", { class: "facts" }, ...facts),
  );
}

function fact(name, value, kind = "") {
  return element("span", { class: `fact ${kind}` }, element("span", { class: "faint" }, `${name} `), value);
}
