// The completions of a group, token by token. Spans are created as they become visible: a group may have 100,000 tokens.

import { STATES, look } from "./channels.js";
import { drawn, element, isField, known, oneLine, quoted, short, signed, visible } from "../elements.js";
import { markdown } from "./markdown.js";
import { extended, flip, weight } from "./rows.js";
import { segments, turnBlock } from "./turns.js";

const FIRST = 320; // spans of a completion that are created at once
const MORE = 1024; // and that are added when its end becomes visible
const BINS = 240;
const [SLICE, FRAME] = [40, 20]; // milliseconds

/** One completion: its answer and reward, its tokens, and the channel drawn over their positions. */
export class Sibling {
  /** `answers` has onPick(row, token), onHover(row, token or null) and onMore(row), which loads missing tokens.
   * `style` has spaces: whether they are shown, and text: "tokens" or "markdown". */
  constructor(row, target, style, answers) {
    Object.assign(this, { row, answers, style, spans: [], turns: segments(row.turns ?? []), blocks: [] });
    this.text = element("div", { class: "text", role: "group", "aria-label": `tokens of sibling ${row.sibling}` });
    this.prose = element("div", { class: "prose", hidden: true, tabindex: "0" });
    this.spark = drawn("svg", { class: "spark", viewBox: `0 0 ${BINS} 24`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.end = element("button", { class: "more", type: "button", onclick: () => this.readOn() }, "");
    this.root = element(
      "article", { class: `sibling ${row.fate}`, "data-row": row.row, "aria-label": `sibling ${row.sibling}` },
      heading(row, target), this.text, this.prose, this.end, this.spark,
    );
    this.text.addEventListener("click", (event) => this.onToken(event, answers.onPick));
    this.text.addEventListener("mouseover", (event) => this.onToken(event, answers.onHover));
    this.text.addEventListener("mouseleave", () => answers.onHover(row.row, null));
    this.text.addEventListener("focusin", (event) => this.isRoving || this.onToken(event, answers.onPick));
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
    const first = this.spans.length;
    let [place, fragment] = [null, null];
    for (let token = first; token < until; token++) {
      const into = this.placeOf(token);
      if (into !== place) fragment && place.append(fragment), (place = into), (fragment = document.createDocumentFragment());
      const span = document.createElement("span");
      span.dataset.token = token;
      span.textContent = this.spelled(token);
      this.spans.push(span);
      this.paintOne(token);
      fragment.append(span);
    }
    if (fragment) place.append(fragment);
    const left = row.size - this.spans.length;
    this.end.hidden = left <= 0 || this.style.text === "markdown";
    this.end.textContent = `${left.toLocaleString("en")} more tokens`;
    if (!first && this.spans.length && !known(this.picked)) this.rove(0);
  }

  /** Where a token's span belongs: into the block of its turn, if there are turns. */
  placeOf(token) {
    const turn = this.turns.findIndex(({ end }) => token < end);
    if (turn < 0) return this.text;
    while (this.blocks.length <= turn) {
      const block = turnBlock(this.turns[this.blocks.length]);
      this.blocks.push(block);
      this.text.append(block.root);
    }
    return this.blocks[turn].text;
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
    const { spaces } = this.style;
    if (piece === "") return spaces ? "◌" : "\u2009"; // a part of a character that a later token completes
    if (this.row.specials.has(token) && !spaces) return "◆";
    const text = visible(piece);
    const ends = text.replaceAll("\n", "↵\n");
    return spaces ? ends.replaceAll(" ", "·").replaceAll("\t", "⇥\t") : ends;
  }

  /** Show spaces, or the text as Markdown, or neither. */
  restyle(style) {
    const wasSpaced = this.style.spaces;
    this.style = style;
    if (wasSpaced !== style.spaces) this.spans.forEach((span, token) => (span.textContent = this.spelled(token)));
    const isProse = style.text === "markdown";
    [this.text.hidden, this.prose.hidden, this.end.hidden] = [isProse, !isProse, isProse || this.spans.length >= this.row.size];
    if (isProse) this.prose.replaceChildren(...this.prosed());
    else this.prose.replaceChildren();
  }

  prosed() {
    const { row, turns } = this;
    const said = (start, end) => row.pieces.slice(start, end).filter((_, place) => !row.specials.has(start + place)).join("");
    if (!turns.length) return [markdown(said(0, row.pieces.length))];
    return turns.map((turn) => {
      const { root, text } = turnBlock(turn);
      text.append(markdown(said(turn.start, turn.end)));
      return root;
    });
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
    if (span.dataset.state !== state) span.dataset.state = state;
    span.dataset.value = value;
  }

  /** The one token that the Tab key reaches; the arrows lead on from there. */
  rove(token) {
    const before = this.spans[this.roving];
    ["tabindex", "role"].forEach((name) => before?.removeAttribute(name));
    this.roving = token;
    this.spans[token].setAttribute("tabindex", "0");
    this.spans[token].setAttribute("role", "button");
  }

  /** Select a token and scroll to it if needed; null selects none. */
  pick(token) {
    const before = this.picked;
    this.picked = token;
    if (known(before) && this.spans[before]) this.spans[before].classList.remove("picked");
    this.root.classList.toggle("here", token !== null);
    if (token === null || !(token < this.row.pieces.length)) return known(before) && this.drawSpark();
    if (token >= this.spans.length) this.grow(token + 64);
    const span = this.spans[token];
    span.classList.add("picked");
    this.rove(token);
    if (token !== before && this.style.text !== "markdown") {
      this.isRoving = true;
      if (!isField(document.activeElement)) span.focus({ preventScroll: true });
      this.isRoving = false;
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

/** Paint the completion with the selected token first, then those on the screen, then the others. A large group is
 * painted in slices, between which the browser can draw, for as long as `isStill` wanted. */
export async function paintAll(siblings, selected, paint, isStill) {
  const first = Math.max(siblings.findIndex(({ root }) => root.getBoundingClientRect().bottom > 0), 0);
  const chosen = siblings.filter(({ row }) => String(row.row) === selected);
  let start = performance.now();
  for (const sibling of new Set([...chosen, ...siblings.slice(first), ...siblings])) {
    if (performance.now() - start > SLICE) {
      await new Promise((next) => setTimeout(next, FRAME));
      if (!isStill()) return;
      start = performance.now();
    }
    paint(sibling);
  }
}

function heading(row, target) {
  const facts = [
    fact("reward", short(row.reward), row.reward === null ? "unscored" : ""),
    row.outcome !== row.reward ? fact("task score", short(row.outcome)) : null,
    ...Object.entries(row.parts).map(([name, value]) => fact(oneLine(name), short(value))),
    fact("advantage", signed(row.advantage_mean)),
    fact("tokens", row.length.toLocaleString("en")),
    row.replies ? fact("replies", row.replies) : null,
    row.blocked ? fact("no gradient", `${row.blocked} of ${row.pushing}`) : null,
    row.duplicate === null ? null : fact("same as", `#${row.duplicate}`),
  ];
  const failed = row.failed ? `${row.failed} failed` : null;
  const notes = [row.fate === "trained" ? null : row.fate, row.truncated ? "truncated" : null, failed].filter(Boolean);
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
