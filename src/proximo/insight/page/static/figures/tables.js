// The tables over the charts: last values of each run with its verdict, and where the time went.

import { duration, withUnit } from "../charts.js";
import { element, known, oneLine, quoted, short } from "../elements.js";
import { isNumber, phases } from "../following.js";
import { isRun, outcomeUnit } from "../panels.js";
import { dot } from "./shapes.js";

const SENTENCES = 3; // runs whose verdicts are sentences over the table; of more they are in it

const lastOf = (rows, key) => rows.findLast((row) => isNumber(row[key]))?.[key];

/** The heading of a run's row. */
function runHead({ run, shade, label }) {
  return element("th", { scope: "row", title: oneLine(run.name) }, dot(shade), quoted(oneLine(label)));
}

/** A table with one line per selected run. */
export function figureTable(runs) {
  const shown = runs.filter(({ run }) => run.trained.length || run.evaluated.length);
  if (!shown.length) return [];
  const columns = [
    ["step", (run) => steps(run)], ["task score", (run) => withUnit(lastOf(run.trained, "outcome"), outcomeUnit([run])), "of the last step: mean over sampled completions"],
    ["held-out", (run) => (isRun(run) ? evaluations(run, "held_out/accuracy", "share") : "–"), "first and last evaluation: greedy answers"],
    ["held-out loss", (run) => (isRun(run) ? "–" : evaluations(run, "held_out/loss")), "first and last evaluation"],
    ["length", (run) => short(lastOf(run.trained, "length"))], ["entropy", (run) => short(lastOf(run.trained, "entropy"))],
    ["tokens", (run) => (run.hasTokens ? withUnit(run.place(Infinity, "tokens")) : "–")], ["time in steps", (run) => (run.hasTime ? duration(run.place(Infinity, "time")) : "–")],
  ];
  const cells = columns.map(([name, say, note]) => [name, shown.map(({ run }) => say(run)), note]).filter(([, texts]) => texts.some((text) => text !== "–"));
  const isMany = runs.length > SENTENCES;
  const rows = shown.map((each, place) => element("tr", {}, runHead(each), ...cells.map(([, texts]) => element("td", { class: "number" }, texts[place])), isMany ? element("td", {}, ...sentence(each.run)) : null));
  return [table(["run", ...cells.map(([name]) => name), ...(isMany ? ["verdict"] : [])], rows, cells.map(([, , note]) => note))];
}

/** The verdict with its first word marked; what happens until it is known. */
function sentence({ verdict: found, isDiagnosed }) {
  if (!found) return [isDiagnosed ? "–" : "being checked …"];
  return [element("b", { class: `word ${found.tone}` }, found.word), found.sentence.slice(found.word.length)];
}

const steps = (run) => [run.trained.at(-1)?.step || 0, run.about?.settings.steps].filter(known).join(" / ");

/** The first and the last value of a metric of evaluations. */
function evaluations(run, key, unit) {
  const [first, last] = [run.evaluated[0], run.evaluated.at(-1)].map((row) => row?.[key]);
  if (!known(last)) return "–";
  return run.evaluated.length > 1 && known(first) ? `${withUnit(first, unit)} → ${withUnit(last, unit)}` : withUnit(last, unit);
}

/** Where the time went, over the whole run. */
export function phaseTable(runs) {
  const shown = runs.filter(({ run }) => run.hasTime);
  if (!shown.length) return [];
  const sums = shown.map(({ run }) => {
    const sum = {};
    run.timed.forEach((row) => phases(row).forEach(([name, value]) => (sum[name] = (sum[name] ?? 0) + value)));
    return sum;
  });
  const names = [...new Set(sums.flatMap(Object.keys))];
  const rows = shown.map((each, place) => {
    const total = each.run.place(Infinity, "time");
    const cell = (sum) => (known(sum) ? `${duration(sum)} · ${withUnit(sum / total, "share")}` : "–");
    return element("tr", {}, runHead(each), element("td", { class: "number" }, duration(total)), ...names.map((name) => element("td", { class: "number" }, cell(sums[place][name]))));
  });
  return [table(["run", "time in steps", ...names], rows)];
}

/** Where the time of some steps went, of runs that have measured it: the largest loss as a sentence, then the parts. */
export function profilesOf(runs) {
  return runs.filter(({ run }) => run.profile?.length).flatMap(({ run, shade, label }) => [
    element("p", { class: "lead several" }, ...(runs.length > 1 ? [dot(shade), quoted(oneLine(label)), ": "] : []), run.profile[0]),
    element("pre", { class: "profile", tabindex: "0", "aria-label": "profile" }, run.profile.slice(1).join("\n")),
  ]);
}

function table(heads, rows, notes = []) {
  const head = element("tr", {}, ...heads.map((name, place) => element("th", { scope: "col", class: place && name !== "verdict" ? "number" : "", title: notes[place - 1] }, oneLine(name))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

/** A sentence about each run, if there are few, and why the two main numbers of one differ. */
export function leadOf(runs) {
  if (runs.length > SENTENCES) return [seedNote(runs)].filter(Boolean);
  const isOne = runs.length === 1;
  const lines = runs.map(({ run, shade, label }) => element("p", { class: isOne ? "lead" : "lead several" }, ...(isOne ? [] : [dot(shade), quoted(oneLine(label)), ": "]), ...sentence(run)));
  const note = isOne && runs[0].run.verdict?.note;
  return [...lines, note ? element("p", { class: "faint note" }, note) : null, seedNote(runs)].filter(Boolean);
}

/** What few seeds can and cannot tell. */
function seedNote(runs) {
  const seeds = [...Map.groupBy(runs, ({ arm }) => arm).values()].map((group) => group.length);
  const least = Math.min(...seeds);
  if (seeds.length < 2 || least > 2) return null;
  const words = least === 1 ? "One seed cannot decide which is better: the next may turn out the other way." : "Two seeds cannot decide which is better: their difference may be chance.";
  return element("p", { class: "faint note seeds" }, `${words} Three or more can: proximo compare --seeds 3.`);
}
