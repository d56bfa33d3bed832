// The shape that goes with each colour, so that nobody needs to see colours: on lines, in legends and in lists.

import { drawn, element } from "../elements.js";

const around = (corners, turn = 0, inner = 1) =>
  Array.from({ length: corners }, (_, place) => {
    const [angle, size] = [((place + turn) / corners) * 2 * Math.PI - Math.PI / 2, place % 2 ? inner : 1];
    return [size * Math.cos(angle), size * Math.sin(angle)];
  });
const SHAPES = [around(16), around(4, 0.5), around(3), around(4), around(3, 0.5), around(8, 0, 0.38), around(10, 0, 0.45), around(6)];

/** The shape of a colour named s1 to s8, as corners around 0. */
export const corners = (shade) => SHAPES[(Number(shade.slice(1)) - 1) % SHAPES.length] ?? SHAPES[0];

/** The mark of a run in text. */
export function dot(shade) {
  const points = corners(shade).map(([x, y]) => `${(5 + 4.6 * x).toFixed(2)},${(5 + 4.6 * y).toFixed(2)}`).join(" ");
  const made = element("i", { class: "dot", "data-shade": shade }, drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, drawn("polygon", { points })));
  made.style.color = `var(--${shade})`;
  return made;
}

/** Draw it on a canvas. */
export function mark(ctx, shade, fill, x, y, size) {
  ctx.fillStyle = fill;
  ctx.beginPath();
  corners(shade).forEach(([dx, dy], place) => ctx[place ? "lineTo" : "moveTo"](x + size * dx, y + size * dy));
  ctx.closePath();
  ctx.fill();
}
