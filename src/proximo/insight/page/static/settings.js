// The settings of runs: what differs between them, how each differs from the algorithm it is named after, and the
// versions that it was made with.

import { element, oneLine, quoted, visible } from "./elements.js";
import { dot } from "./figures/shapes.js";

export function showSettings(main, runs) {
  const known = runs.filter(({ run }) => run.about);
  main.replaceChildren(...(known.length > 1 ? [differences(known)] : []), ...known.map(settings));
}

/** Fields that differ between runs. */
function differences(runs) {
  const fields = [...new Set(runs.flatMap(({ run }) => Object.keys(run.about.settings)))];
  const differing = fields.filter((field) => new Set(runs.map(({ run }) => run.about.settings[field])).size > 1);
  const rows = differing.map((field) => element("tr", {}, element("th", { scope: "row", class: "mono" }, oneLine(field)), ...runs.map(({ run }) => element("td", { class: "mono" }, quoted(oneLine(run.about.settings[field] ?? "–"))))));
  const head = element("tr", {}, element("th", { scope: "col" }, "field"), ...runs.map(({ run, shade, label }) => element("th", { scope: "col", title: oneLine(run.name) }, dot(shade), quoted(oneLine(label)))));
  const shown = differing.length ? element("div", { class: "scroll" }, element("table", { class: "differences" }, element("thead", {}, head), element("tbody", {}, ...rows))) : element("p", { class: "faint" }, "Nothing: the same settings everywhere.");
  return element("section", {}, element("h2", {}, "What differs"), shown);
}

function settings({ run, shade }) {
  const { about } = run;
  return element(
    "section", { class: "settings" },
    element("h2", {}, dot(shade), quoted(oneLine(run.name)), element("span", { class: `badge ${about.state}` }, about.state)),
    algorithm(about.algorithm),
    about.command ? element("pre", { class: "command" }, quoted(visible(command(about.command)))) : null,
    attempts(about.attempts),
    fork(about),
    pairs(about.versions),
    element("details", { open: true }, element("summary", {}, "config.toml, resolved"), element("pre", {}, quoted(visible(about.config)))),
  );
}

function algorithm({ name, changes, stages, why }) {
  if (!name) return why ? element("p", { class: "algorithm" }, quoted(oneLine(why))) : null;
  const text = changes.length ? [element("strong", {}, name.toUpperCase()), ", but:"] : ["Exactly ", element("strong", {}, name.toUpperCase()), "."];
  return element(
    "div", { class: "algorithm" },
    element("p", {}, ...text), changes.length ? element("ul", {}, ...changes.map((each) => element("li", {}, quoted(oneLine(each))))) : null,
    element("details", {}, element("summary", {}, "its eleven choices"), element("table", {}, ...stages.map(([stage, choice]) => element("tr", {}, element("th", { scope: "row" }, stage), element("td", { class: "mono" }, quoted(oneLine(choice))))))),
  );
}

/** The command that continues the run from a checkpoint with something changed. */
function fork({ path, checkpoints }) {
  if (!checkpoints?.length) return null;
  const line = (step) => `${command(["proximo", "fork", path, "--at", step])} --algorithm NAME`;
  const shown = element("pre", { class: "command" }, quoted(visible(line(checkpoints.at(-1)))));
  const choose = element("select", { "aria-label": "step to fork at", onchange: (event) => shown.replaceChildren(quoted(visible(line(event.target.value)))) }, ...checkpoints.toReversed().map((step) => element("option", { value: step }, String(step))));
  return element("details", { class: "fork" }, element("summary", {}, "Fork: continue from a checkpoint with something changed"), element("p", {}, "after step ", choose), shown);
}

/** The command line as it would be typed. */
function command(words) {
  const list = Array.isArray(words) ? words.map(String) : [];
  const shown = list.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`));
  return ["proximo", ...shown.slice(1)].join(" ");
}

function attempts(list) {
  if (!Array.isArray(list) || !list.length) return null;
  const rows = list.map((each) => element("tr", {}, ...["number", "started", "from", "ended"].map((name) => element("td", {}, quoted(oneLine(each?.[name] ?? (name === "from" ? "the beginning" : "–")))))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...["attempt", "started", "from", "ended"].map((name) => element("th", {}, name)))), element("tbody", {}, ...rows)));
}

function pairs(values) {
  const text = (value) => (typeof value === "object" ? Object.entries(value).map(([name, each]) => `${name} ${each}`).join(", ") : String(value));
  return element("p", { class: "faint versions" }, ...Object.entries(values ?? {}).map(([name, value]) => element("span", {}, `${oneLine(name)} `, quoted(oneLine(text(value))))));
}
