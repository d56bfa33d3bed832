// Where forks part from their parents: the first update and the first draw that differ, with links to the reader.

import { element, oneLine, quoted, short } from "../elements.js";
import { dot } from "./shapes.js";

/** A line for each shown fork whose parent is among the runs. */
export function partings(runs) {
  return runs.filter(({ run }) => run.parting).map(({ run, shade }) => {
    const { parent, at, until, update, metrics, draws } = run.parting;
    const names = [dot(shade), quoted(oneLine(run.name), { class: "name" }), ` forks from `, quoted(oneLine(parent), { class: "name" }), ` after step ${at}. `];
    const numbers = update === null ? (until > at ? `All numbers are the same up to step ${until}. ` : "No step after it is done in both yet. ") : element("span", { title: metrics.map(oneLine).join(", ") }, `Step ${update} is the first whose numbers differ. `);
    return element("p", { class: "parting" }, ...names, numbers, ...(draws ? drawn(run, parent, draws, at) : update === null ? [] : [`Draws are the same up to step ${until}.`]));
  });
}

function drawn(run, parent, draws, at) {
  const same = draws.step > at + 1 ? `Draws are the same up to step ${draws.step - 1}. ` : "";
  const counts = `${same}Step ${draws.step} has ${draws.same_prompts} of ${draws.prompts} prompts in common, and to these ${draws.same} of ${draws.completions} completions. `;
  if (!draws.problem) return [counts];
  return [counts, "First other draw, after ", element("q", { class: "mono" }, quoted(oneLine(`${draws.prompt}${draws.before}`.slice(-40)))), ": ", token(parent, draws, draws.theirs), " in the parent, ", token(run.name, draws, draws.ours), " here."];
}

/** A drawn token as a link to its place in the reader. */
function token(run, draws, found) {
  if (!found) return "the end";
  const place = new URLSearchParams({ run, step: draws.step, group: found.group, row: found.row, token: draws.token });
  return element("a", { href: `#${place}`, class: "mono", title: `log-prob ${short(found.logprob)}: open in the reader` }, quoted(oneLine(found.text) || "␣"));
}
