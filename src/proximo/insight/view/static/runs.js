// The list of runs, with their progress and which are shown together.

import { withUnit } from "./charts.js";
import { element, known, oneLine, quoted } from "./elements.js";

const COLOURS = 6;
const MANY = 12;

/** A colour for each selected run, by age, so that it stays when runs are added; runs shown together differ. */
export function coloursOf(listed, chosen) {
  const taken = new Set();
  return chosen.map((name) => {
    const age = listed.length - 1 - listed.findIndex((run) => run.name === name);
    let shade = age % COLOURS;
    while (taken.size < COLOURS && taken.has(shade)) shade = (shade + 1) % COLOURS;
    taken.add(shade);
    return `s${shade + 1}`;
  });
}

/** `go` changes the address, which names the runs that are shown. */
export class RunList {
  constructor(aside, go) {
    Object.assign(this, { go, shown: null });
    this.filter = element("input", { type: "search", placeholder: "filter", "aria-label": "filter runs", oninput: () => this.sift() });
    this.root = element("p", { class: "faint root" });
    this.list = element("ul");
    aside.replaceChildren(this.root, this.filter, this.list);
  }

  show({ root, runs }, chosen, colours) {
    const told = JSON.stringify([root, runs, chosen, colours]);
    if (told === this.shown) return;
    this.shown = told;
    this.root.replaceChildren(quoted(oneLine(root)), ` · ${runs.length} run${runs.length === 1 ? "" : "s"}`);
    this.filter.hidden = runs.length <= MANY;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.list.replaceChildren(...runs.map((run) => this.item(run, chosen, colours)));
    if (focused) [...this.list.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
    this.sift();
  }

  item(run, chosen, colours) {
    const place = chosen.indexOf(run.name);
    const others = chosen.filter((name) => name !== run.name);
    const label = oneLine(run.name);
    const box = element("input", {
      type: "checkbox", title: "show together with the others", "aria-label": `show ${label}`, "data-key": `box ${run.name}`,
      onchange: () => this.go({ run: place < 0 ? [...others, run.name] : others, step: null }),
    });
    box.checked = place >= 0;
    if (place >= 0) box.style.accentColor = `var(--${colours[place]})`;
    const only = element("button", { type: "button", class: "name", title: `show only ${label}`, "data-key": `only ${run.name}`, onclick: () => this.go({ run: [run.name], step: null }) }, quoted(label));
    const far = [run.algorithm, known(run.steps) ? `${run.step ?? 0} of ${run.steps}` : known(run.step) ? `${run.step} steps` : null, run.fork && `from ${oneLine(run.fork.run)} at ${run.fork.step}`, run.error && oneLine(run.error)];
    return element(
      "li", { class: `run ${run.state}${place < 0 ? "" : " chosen"}`, "data-run": run.name },
      box, only, element("span", { class: "last", title: "outcome of the last step" }, known(run.outcome) ? withUnit(run.outcome, "share") : ""),
      element("span", { class: "about", title: far.filter(Boolean).join(" · ") }, element("i", { class: `state ${run.state}`, title: run.state }), [run.state, ...far].filter(Boolean).join(" · ")), bar(run),
    );
  }

  sift() {
    const text = this.filter.value.toLowerCase();
    for (const each of this.list.children) each.hidden = text !== "" && !each.dataset.run.toLowerCase().includes(text);
  }
}

/** Progress bar of an unfinished run. */
function bar(run) {
  if (run.state !== "running" || !(run.steps > 0)) return null;
  const done = element("i");
  done.style.width = `${Math.min(100, (100 * (run.step ?? 0)) / run.steps)}%`;
  return element("span", { class: "bar" }, done);
}
