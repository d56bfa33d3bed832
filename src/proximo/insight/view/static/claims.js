// The claims of the field, each with what is known of it at the size of the studies; not of the runs on this page.

import { api } from "./asking.js";
import { drawn, element, oneLine, quoted, short } from "./elements.js";

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
  const rows = claims.map((claim) => ({ claim, node: row(claim), text: Object.values({ ...claim, contrasts: "" }).join(" ").toLowerCase() }));
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
    element("p", {}, "What papers on these algorithms, and articles that retell them, claim, and what was found here: with models of about a million parameters, paired seeds and controls. Exact claims are arithmetic. Each has the command that repeats it."),
    element("p", { class: "faint" }, "Dots are differences with their 95 % intervals, divided by what was to count as an effect, which was fixed before the runs. In the right field there is the effect that the line names, in the left one its contrary; the stroke between them is no difference."),
    element("div", { class: "kinds", role: "group", "aria-label": "verdicts" }, ...buttons, find), count,
    element("ol", {}, ...rows.map(({ node }) => node)),
  ];
}

function row(claim) {
  const { number, claim: words, source, verdict, found, command, contrasts, beside } = claim;
  const studies = new Set(contrasts?.map(({ study }) => study));
  const lines = contrasts?.map((each) => contrast(each, studies.size > 1));
  return element(
    "li", { value: number },
    element("p", { class: "claim" }, quoted(words), element("span", { class: "faint" }, " ", quoted(source))),
    element("p", {}, element("strong", { class: tone(kindOf(claim)) }, oneLine(verdict)), ...(lines || !found ? [] : [" · ", quoted(found)])),
    lines ? element("ul", { class: "contrasts" }, ...lines) : null,
    lines && beside ? element("p", {}, quoted(beside)) : null,
    command.length > 1 ? element("p", { class: "mono faint" }, quoted(command)) : null,
  );
}

function contrast({ study, what, verdict, mean, low, high, unit, counts, seeds }, isNamed) {
  const text = `${signed(mean)} ${unit} (${signed(low)} to ${signed(high)}, ${seeds} seeds; ${signed(counts)} counts)`;
  return element("li", {}, interval(mean / counts, [low / counts, high / counts].sort((one, two) => one - two)), element("span", {}, isNamed ? element("span", { class: "faint" }, oneLine(study), ": ") : "", quoted(what), ": ", quoted(text), ", ", element("span", { class: tone(verdict) }, oneLine(verdict))));
}

const [REACH, WIDTH, MIDDLE] = [3, 200, 8]; // what is drawn, in units of what counts; the picture's width and middle, in pixels
const across = (value) => WIDTH / 2 + (Math.max(-REACH, Math.min(REACH, value)) / REACH) * (WIDTH / 2 - 6);

/** A difference and its interval, in units of what counts in the direction of the claim: at 1 and beyond there is an
 * effect, at −1 and beyond the contrary one. What does not fit ends in an arrow. */
function interval(mean, [low, high]) {
  const [left, right] = [across(low), across(high)];
  const arrow = (x, way) => drawn("path", { class: "end", d: `M${x - 5 * way} ${MIDDLE - 4}L${x} ${MIDDLE}L${x - 5 * way} ${MIDDLE + 4}` });
  const says = `${short(mean)} times what counts, ${short(low)} to ${short(high)}`;
  return drawn(
    "svg", { class: "interval", viewBox: `0 0 ${WIDTH} ${2 * MIDDLE}`, role: "img", "aria-label": says },
    drawn("rect", { class: "holds", x: across(1), y: 0, width: WIDTH - across(1), height: 2 * MIDDLE }),
    drawn("rect", { class: "contrary", x: 0, y: 0, width: across(-1), height: 2 * MIDDLE }),
    drawn("line", { class: "none", x1: across(0), x2: across(0), y1: 0, y2: 2 * MIDDLE }),
    drawn("line", { x1: left, x2: right, y1: MIDDLE, y2: MIDDLE }),
    low < -REACH ? arrow(left, -1) : null,
    high > REACH ? arrow(right, 1) : null,
    Math.abs(mean) <= REACH ? drawn("circle", { cx: across(mean), cy: MIDDLE, r: 3.5 }) : null,
  );
}

const signed = (value) => (value > 0 ? "+" : "") + short(value);

const tone = (name) => (GOOD.has(name) ? "good" : BAD.has(name) ? "bad" : "faint");
