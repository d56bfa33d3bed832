// Findings and events: findings first, each with its remedy and a link to the rollouts.

import { element, known, oneLine, quoted, visible } from "./elements.js";
import { dot } from "./overview.js";

const ORDER = ["failing", "warning"];
const KINDS = { resumed: "restart", skipped_update: "skip", empty_step: "skip", damaged_checkpoint: "fault", log_failed: "fault", remove_failed: "fault", unscored: "fault", changed: "restart", other_software: "restart" };

/** Link to a step's rollouts. */
function stepLink(run, step, show, text) {
  const hash = new URLSearchParams({ run, step: String(step), ...(show ? { show } : {}) });
  return element("a", { href: `#${hash}` }, text);
}

export function showEvents(main, runs) {
  const found = runs.flatMap(([run, shade]) => run.findings.map((finding) => ({ run, shade, ...finding })));
  found.sort((one, other) => ORDER.indexOf(one.severity) - ORDER.indexOf(other.severity) || one.step - other.step);
  const events = runs.flatMap(([run, shade]) => run.events.filter((event) => event.kind !== "finding").map((event) => ({ run, shade, ...event })));
  const isMany = runs.length > 1;
  main.replaceChildren(
    element("section", { class: "findings" }, element("h2", {}, "Findings"), ...(found.length ? found.map((each) => finding(each, isMany)) : [element("p", { class: "faint" }, calm(runs))])),
    element("section", { class: "events" }, element("h2", {}, "Events"), events.length ? eventTable(events, isMany) : element("p", { class: "faint" }, "No resumes, skipped updates or errors.")),
  );
}

function calm(runs) {
  if (!runs.every(([run]) => run.isDiagnosed)) return "…";
  return runs.some(([run]) => run.trained.length) ? "The rules find nothing wrong." : "No steps yet.";
}

function finding({ run, shade, rule, severity, step, message, remedy, show, over }, isMany) {
  const kind = severity === "failing" ? "bad" : "warn";
  return element(
    "article", { class: `finding ${kind}`, "data-rule": rule },
    element("p", { class: "head" }, element("span", { class: `badge ${kind}` }, oneLine(severity ?? "")), element("strong", {}, quoted(oneLine(rule ?? "")).textContent.replaceAll("-", " ")),
      isMany ? element("span", { class: "faint" }, dot(shade), quoted(oneLine(run.name))) : null,
      known(step) && step >= 0 ? element("span", { class: "faint" }, `first at step ${step}${known(over) ? `, over after step ${over}` : ""}`) : null),
    element("p", {}, quoted(message ?? "")),
    remedy ? element("p", { class: "remedy" }, element("b", {}, "First: "), quoted(remedy)) : null,
    known(step) && step > 0 && run.about?.rollouts ? element("p", {}, stepLink(run.name, step, show, show ? `the rollouts of step ${step} that show it` : `the rollouts of step ${step}`)) : null,
  );
}

function eventTable(events, isMany) {
  const rows = events.toReversed().slice(0, 500).map(({ run, shade, step, attempt, kind, message }) =>
    element(
      "tr", { class: KINDS[kind] ?? "" },
      isMany ? element("td", {}, dot(shade), quoted(oneLine(run.name))) : null,
      element("td", { class: "number" }, known(step) && step > 0 && run.about?.rollouts ? stepLink(run.name, step, null, String(step)) : step === 0 ? "start" : oneLine(step ?? "")),
      element("td", { class: "number" }, oneLine(attempt ?? "")),
      element("td", {}, quoted(oneLine(kind ?? "")).textContent.replaceAll("_", " ")),
      element("td", { class: "message" }, quoted(visible(message ?? ""))),
    ));
  const heads = [...(isMany ? ["run"] : []), "step", "attempt", "kind", "message"];
  const more = events.length > rows.length ? element("p", { class: "faint" }, `The last ${rows.length} of ${events.length}.`) : null;
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((name) => element("th", { class: name === "step" || name === "attempt" ? "number" : "" }, name)))), element("tbody", {}, ...rows)), more ?? "");
}
