// Runs that are followed. Every row is fetched once: each file is read from where the last response ended.

import { api, rowsFrom } from "./asking.js";

const isEvaluation = (row) => Object.keys(row).every((key) => key === "step" || key.startsWith("held_out/"));
const NO_PHASE = /^(step|tokens|attempt|judge_.*|episode_.*)$/; // the last two were spent within a phase, or are no seconds

/** A number that can be drawn. */
export const isNumber = (value) => Number.isFinite(value) && Math.abs(value) < 1e100;

/** Seconds of a row of timings, by phase. */
export const phases = (row) => Object.entries(row).filter(([key, value]) => !NO_PHASE.test(key) && isNumber(value));
export const seconds = (row) => phases(row).reduce((sum, [, value]) => sum + value, 0);

/** One run: its rows in order, and the position of a step on each axis. */
export class Followed {
  constructor(name, state, fork = null) {
    Object.assign(this, { name, state, fork, about: null, diagnosed: [], rules: [], unreadable: {}, verdict: null, isDiagnosed: false, parting: null, error: null, reading: null });
    this.next = { metrics: 0, timings: 0, events: 0 };
    this.forget("metrics");
    this.forget("timings");
    this.forget("events");
  }

  forget(file) {
    this.drawn = new Map(); // what was drawn of the rows, by figure and line
    if (file === "metrics") [this.trained, this.evaluated, this.tokens] = [[], [], null];
    if (file === "timings") [this.timed, this.time] = [[], null];
    if (file === "events") this.events = [];
  }

  /** Fetch new rows; true if there were any. One request at a time. */
  read() {
    this.reading ??= Promise.all(Object.keys(this.next).map((file) => this.readFile(file)))
      .then((changed) => ((this.error = null), changed.some(Boolean)))
      .catch((error) => ((this.error = error), true))
      .finally(() => (this.reading = null));
    return this.reading;
  }

  async readFile(file) {
    let changed = false;
    let asked = rowsFrom(this.name, file, this.next[file]);
    for (;;) {
      const page = await asked;
      const isEnd = page.next === page.from || page.next >= page.size;
      if (!isEnd) asked = rowsFrom(this.name, file, page.next); // requested while these rows are parsed
      if (page.from < this.next[file]) this.forget(file), (changed = true); // shorter: the run was resumed from an earlier step
      this.next[file] = page.next;
      const rows = page.rows();
      rows.forEach((row) => this.add(file, row));
      changed ||= rows.length > 0;
      if (isEnd) return changed;
    }
  }

  add(file, row) {
    this.drawn.clear();
    if (file === "events") this.events.push(row);
    else if (file === "timings") put(this.timed, row), (this.time = null);
    else put(isEvaluation(row) ? this.evaluated : this.trained, row), (this.tokens = null);
  }

  /** The run's settings; the last known ones if they cannot be fetched. */
  async learn() {
    try {
      this.about = await api("run", { run: this.name });
    } catch (error) {
      this.error ??= error;
    }
  }

  /** Where a fork parts from its parent. */
  async part() {
    if (this.fork) this.parting = (await api("parting", { run: this.name })).parting;
  }

  async diagnose() {
    const { findings, verdict, rules, unreadable, profile } = await api("health", { run: this.name });
    Object.assign(this, { diagnosed: findings, verdict, rules, unreadable, profile, isDiagnosed: true });
  }

  /** The findings of the last check-up, and those that the run has reported since. */
  get findings() {
    const rules = new Set(this.diagnosed.map((each) => each.rule));
    return [...this.diagnosed, ...this.events.filter((event) => event.kind === "finding" && !rules.has(event.rule))];
  }

  get hasTokens() {
    return this.trained.some((row) => row.sampled_tokens > 0);
  }

  get hasTime() {
    return this.timed.length > 0;
  }

  /** Position of a step on an axis: its number, or the tokens generated or seconds spent up to its end. */
  place(step, axis) {
    if (axis === "step") return step;
    if (axis === "tokens") this.tokens ??= summed(this.trained, (row) => (isNumber(row.sampled_tokens) ? row.sampled_tokens : 0));
    else this.time ??= summed(this.timed, seconds);
    return until(axis === "tokens" ? this.tokens : this.time, step);
  }
}

/** Append a row and remove what an earlier attempt wrote about this step and later ones. */
function put(rows, row) {
  while (rows.length && rows[rows.length - 1].step >= row.step) rows.pop();
  rows.push(row);
}

function summed(rows, value) {
  let sum = 0;
  return rows.map((row) => [row.step, (sum += value(row))]);
}

/** The sum up to the last step that is not later. */
function until(sums, step) {
  let [low, high] = [0, sums.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sums[middle][0] <= step) low = middle + 1;
    else high = middle;
  }
  return low ? sums[low - 1][1] : 0;
}
