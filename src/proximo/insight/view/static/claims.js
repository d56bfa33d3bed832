// The claims of the field, each with what is known of it at the size of the studies; not of the runs on this page.

import { api } from "./asking.js";
import { element, oneLine, quoted } from "./elements.js";

const GOOD = new Set(["holds here", "exact"]);
const BAD = new Set(["does not hold here", "contrary", "exactly wrong"]);
const ORDER = ["holds here", "does not hold here", "contrary", "exact", "exactly wrong", "not detectable at this size", "no verdict"]; // others last
let asked = null; // once: they come with the program

export function showClaims(main) {
  const place = element("section", { class: "claims" }, element("h2", {}, "Claims of the field"));
  main.replaceChildren(place);
  asked ??= api("claims").catch((error) => ((asked = null), Promise.reject(error)));
  asked.then(({ claims }) => place.append(...listed(claims)), (error) => place.append(element("p", {}, oneLine(error.message))));
}

const placeOf = (kind) => (ORDER.includes(kind) ? ORDER.indexOf(kind) : ORDER.length);
const kindOf = ({ verdict }) => verdict.split(":")[0];

function listed(claims) {
  if (!claims.length) return [element("p", { class: "faint" }, "They come with `proximo view`; this page was started without them.")];
  const rows = claims.map((claim) => ({ claim, node: row(claim), text: Object.values(claim).join(" ").toLowerCase() }));
  const count = element("p", { class: "faint", role: "status" });
  const find = element("input", { type: "search", placeholder: "find", "aria-label": "find claims", oninput: () => sift() });
  let kind = null;
  const kinds = [...new Set(claims.map(kindOf))].map((name) => [name, claims.filter((claim) => kindOf(claim) === name).length]).sort(([one], [two]) => placeOf(one) - placeOf(two));
  const buttons = kinds.map(([name, number]) => element("button", { type: "button", "aria-pressed": "false", "data-kind": name, onclick: () => ((kind = kind === name ? null : name), sift()) }, element("span", { class: tone(name) }, name), ` ${number}`));
  function sift() {
    const wanted = find.value.trim().toLowerCase();
    rows.forEach(({ claim, node, text }) => (node.hidden = (kind !== null && kindOf(claim) !== kind) || !text.includes(wanted)));
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.kind === kind)));
    count.textContent = `${rows.filter(({ node }) => !node.hidden).length} of ${rows.length} claims`;
  }
  sift();
  return [
    element("p", {}, "What papers on these algorithms, and articles that retell them, claim, and what was found here: with models of about a million parameters, paired seeds and controls. Exact claims are arithmetic. Each line has the command that repeats it."),
    element("div", { class: "kinds", role: "group", "aria-label": "verdicts" }, ...buttons, find), count,
    element("ol", {}, ...rows.map(({ node }) => node)),
  ];
}

function row(claim) {
  const { number, claim: words, source, verdict, found, command } = claim;
  return element(
    "li", { value: number },
    element("p", { class: "claim" }, quoted(words), element("span", { class: "faint" }, " ", quoted(source))),
    element("p", {}, element("strong", { class: tone(kindOf(claim)) }, oneLine(verdict)), found ? " · " : "", quoted(found)),
    command.length > 1 ? element("p", { class: "mono faint" }, quoted(command)) : null,
  );
}

const tone = (name) => (GOOD.has(name) ? "good" : BAD.has(name) ? "bad" : "faint");
