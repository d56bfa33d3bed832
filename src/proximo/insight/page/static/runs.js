// The list of runs, with their progress and which are shown together. Arrow keys move in it; it is one tab stop.

import { withUnit } from "./charts.js";
import { element, known, oneLine, quoted } from "./elements.js";
import { middle, shortNames } from "./figures/names.js";
import { dot } from "./figures/shapes.js";
import { rove } from "./figures/roving.js";

const MANY = 12;
const LETTERS = 17;

/** `go` changes the address, which names the runs that are shown. */
export class RunList {
  constructor(aside, go) {
    Object.assign(this, { go, shown: null });
    this.filter = element("input", { type: "search", placeholder: "filter", "aria-label": "filter runs", oninput: () => this.sift() });
    this.root = element("p", { class: "faint root" });
    this.list = element("ul", { "aria-label": "runs; arrow keys move" });
    this.fold = element("button", { type: "button", class: "fold", "aria-expanded": "false", onclick: () => this.unfold(this.fold.getAttribute("aria-expanded") !== "true") });
    aside.replaceChildren(this.fold, element("div", { class: "runlist" }, this.root, this.filter, this.list));
    this.unfold(false);
    aside.addEventListener("keydown", ({ key }) => key === "Escape" && this.unfold(false));
    rove(this.list, ".name");
  }

  /** On a phone the list is folded; the focus goes back to what unfolds it. */
  unfold(isOpen) {
    if (!isOpen && this.list.contains(document.activeElement)) this.fold.focus();
    this.fold.setAttribute("aria-expanded", String(isOpen));
    this.fold.parentElement.classList.toggle("open", isOpen);
  }

  /** `shown` are the selected runs, each with its colour. */
  show({ root, runs }, shown) {
    const told = JSON.stringify([root, runs, shown]);
    if (told === this.shown) return;
    this.shown = told;
    this.root.replaceChildren(quoted(oneLine(root)), ` · ${runs.length} run${runs.length === 1 ? "" : "s"}`);
    const few = shown.length > 2 ? [] : shown.flatMap(({ shade, label }) => [dot(shade), quoted(middle(oneLine(label), 16))]);
    this.fold.replaceChildren(...(few.length ? few : [...new Set(shown.map(({ shade }) => shade))].map(dot)), few.length ? "" : shown.length ? `${shown.length} runs` : "select a run", element("span", { class: "faint" }, `of ${runs.length}`));
    this.filter.hidden = runs.length <= MANY;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const short = namesIn(runs);
    this.list.replaceChildren(...runs.flatMap((run, place) => [folder(run, runs[place - 1]), this.item(run, short.get(run.name), shown)].filter(Boolean)));
    if (focused) [...this.list.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
    rove(this.list, ".name");
    this.sift();
  }

  item(run, short, shown) {
    const own = shown.find(({ name }) => name === run.name);
    const others = shown.map(({ name }) => name).filter((name) => name !== run.name);
    const label = oneLine(run.name);
    const box = element("input", {
      type: "checkbox", title: "show together with the others", "aria-label": `show ${label}`, "data-key": `box ${run.name}`,
      onchange: () => this.go({ run: own ? others : [...others, run.name], step: null }),
    });
    box.checked = Boolean(own);
    if (own) box.style.accentColor = `var(--${own.shade})`;
    const only = element("button", { type: "button", class: "name", title: `show only ${label}`, "data-key": `only ${run.name}`, onclick: () => (this.unfold(false), this.go({ run: [run.name], step: null })) }, own ? dot(own.shade) : null, quoted(oneLine(short)));
    const far = [run.stage ?? run.algorithm, known(run.steps) ? `${run.step ?? 0} of ${run.steps}` : known(run.step) ? `${run.step} step${run.step === 1 ? "" : "s"}` : null, run.fork && `from ${oneLine(run.fork.run)} at ${run.fork.step}`, run.error && oneLine(run.error)];
    return element(
      "li", { class: `run ${run.state}${own ? " chosen" : ""}`, "data-run": run.name },
      element("label", { class: "tick" }, box), only, lastValue(run),
      element("span", { class: "about", title: far.filter(Boolean).join(" · ") }, element("i", { class: `state ${run.state}`, title: run.state }), [run.state, ...far].filter(Boolean).join(" · ")), bar(run),
    );
  }

  sift() {
    const text = this.filter.value.toLowerCase();
    let head = null;
    for (const each of this.list.children) {
      if (each.className === "folder") {
        (head = each).hidden = text !== "";
        continue;
      }
      each.hidden = text !== "" && !each.dataset.run.toLowerCase().includes(text);
      if (!each.hidden && head) head.hidden = false;
    }
  }
}

const folderOf = (run) => run.name.slice(0, run.name.lastIndexOf("/") + 1);

/** A heading where the runs of another folder begin. */
function folder(run, before) {
  const own = folderOf(run);
  return own === (before ? folderOf(before) : "") ? null : element("li", { class: "folder", title: oneLine(own) }, quoted(middle(oneLine(own || "./"), 34)));
}

/** Names within their folders; long ones without what they share with the others in it. */
function namesIn(runs) {
  const found = new Map();
  for (const inside of Map.groupBy(runs, folderOf).values()) {
    const names = inside.map((run) => run.name.slice(folderOf(run).length));
    const isLong = names.some((name) => name.length > LETTERS);
    const short = isLong ? shortNames(names, LETTERS) : new Map(names.map((name) => [name, name]));
    inside.forEach((run, place) => found.set(run.name, short.get(names[place])));
  }
  return found;
}

/** The value beside a run's name: what its kind of training is judged by. */
function lastValue(run) {
  const [name, value, unit, title] = run.stage ? ["loss", run.held_out_loss, undefined, "held-out loss"] : ["score", run.outcome, run.is_share ? "share" : undefined, "task score of the last step"];
  return element("span", { class: "last", title }, ...(known(value) ? [element("span", { class: "faint" }, `${name} `), withUnit(value, unit)] : []));
}

/** Progress bar of an unfinished run. */
function bar(run) {
  if (run.state !== "running" || !(run.steps > 0)) return null;
  const done = element("i");
  done.style.width = `${Math.min(100, (100 * (run.step ?? 0)) / run.steps)}%`;
  return element("span", { class: "bar" }, done);
}
