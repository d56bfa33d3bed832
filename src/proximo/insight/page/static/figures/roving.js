// A list that is one tab stop: arrow keys, Home and End move the focus within it.

const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };

/** Make the elements that match one tab stop; call it again when they were replaced. In a list with lines (a selector),
 * up and down lead to the same place of the line above or below. */
export function rove(parent, selector, line = null) {
  const all = () => [...parent.querySelectorAll(selector)].filter((each) => !each.closest("[hidden]"));
  const stop = (current, items) => items.forEach((each) => (each.tabIndex = each === current ? 0 : -1));
  const items = all();
  const isMarked = (each) => each.getAttribute("aria-pressed") === "true" || each.hasAttribute("aria-current") || each.closest(".chosen");
  stop(items.find((each) => each === document.activeElement) ?? items.find(isMarked) ?? items[0], items);
  if (parent.dataset.roves) return;
  parent.dataset.roves = selector;
  parent.addEventListener("focusin", ({ target }) => target.matches(selector) && stop(target, all()));
  parent.addEventListener("keydown", (event) => {
    if (event.defaultPrevented) return;
    const there = all();
    const next = beside(there, there.indexOf(document.activeElement), event.key, line);
    if (!next) return;
    next.focus();
    event.preventDefault();
    event.stopPropagation();
  });
}

/** Where a key leads from a place; undefined for nowhere. */
function beside(there, place, key, line) {
  if (place < 0) return undefined;
  if (key === "Home" || key === "End") return there.at(key === "Home" ? 0 : -1);
  const move = MOVES[key];
  if (!line || !/Up|Down/.test(key)) return move && there[place + move];
  const lines = [...Map.groupBy(there, (each) => each.closest(line)).values()];
  const own = lines.findIndex((inside) => inside.includes(there[place]));
  const [here, other] = [lines[own].indexOf(there[place]), lines[own + move] ?? []];
  return other[Math.min(here, other.length - 1)];
}
