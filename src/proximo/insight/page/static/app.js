// The page: it shows what its address names. The whole selection is in the part after the #.

import { Refused, api, takeToken } from "./asking.js";
import { AXES } from "./charts.js";
import { element, known, oneLine, refill } from "./elements.js";
import { showEvents } from "./events.js";
import { openHelp } from "./figures/help.js";
import { specsOf } from "./figures/lines.js";
import { shownRuns } from "./figures/names.js";
import { rove } from "./figures/roving.js";
import { Followed } from "./following.js";
import { ChartPage } from "./overview.js";
import { PANELS } from "./panels.js";
import { showReader } from "./reader/reader.js";
import { RunList } from "./runs.js";
import { showSettings } from "./settings.js";

const TABS = { overview: "Overview", stability: "Stability", performance: "Performance", events: "Events", config: "Config", all: "All numbers" };
const TEXTS = { events: showEvents, config: showSettings }; // tabs without charts
const [OFTEN, SELDOM] = [2000, 10000]; // milliseconds

const SMOOTH = [["auto", "automatic"], ["1", "off"], ...["5", "11", "25", "51", "101"].map((wide) => [wide, `${wide} steps`])];
const [main, tabs, axes, options, notice] = ["main", "tabs", "axis", "options", "notice"].map((id) => document.getElementById(id));
const list = new RunList(document.getElementById("runs"), fromList);
const followed = new Map();
let listed = { root: "", runs: [] };
let page = null; // the charts that are on the screen
let pages = Object.entries(TABS); // names and labels of those that the tabs lead to
let drawn = ""; // the part of the address that they were drawn for

window.proximo = { charts: {} };

/** The address as names and values, with all its runs; the newest run if it names none. */
function stateNow() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const runs = [...new Set(hash.getAll("run"))];
  return { ...Object.fromEntries(hash), run: runs[0] ?? listed.runs[0]?.name, runs };
}

/** Change the address; null removes a value, a list adds it several times. Small changes, such as the selected token,
 * replace the last history entry, so that going back leads to the last page. */
function go(changes, isSmall = false) {
  const hash = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) {
    hash.delete(name);
    const values = Array.isArray(value) ? value : [value];
    values.filter((each) => each !== null && each !== undefined && each !== "").forEach((each) => hash.append(name, each));
  }
  const address = hash.toString().replaceAll("%2F", "/");
  if (isSmall) history.replaceState(null, "", `#${address}`), render();
  else location.hash = address;
}

/** From the list of runs. The reader stays, at the same step of another run. */
function fromList({ step, ...changes }) {
  if (isReading(stateNow()) && changes.run.length) go({ ...changes, as: null, pass: null, group: null, row: null, token: null });
  else go({ ...changes, step });
}

/** The runs of the address that exist; the newest if it names none. */
function chosen(state) {
  const there = new Set(listed.runs.map((run) => run.name));
  const named = state.runs.filter((name) => there.has(name));
  return named.length || state.runs.length ? named : listed.runs.slice(0, 1).map((run) => run.name);
}

function isReading(state) {
  return state.step !== undefined && state.run !== undefined;
}

function render() {
  const state = stateNow();
  const names = chosen(state);
  const shown = shownRuns(listed.runs, names);
  const tab = isReading(state) ? "reader" : Object.hasOwn(TABS, state.tab) ? state.tab : "overview";
  const runs = shown.map((each) => ({ ...each, run: tab === "reader" ? followed.get(each.name) : follow(each.name) })).filter(({ run }) => run);
  const axis = Object.hasOwn(AXES, state.x) ? state.x : "step";
  document.body.dataset.tab = tab;
  document.title = `${names.map((name) => oneLine(name)).join(", ") || "runs"} · Proximo`;
  list.show(listed, shown);
  showTabs(tab, state, runs);
  showAxes(axis, runs);
  showOptions(state);
  showPage(tab, state, runs, axis);
}

function showPage(tab, state, runs, axis) {
  const isCharts = tab !== "reader" && !Object.hasOwn(TEXTS, tab);
  const isFocused = main.contains(document.activeElement); // such as a chart on which Enter was pressed
  if (!isCharts || drawn !== tab) page?.clear(), (page = null);
  const error = listed.error ?? runs.map(({ run }) => run.error).find(Boolean);
  notice.textContent = error && listed.runs.length ? oneLine(error.message) : missing(state);
  const wasReader = drawn === "reader";
  drawn = tab;
  if (tab === "reader") {
    if (!wasReader) main.replaceChildren();
    const key = JSON.stringify([state, listed.runs.map(({ name }) => name)]);
    if (main.dataset.state !== key) (main.dataset.state = key), showReader(main, state, { api, go, runs: listed.runs });
    if (isFocused && !wasReader) main.firstElementChild.focus({ preventScroll: true });
    return;
  }
  delete main.dataset.state;
  if (isCharts) delete main.dataset.shown;
  if (!listed.runs.length) {
    page?.clear(), (page = null);
    main.replaceChildren(message(error));
  } else if (!isCharts) showOnce(TEXTS[tab], runs);
  else (page ??= new ChartPage(main, openStep)).show(tab, runs, { axis, smooth: windowOf(state), isLog: state.log === "1" });
}

/** Runs of the address that are not there, in words. */
function missing({ runs }) {
  const lost = listed.asked ? runs.filter((name) => !listed.runs.some((run) => run.name === name)) : [];
  return lost.length && listed.runs.length ? `No run is called ${lost.map(oneLine).join(", ")} in ${oneLine(listed.root)}` : "";
}

/** Replace only what has changed, so that a selection in the text stays. */
function showOnce(show, runs) {
  const key = JSON.stringify([show.name, runs.map(({ run, shade }) => [run.name, shade, run.state, run.events.length, run.findings, run.rules, run.unreadable, run.isDiagnosed, run.about?.rollouts])]);
  if (main.dataset.shown !== key || !main.childElementCount) show(main, runs);
  main.dataset.shown = key;
}

function message(error) {
  if (error) return element("p", { class: "empty" }, oneLine(error.message));
  if (listed.asked) return element("p", { class: "empty" }, `No runs in ${oneLine(listed.root)} yet. Start one: proximo train`);
  return element("p", { class: "empty faint" }, "…");
}

/** The nearest training step; evaluations may be before the first and after the last. */
function openStep(name, step) {
  const steps = followed.get(name)?.trained ?? [];
  const others = chosen(stateNow()).filter((each) => each !== name);
  if (steps.length) go({ run: [name, ...others], step: Math.min(Math.max(step, steps[0].step), steps.at(-1).step) });
}

/** Pages that the runs have something for. */
function pagesOf(runs, current) {
  const isStages = runs.length > 0 && runs.every(({ run }) => run.about?.stage);
  const hasTimes = () => PANELS.performance.some((panel) => specsOf(panel, runs, "step", new Map()).length);
  const has = { stability: () => !isStages, performance: () => !isStages || hasTimes() }; // a stage's numbers are in its overview
  return Object.entries(TABS).filter(([name]) => name === current || (has[name]?.() ?? true));
}

function showTabs(current, state, runs) {
  const standing = runs.flatMap(({ run }) => run.findings).filter((each) => !known(each.over));
  const [found, worst] = [standing.length, standing.some((each) => each.severity === "failing") ? "bad" : "warn"];
  const button = ([name, label], place) =>
    element("button", { type: "button", "data-tab": name, "aria-pressed": String(name === current), title: `key ${place + 1}`, onclick: () => leave(name) }, label,
      name === "events" && found ? element("span", { class: `count ${worst}` }, String(found)) : null);
  const reader = element("button", { type: "button", "data-tab": "reader", "aria-pressed": "true" }, `Step ${oneLine(state.step ?? "")}`);
  pages = pagesOf(runs, current);
  refill(tabs, [...pages.map(button), ...(current === "reader" ? [reader] : [])]);
  rove(tabs, "button");
  if (tabs.dataset.current !== current) tabs.querySelector("[aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone they do not all fit
  tabs.dataset.current = current;
}

const KEPT = new Set(["run", "x", "smooth", "log"]);

/** Go to a page of whole runs, without the reader's part of the address. */
function leave(tab) {
  const names = [...new URLSearchParams(location.hash.slice(1)).keys()].filter((name) => !KEPT.has(name));
  go({ ...Object.fromEntries(names.map((name) => [name, null])), tab: tab === "overview" ? null : tab });
}

function showAxes(current, runs) {
  const isThere = { step: true, tokens: runs.some(({ run }) => run.hasTokens), time: runs.some(({ run }) => run.hasTime) };
  refill(axes, Object.entries(AXES).map(([name, { label, title }]) =>
    element("button", { type: "button", "data-axis": name, "aria-pressed": String(name === current), disabled: !isThere[name] && name !== current, title, onclick: () => go({ x: name === "step" ? null : name }) }, label)));
}

/** The window of the moving mean; undefined for one that suits the number of steps. */
function windowOf({ smooth }) {
  return /^\d{1,4}$/.test(smooth ?? "") ? Number(smooth) : undefined;
}

function showOptions(state) {
  const [wide, isLog] = [String(windowOf(state) ?? "auto"), state.log === "1"];
  if (options.dataset.shown === `${wide} ${isLog}`) return; // an open list stays open
  options.dataset.shown = `${wide} ${isLog}`;
  const option = ([value, label]) => element("option", { value, selected: value === wide }, label);
  const choose = element("select", { onchange: (event) => go({ smooth: event.target.value === "auto" ? null : event.target.value }) }, ...SMOOTH.map(option));
  const log = element("button", { type: "button", "data-log": "", "aria-pressed": String(isLog), title: "logarithmic vertical axis, where all values are above 0 (key l)", onclick: () => go({ log: isLog ? null : 1 }) }, "log");
  refill(options, [element("label", { title: "mean of the steps around each, over the values (key s)" }, "smooth ", choose), log, element("button", { type: "button", "data-help": "", title: "keys", "aria-label": "keys", onclick: openHelp }, "?")]);
}

/** Read a shown run from its beginning, once. */
function follow(name) {
  if (!followed.has(name)) {
    const { state, fork } = listed.runs.find((each) => each.name === name) ?? {};
    const run = new Followed(name, state, fork);
    followed.set(name, run);
    run.learn().then(soon);
    run.read().then(soon).finally(() => (diagnosing = diagnosing.then(() => Promise.all([run.part().then(soon), run.diagnose()])).then(soon).catch(() => {})));
  }
  return followed.get(name);
}

let diagnosing = Promise.resolve(); // one at a time, so that rows of other runs need not wait for a connection
let waiting = null;

/** Once for all that has arrived. */
function soon() {
  waiting ??= requestAnimationFrame(() => ((waiting = null), render()));
}

/** Fetch new rows of unfinished runs, and of those that have just ended. */
async function followOn() {
  const names = chosen(stateNow());
  const states = new Map(listed.runs.map((run) => [run.name, run.state]));
  const growing = names.map((name) => followed.get(name)).filter((run) => run && (states.get(run.name) === "running" || run.state !== states.get(run.name) || run.error || !run.about));
  const changed = await Promise.all(growing.map(async (run) => {
    const isNew = await run.read();
    const isOther = run.state !== states.get(run.name);
    const isUnknown = !run.about || (isNew && !run.about.rollouts); // it may have had none yet
    run.state = states.get(run.name);
    if (isOther) await Promise.allSettled([run.read(), run.learn(), run.diagnose(), run.part()]); // the last reading may have begun before
    else if (isUnknown) await run.learn();
    return isNew || isOther || isUnknown;
  }));
  if (changed.some(Boolean)) soon();
}

async function relist() {
  const before = JSON.stringify(listed);
  try {
    listed = { ...(await api("runs")), asked: true };
  } catch (error) {
    listed = { ...listed, error: error instanceof Refused ? error : new Error(String(error)) };
  }
  if (JSON.stringify(listed) !== before) render();
}

let wake = () => {};

/** Poll the server while the page is visible. Errors are shown, and the request is tried again. */
async function keepUp() {
  for (let asked = -Infinity; ; ) {
    if (!document.hidden) {
      const isLive = !listed.runs.length || listed.runs.some((run) => run.state === "running");
      try {
        if (performance.now() - asked >= (isLive ? 2 * OFTEN : SELDOM)) (asked = performance.now()), await relist();
        await followOn();
      } catch (error) {
        notice.textContent = oneLine(error);
      }
    }
    await new Promise((next) => {
      const timer = setTimeout(next, OFTEN);
      wake = () => (clearTimeout(timer), next());
    });
  }
}

document.addEventListener("visibilitychange", () => wake());
addEventListener("hashchange", () => (takeToken(), render()));
addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input:not([type=checkbox]), textarea, select");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || isReading(stateNow())) return;
  const [tab] = pages[Number(event.key) - 1] ?? [];
  const order = Object.keys(AXES);
  if (document.querySelector("dialog[open]")) return;
  if (tab) leave(tab);
  else if (event.key === "Escape") page?.charts.zoomTo(null);
  else if (event.key === "+" || event.key === "-") page?.charts.zoomBy(event.key === "+" ? 0.5 : 2);
  else if (event.key === "x") go({ x: order[(order.indexOf(stateNow().x ?? "step") + 1) % order.length] });
  else if (event.key === "l") go({ log: stateNow().log === "1" ? null : 1 });
  else if (event.key === "s") go({ smooth: stateNow().smooth === "1" ? null : 1 });
  else if (event.key === "?") openHelp();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render());

takeToken();
render();
keepUp();
