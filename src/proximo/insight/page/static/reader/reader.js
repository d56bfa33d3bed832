// The reader: a step's groups, a group's completions token by token, and the algorithm lens for both.
//
// Everything shown follows from the address: when it changes, missing data is requested from the server and drawn.

import { Bar } from "./bar.js";
import { CardPlace } from "./card.js";
import { channelNamed } from "./channels.js";
import { element, oneLine, refill } from "../elements.js";
import { asked, groupTable, refillGroups, shown } from "./groups.js";
import { channelBar, groupHead, times } from "./heads.js";
import { Search } from "./hits.js";
import { pressed } from "./keys.js";
import { lensTable, lensWords } from "./lens.js";
import { unpackedRow } from "./rows.js";
import { save } from "./saving.js";
import { Sibling, paintAll } from "./tokens.js";

const KEPT = { "/api/group": 4, "/api/why": 100 }; // cached responses; of other kinds
const FEW = 16;
const [OLD, SOON] = [2000, 150]; // milliseconds
const SMALL = ["row", "token", "channel", "text"]; // changes without an entry in the history
const [TINY, LONG] = [16, 160]; // tokens of the longest completion, which decide how wide texts are laid out

let reader = null;

/** Called by the page whenever its address names a step; `runs` are those to switch to. */
export function showReader(main, state, { api, go, runs }) {
  reader ??= new Reader();
  Object.assign(reader, { api, goes: go, runs });
  if (reader.root.parentNode !== main || main.childNodes.length !== 1) main.replaceChildren(reader.root);
  return reader.show(state);
}

class Reader {
  constructor() {
    const isSmall = (changes) => Object.keys(changes).every((name) => SMALL.includes(name));
    this.go = (changes) => this.goes(changes, isSmall(changes));
    this.bar = new Bar(this.go, (kind) => this.guarded(() => save(this, kind)));
    this.style = { spaces: false, text: "tokens" };
    const names = ["words", "lenses", "groups", "group", "aside"];
    this.places = Object.fromEntries(names.map((name) => [name, element("div", { class: name })]));
    const { words, lenses, groups, group, aside } = this.places;
    this.alert = element("p", { class: "bad", role: "alert" });
    this.reading = element("p", { class: "reading faint", role: "status" });
    this.search = new Search((path, params) => this.api(path, params), this.go);
    const columns = element("div", { class: "columns" }, groups, group, aside);
    const about = element("div", { class: "abouts" }, words, lenses);
    this.root = element("div", { class: "reader", tabindex: "-1" }, this.bar.root, this.alert, this.reading, about, this.search.root, columns);
    this.lenses = element("details", {}, element("summary", {}, "what-if view: every algorithm on this step"), element("div"));
    this.lenses.addEventListener("toggle", () => {
      if (this.lenses.open !== Boolean(this.state.lens)) this.go({ lens: this.lenses.open ? "five" : null });
    });
    lenses.append(this.lenses);
    this.kept = {};
    this.siblings = [];
    this.card = new CardPlace(aside, this);
    document.addEventListener("keydown", (event) => pressed(this, event) && event.preventDefault());
  }

  /** A response of the server; the last ones of each kind are cached. */
  async ask(path, params) {
    const kept = (this.kept[path] ??= new Map());
    const key = JSON.stringify(params);
    const answer = kept.get(key) ?? this.api(path, params);
    kept.delete(key);
    kept.set(key, answer);
    if (kept.size > (KEPT[path] ?? FEW)) kept.delete(kept.keys().next().value);
    return answer.catch((error) => {
      kept.delete(key);
      throw error;
    });
  }

  /** The parameters of every request about the step. */
  get asked() {
    const { run, step, as, pass } = this.state;
    return { run, step, as, pass };
  }

  /** Show an error in one line; `after` it, the content that it concerns is removed. */
  async guarded(action, after) {
    const turn = this.turn;
    try {
      await action();
    } catch (error) {
      await after?.();
      if (turn === this.turn) this.alert.textContent = oneLine(error.message);
    }
  }

  async show(state) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.state = { ...state };
    const address = location.hash;
    this.root.setAttribute("aria-busy", "true");
    this.tellReading(state);
    this.guarded(() => this.search.show(state.run, state.all ? state.find : null));
    const asked = [this.steps(), this.ask("/api/step", this.asked), this.found()];
    asked[0].then((about) => turn === this.turn && !this.step && this.bar.draw(about, null, state, this.runs)).catch(() => {});
    let isDrawn = false;
    await this.guarded(async () => {
      const [about, step, found] = await Promise.all(asked);
      if (turn !== this.turn) return;
      this.alert.textContent = "";
      this.about = about;
      this.drawStep(step, found && new Set(found.matches));
      isDrawn = true;
      if (!state.group) return this.closeGroup();
      const group = await this.ask("/api/group", { ...this.asked, group: state.group });
      if (turn === this.turn) this.drawGroup(group);
    }, async () => {
      const about = await asked[0].catch(() => null);
      if (turn !== this.turn) return;
      this.closeGroup();
      if (!isDrawn) this.closeStep(about);
    });
    if (turn !== this.turn) return;
    this.root.removeAttribute("aria-busy");
    this.tellReading(null);
    await this.painted;
    if (turn === this.turn) this.root.dataset.shown = address; // for tests that wait for it
  }

  /** Steps and algorithms of the run; requested again at its last step, since a live run may have new ones. */
  async steps() {
    const { run, step } = this.state;
    const isLast = this.about?.steps.at(-1) <= Number(step) && performance.now() - this.about.when > OLD;
    if (this.about?.run === run && !isLast) return this.about;
    return { ...(await this.api("/api/steps", { run })), run, when: performance.now() };
  }

  found() {
    const { run, step, find } = this.state;
    return find ? this.ask("/api/step", { run, step, find }) : null;
  }

  drawStep(step, matches) {
    const { state } = this;
    const isOpen = Boolean(state.group);
    const key = JSON.stringify([this.asked, this.about.steps.length, state.show, state.find, state.all, state.group, state.lens, this.runs.length]);
    if (this.step === step && this.drawn === key) return; // another token, another channel
    const left = isOpen || JSON.stringify(this.asked) !== this.at?.asked ? null : this.at.group;
    this.at = { asked: JSON.stringify(this.asked), group: state.group };
    Object.assign(this, { step, drawn: key, list: shown(step, state.show, matches) });
    this.bar.draw(this.about, step, state, this.runs);
    this.places.words.replaceChildren(lensWords(step.algorithm));
    this.root.classList.toggle("open", isOpen);
    const found = `${matches?.size} of ${step.rows.length} completions match`;
    const many = matches && element("p", { class: "faint" }, found);
    const table = groupTable(step, this.list, { narrow: isOpen, open: state.group, go: this.go });
    refillGroups(this.places.groups, [many, table].filter(Boolean), left);
    this.guarded(() => this.drawLenses());
  }

  /** The table of algorithms, requested when it is opened. */
  async drawLenses() {
    const { step, drawn } = this;
    const { run, lens, pass } = this.state;
    this.lenses.open = Boolean(lens);
    if (!lens) return;
    if (this.lenses.dataset.step !== String(step.step)) this.lenses.lastChild.replaceChildren("…");
    const answer = await this.ask("/api/lens", { run, step: step.step, pass, all: lens === "all" ? 1 : null });
    if (drawn !== this.drawn) return;
    this.lenses.dataset.step = step.step;
    this.lenses.lastChild.replaceChildren(lensTable(answer, this.about, step.algorithm.name, this.go));
  }

  /** Remove the content of another step; only the links to other steps are left, if the run is known. */
  closeStep(about) {
    Object.assign(this, { about, step: null, drawn: null });
    const { words, groups } = this.places;
    this.bar.clear();
    for (const place of [words, groups, this.lenses.lastChild]) place.replaceChildren();
    if (about) this.bar.draw(about, null, this.state, this.runs);
    else this.bar.drawRun(this.state, this.runs);
    this.root.classList.remove("open");
  }

  closeGroup() {
    this.siblings = [];
    this.shownGroup = this.picked = null;
    this.places.group.replaceChildren();
    this.places.aside.replaceChildren();
  }

  drawGroup(group) {
    const { order } = asked(this.state.show);
    if (this.shownGroup !== group || this.order !== order) {
      Object.assign(this, { shownGroup: group, order });
      const answers = {
        onPick: (row, token) => this.go({ row, token }),
        onHover: (row, token) => this.card.tell(row, token),
        onMore: (row) => this.guarded(() => this.readOn(row)),
      };
      const rows = order ? group.rows.toSorted((one, other) => (order.by(other) ?? -Number.MAX_VALUE) - (order.by(one) ?? -Number.MAX_VALUE)) : group.rows;
      this.siblings = rows.map((row) => new Sibling(unpackedRow(row, this.about.states), group.answer, this.style, answers));
      this.scale = element("div", { class: "scale" });
      const longest = Math.max(...group.rows.map((row) => row.size));
      const size = longest > LONG ? "long" : longest <= TINY && !group.rows.some((row) => row.replies) ? "tiny" : "";
      const texts = element("div", { class: `siblings ${size}` }, ...this.siblings.map(({ root }) => root));
      this.places.group.replaceChildren(this.head(group), this.scale, texts);
      this.guarded(() => this.drawTimes(group));
    }
    const hits = this.list.groups.find((each) => each.group.group === group.group)?.hits;
    this.siblings.forEach(({ root, row }) => root.classList.toggle("miss", hits ? !hits.has(row.row) : false));
    this.restyle({ text: this.state.text === "markdown" ? "markdown" : "tokens" });
    this.paint();
    this.pick();
  }

  head(group) {
    const { groups } = this.list;
    const place = groups.findIndex((each) => each.group.group === group.group);
    const beside = place < 0 ? [null, groups[0]] : [groups[place - 1], groups[place + 1]];
    return groupHead(group, this.step.groups.find((each) => each.group === group.group), beside, this.go);
  }

  async drawTimes(group) {
    const { found } = await this.ask("/api/steps", { run: this.state.run, problem: group.problem });
    const place = this.places.group.querySelector(".times");
    if (found.length > 1 && this.shownGroup === group) place.replaceChildren(...times(found, group, this.go));
  }

  paint() {
    const { step, siblings, go } = this;
    this.channel = channelNamed(this.state.channel);
    const [job, range] = [(this.job = {}), step.ranges[this.channel.name]];
    this.painted = paintAll(siblings, this.state.row, (sibling) => sibling.paint(this.channel, range), () => job === this.job);
    const counts = {};
    for (const { row } of siblings) for (const state of row.state) counts[state] = (counts[state] ?? 0) + 1;
    const [toggleSpaces, toggleMarkdown] = [() => this.toggleSpaces(), () => this.toggleMarkdown()];
    refill(this.scale, channelBar(this.channel, step, counts, this.style, { go, toggleSpaces, toggleMarkdown }));
  }

  /** The token named in the address. */
  pick() {
    const [row, token] = ["row", "token"].map((name) => (this.state[name] ? Number(this.state[name]) : null));
    for (const sibling of this.siblings) sibling.pick(sibling.row.row === row ? (token ?? 0) : null);
    this.picked = row === null ? null : { row, token: token ?? 0 };
    this.card.tell(row, token);
  }

  async readOn(row) {
    const params = { ...this.asked, group: row.group, row: row.row, from: row.pieces.length };
    const sibling = this.siblings.find((each) => each.row === row);
    const more = await this.api("/api/group", params);
    if (sibling?.row === row) sibling.extend(unpackedRow(more.rows[0], this.about.states)); // once, even if requested twice
  }

  toggleSpaces() {
    this.restyle({ spaces: !this.style.spaces });
    this.paint();
  }

  toggleMarkdown() {
    this.go({ text: this.style.text === "markdown" ? null : "markdown" });
  }

  restyle(changes) {
    const next = { ...this.style, ...changes };
    const isSame = Object.keys(next).every((name) => next[name] === this.style[name]);
    this.style = next;
    this.siblings.forEach((sibling) => (isSame && sibling.style === next) || sibling.restyle(next));
    this.root.classList.toggle("prosaic", next.text === "markdown");
  }

  /** What is being read, if that takes longer than a moment; null if nothing is. */
  tellReading(state) {
    clearTimeout(this.soon);
    this.reading.textContent = "";
    this.root.classList.remove("waiting");
    if (!state) return;
    this.soon = setTimeout(() => {
      const isGroup = state.group && this.drawn && this.step?.step === Number(state.step);
      this.reading.textContent = `reading ${isGroup ? `group ${oneLine(state.group)}` : `step ${oneLine(state.step)}`} of ${oneLine(state.run)} …`;
      this.root.classList.add("waiting");
      if (!isGroup) this.drawOutline(state).catch(() => {}); // the whole answer says what is wrong
    }, SOON);
  }

  /** Rewards and lengths of a large step, until all of it has been read. */
  async drawOutline({ run, step, show }) {
    const { turn } = this;
    const outline = await this.ask("/api/step", { run, step, outline: 1 }); // once, though the list of runs shows the step anew
    if (turn !== this.turn || !this.root.hasAttribute("aria-busy") || this.step?.step === outline.step && this.drawn) return;
    const size = `${outline.rows.length.toLocaleString("en")} completions with ${outline.tokens.toLocaleString("en")} tokens`;
    this.reading.textContent = `reading step ${oneLine(step)} of ${oneLine(run)}: ${size} …`;
    this.places.groups.replaceChildren(groupTable(outline, shown(outline, show, null), { narrow: this.root.classList.contains("open"), open: null, go: this.go }));
  }
}
