// The search over all steps of a run. The server looks through some steps at a time, so that results appear at once.

import { button } from "./bar.js";
import { element, oneLine, quoted, short } from "../elements.js";

const MOST = 200;

/** Requests of one search, and its results. */
export class Search {
  constructor(ask, go) {
    Object.assign(this, { ask, go, root: element("section", { class: "found", "aria-live": "polite" }) });
    this.key = null;
  }

  /** Search again if what is searched for has changed; null ends it. */
  async show(run, find) {
    const key = find ? JSON.stringify([run, find]) : null;
    if (key === this.key) return;
    this.key = key;
    this.root.replaceChildren();
    if (!key) return;
    const list = element("ol");
    const told = element("p", { class: "faint" }, "searching …");
    this.root.append(told, list);
    let count = 0;
    for (let from = 0; from !== null && count < MOST; ) {
      const answer = await this.ask("/api/steps", { run, find, from });
      if (this.key !== key) return;
      list.append(...answer.found.slice(0, MOST - count).map((hit) => this.line(hit, find)));
      count += answer.found.length;
      from = answer.next;
      const all = answer.steps === 1 ? "1 step" : `${answer.steps} steps`;
      const many = count === 1 ? "1 completion matches" : `${count} completions match`;
      if (count >= MOST) told.textContent = `the first ${MOST} completions that match, of ${all}`;
      else told.textContent = from === null ? `${many} in ${all}` : `${many} · searching step ${from} of ${all} …`;
    }
  }

  line({ step, group, row, reward, before, text, after }, find) {
    const open = () => this.go({ step, group, row, token: 0, pass: null, all: null, find });
    return element("li", {},
      button(`step ${step} · group ${group}`, { onclick: open }),
      element("span", { class: "faint" }, ` reward ${short(reward)} `),
      element("bdi", { class: "mono" }, quoted(oneLine(before)), element("mark", {}, quoted(oneLine(text))), quoted(oneLine(after))));
  }
}
