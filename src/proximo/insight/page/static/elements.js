// Helpers for elements and texts. Text is only ever set as text, so that what a model wrote cannot become markup.

/** An element with attributes, listeners (`onclick` and the like) and children; a string becomes text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Text of a model or a file, isolated so that it cannot change the writing direction of the text around it. */
export function quoted(text, attributes = {}) {
  return element("bdi", attributes, visible(text));
}

const STEERING = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const HARMLESS = new Set(["\n", "\t", "\u200c", "\u200d"]); // joiners, which many scripts need

/** Invisible characters, and those that change the writing direction, as symbols. */
export function visible(text) {
  return String(text).replace(STEERING, (character) => (HARMLESS.has(character) ? character : symbol(character)));
}

const CONTROLS = (
  "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
).split(" ");

/** A control character by its name, since not every font has symbols for them. */
function symbol(character) {
  const code = character.codePointAt(0);
  return `⟨${CONTROLS[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}⟩`;
}

/** The text in one line. */
export function oneLine(text) {
  return visible(String(text).replace(/\s*\n\s*/g, " ↵ ").replace(/\t/g, " "));
}

export const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** A number with three significant digits; "–" if there is none. */
export function short(value, digits = 3) {
  if (!known(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

/** A number with its sign. */
export function signed(value, digits = 3) {
  return known(value) && value > 0 ? `+${short(value, digits)}` : short(value, digits);
}

/** A ratio near 1 as its distance from 1, which is what a gate bounds. */
export function ratio(value) {
  if (!known(value)) return "–";
  const distance = value - 1;
  if (distance === 0) return "1";
  if (Math.abs(distance) >= 0.01) return short(value, 4);
  return `1 ${distance > 0 ? "+" : "−"} ${short(Math.abs(distance), 2)}`;
}

export function share(value) {
  if (!known(value)) return "–";
  const percent = 100 * value;
  const text = percent > 0 && percent < 0.1 ? "<0.1" : String(Number(percent.toFixed(Math.abs(percent) < 10 ? 1 : 0)));
  return `${text.replace("-", "−")} %`;
}

/** Whether the element is an input field. */
export const isField = (place) => Boolean(place?.closest?.("input, select, textarea"));

/** Replace children and keep the focus. */
export function refill(parent, children) {
  const controls = () => [...parent.querySelectorAll("button, input, select")];
  const place = controls().indexOf(document.activeElement);
  parent.replaceChildren(...children);
  controls()[place]?.focus();
}

/** Debounce: call once, some time after the last request. */
export function calm(milliseconds, action) {
  let waiting;
  return (...values) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => action(...values), milliseconds);
  };
}
