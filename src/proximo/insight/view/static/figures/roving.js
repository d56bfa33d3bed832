// A list that is one tab stop: arrow keys, Home and End move the focus within it.

const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };

/** Make the elements that match one tab stop; call it again when they were replaced. */
export function rove(parent, selector) {
  const all = () => [...parent.querySelectorAll(selector)].filter((each) => !each.closest("[hidden]"));
  const items = all();
  const current = items.find((each) => each === document.activeElement || each.getAttribute("aria-pressed") === "true" || each.closest(".chosen")) ?? items[0];
  items.forEach((each) => (each.tabIndex = each === current ? 0 : -1));
  if (parent.dataset.roves) return;
  parent.dataset.roves = selector;
  parent.addEventListener("keydown", (event) => {
    if (event.defaultPrevented) return;
    const [there, place] = [all(), all().indexOf(document.activeElement)];
    const next = { Home: 0, End: there.length - 1 }[event.key] ?? (event.key in MOVES && place >= 0 ? place + MOVES[event.key] : -1);
    if (place < 0 || !there[next]) return;
    there.forEach((each) => (each.tabIndex = -1));
    there[next].tabIndex = 0;
    there[next].focus();
    event.preventDefault();
    event.stopPropagation();
  });
}
