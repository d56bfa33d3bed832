// The values of all lines under the cursor, the highest first.

import { element, known, oneLine } from "../elements.js";
import { dot } from "./shapes.js";

const MOST = 24;

/** Fill the box next to the cursor; `entries` are [line, text, value]. */
export function fillReadout(box, entries, title, left, width) {
  const shown = entries.filter(([, , value]) => known(value)).sort((one, other) => other[2] - one[2]).slice(0, MOST);
  const rows = shown.map(([line, text]) => element("tr", { class: line.isMean ? "mean" : "" }, element("td", {}, dot(line.shade)), element("td", {}, element("bdi", {}, oneLine(line.label))), element("td", { class: "number" }, text)));
  box.replaceChildren(element("p", {}, title), element("table", {}, ...rows));
  const isLeft = left > width / 2;
  box.style.left = isLeft ? "auto" : `${left + 12}px`;
  box.style.right = isLeft ? `${width - left + 12}px` : "auto";
}
