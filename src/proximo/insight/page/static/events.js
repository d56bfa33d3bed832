// Findings and events: findings first, each with its remedy and a link to the rollouts; then what the rules looked at.

import { element, known, oneLine, quoted, visible } from "./elements.js";
import { dot } from "./figures/shapes.js";

const ORDER = ["failing", "warning"];
const KINDS = { resumed: "restart", skipped_update: "skip", empty_step: "skip", damaged_checkpoint: "fault", log_failed: "fault", remove_failed: "fault", unscored: "fault", changed: "restart", other_software: "restart" };

/** Link to a step's rollouts. */
function stepLink(run, step, show, text) {
  const hash = new URLSearchParams({ run, step: String(step), ...(show ? { show } : {}) });
  return element("a", { href: `#${hash}` }, text);
}

export function showEvents(main, runs) {
  const found = runs.flatMap((shown) => shown.run.findings.map((finding) => ({ ...shown, ...finding })));
  found.sort((one, other) => known(one.over) - known(other.over) || ORDER.indexOf(one.severity) - ORDER.indexOf(other.severity) || one.step - other.step);
  const events = runs.flatMap((shown) => shown.run.events.filter((event) => event.kind !== "finding").map((event) => ({ ...shown, ...event })));
  const isMany = runs.length > 1;
  main.replaceChildren(
    element("section", { class: "findings" }, element("h2", {}, "Findings"), ...(found.length ? found.map((each) => finding(each, isMany)) : [element("p", { class: "faint" }, calm(runs))])),
    element("section", { class: "rules" }, element("h2", {}, "Rules"), ...runs.map((shown) => rules(shown, isMany))),
    element("section", { class: "events" }, element("h2", {}, "Events"), events.length ? eventTable(events, isMany) : element("p", { class: "faint" }, "No resumes, skipped updates or errors.")),
  );
}

function calm(runs) {
  if (!runs.every(({ run }) => run.isDiagnosed)) return "Being checked …";
  return runs.some(({ run }) => run.trained.length) ? "The rules find nothing wrong." : "No steps yet.";
}

const named = ({ run, shade, label }) => element("span", { class: "faint", title: oneLine(run.name) }, dot(shade), quoted(oneLine(label)));

function finding({ run, shade, label, rule, severity, step, message, remedy, show, over }, isMany) {
  const kind = severity === "failing" ? "bad" : "warn";
  return element(
    "article", { class: `finding ${kind}${known(over) ? " over" : ""}`, "data-rule": rule },
    element("p", { class: "head" }, element("span", { class: `badge ${kind}` }, oneLine(severity ?? "")), element("strong", {}, quoted(oneLine(rule ?? "")).textContent.replaceAll("-", " ")),
      isMany ? named({ run, shade, label }) : null,
      known(step) && step >= 0 ? element("span", { class: "faint" }, `first at step ${step}${known(over) ? `, over after step ${over}` : ""}`) : null),
    element("p", {}, quoted(message ?? "")),
    remedy ? element("p", { class: "remedy" }, element("b", {}, "First: "), quoted(remedy)) : null,
    known(step) && step > 0 && run.about?.rollouts ? element("p", {}, stepLink(run.name, step, show, show ? `the rollouts of step ${step} that show it` : `the rollouts of step ${step}`)) : null,
  );
}

/** What each rule of a run says: how many passed, which need more steps, and rows that could not be read. */
function rules(shown, isMany) {
  const { rules: all, unreadable, isDiagnosed } = shown.run;
  const of = (state) => all.filter((rule) => rule.state === state);
  const [passed, waiting, missing] = ["passed", "waiting", "unmeasured"].map(of);
  const name = (rule) => rule.rule.replaceAll("-", " ");
  const line = (kind, text) => element("p", { "data-rules": kind }, text);
  if (!isDiagnosed) return element("div", {}, element("p", { class: "faint" }, "Being checked …"));
  return element(
    "div", { class: "ruled" }, isMany ? element("h3", {}, named(shown)) : null,
    all.length ? null : line("none", "The rules are about reinforcement learning: this run has no rows of it."),
    passed.length ? element("details", {}, element("summary", {}, `${passed.length} of ${all.length} rules passed`), element("ul", {}, ...passed.map((rule) => element("li", {}, element("b", {}, name(rule)), ` would be found if ${rule.when}`)))) : null,
    waiting.length ? line("waiting", `${waiting.length} need more steps: ${waiting.map((rule) => `${name(rule)} (${rule.rows} of ${rule.needs})`).join(", ")}.`) : null,
    missing.length ? line("unmeasured", `${missing.length} without the metric that they read: ${missing.map(name).join(", ")}.`) : null,
    line("rows", rowsRead(unreadable)),
  );
}

function rowsRead(unreadable) {
  const files = Object.entries(unreadable);
  const bad = files.filter(([, found]) => typeof found === "string" || found[0] > 0);
  if (bad.length) return `${bad.map(([file, found]) => (typeof found === "string" ? `${file} cannot be read: ${oneLine(found)}` : `${found[0]} of ${found[1]} rows of ${file} cannot be read`)).join("; ")}.`;
  return files.length ? `Every row of ${files.map(([file, found]) => `${file} (${found[1]})`).join(", ")} could be read.` : "No rows yet.";
}

function eventTable(events, isMany) {
  const rows = events.toReversed().slice(0, 500).map(({ run, shade, label, step, attempt, kind, message }) =>
    element(
      "tr", { class: KINDS[kind] ?? "" },
      isMany ? element("td", {}, named({ run, shade, label })) : null,
      element("td", { class: "number" }, known(step) && step > 0 && run.about?.rollouts ? stepLink(run.name, step, null, String(step)) : step === 0 ? "start" : oneLine(step ?? "")),
      element("td", { class: "number" }, oneLine(attempt ?? "")),
      element("td", {}, quoted(oneLine(kind ?? "")).textContent.replaceAll("_", " ")),
      element("td", { class: "message" }, quoted(visible(message ?? ""))),
    ));
  const heads = [...(isMany ? ["run"] : []), "step", "attempt", "kind", "message"];
  const more = events.length > rows.length ? element("p", { class: "faint" }, `The last ${rows.length} of ${events.length}.`) : null;
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col", class: name === "step" || name === "attempt" ? "number" : "" }, name)));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "events" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)), more ?? "");
}
