// The keys of the page, in a dialog that ? opens.

import { element } from "../elements.js";

const KEYS = [
  ["1 to 6", "the pages"], ["x", "next horizontal axis: step, tokens, time"], ["s", "moving mean: automatic or off"], ["l", "logarithmic vertical axis, where all values are above 0"],
  ["+  −  Esc", "zoom in, zoom out, the whole run"], ["Tab", "to the runs, the charts, the tables"], ["↑ ↓ Home End", "move in the list of runs; on a chart, to the next chart"],
  ["Enter, Space", "in the list: show only this run; its box: show it with the others"], ["← →", "on a chart: move the cursor of all charts"], ["Enter", "on a chart: open the step's rollouts"], ["?", "this list"],
];

/** Open the dialog; it closes with Esc or its button. */
export function openHelp() {
  if (document.querySelector("dialog[open]")) return;
  const rows = KEYS.map(([key, what]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, what)));
  const close = element("button", { type: "button", onclick: () => dialog.close() }, "close");
  const dialog = element("dialog", { class: "keys", "aria-label": "keys", onclose: () => dialog.remove() }, element("h2", {}, "Keys"), element("table", {}, element("tbody", {}, ...rows)), close);
  document.body.append(dialog);
  dialog.showModal();
}
