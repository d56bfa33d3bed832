// Copies and downloads of what is shown: text, rows as JSON lines, and a picture.

import { drawn } from "../elements.js";

const MARGIN = 12;
const MOST = 40_000; // characters of a picture

/** Rows of an open group, as JSON lines: their texts, values and the selected channel. */
function groupLines(group, siblings, channel) {
  return siblings.map(({ row, values }) => JSON.stringify({
    step: group.step, group: group.group, problem: group.problem, prompt: group.prompt, answer: group.answer,
    row: row.row, sibling: row.sibling, fate: row.fate, reward: row.reward, outcome: row.outcome, parts: row.parts,
    advantage: row.advantage_mean, truncated: row.truncated, tokens: row.size, text: row.pieces.join(""), turns: row.turns,
    pieces: row.pieces, [channel.name]: values ? Array.from(values, (value) => (Number.isNaN(value) ? null : value)) : null,
  }));
}

/** Rows of a step that the filters and the search keep, in the order shown. */
function stepLines(step, groups) {
  const kept = groups.flatMap(({ group, rows, hits }) => rows.filter(({ row }) => hits.has(row)).map((row) => [group, row]));
  return kept.map(([group, row]) => JSON.stringify({ step: step.step, problem: group.problem, prompt: group.prompt, answer: group.answer, ...row }));
}

/** Save what a reader shows: `kind` is copy, jsonl, svg or png. */
export async function save(reader, kind) {
  const { step, shownGroup: group, siblings, channel, list, places } = reader;
  if (!step) throw new Error("there is nothing to save: the step is not shown");
  const name = `step-${step.step}${group ? `-group-${group.group}` : ""}`;
  const root = group ? places.group : places.groups;
  if (kind === "copy") return navigator.clipboard.writeText(group ? groupText(group, siblings) : root.innerText);
  if (kind === "jsonl") return download(`${name}.jsonl`, "application/x-ndjson", `${(group ? groupLines(group, siblings, channel) : stepLines(step, list.groups)).join("\n")}\n`);
  const source = picture(root);
  return kind === "svg" ? download(`${name}.svg`, "image/svg+xml", source) : download(`${name}.png`, "image/png", await pixels(source));
}

/** Prompt and completions as text. */
function groupText(group, siblings) {
  const said = siblings.map(({ row }) => `#${row.sibling}, reward ${row.reward ?? "none"}\n${row.pieces.join("")}`);
  return [group.prompt, ...said].join("\n\n");
}

function download(name, kind, content) {
  const blob = content instanceof Blob ? content : new Blob([content], { type: kind });
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  Object.assign(link, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** What an element shows, as an SVG: boxes and texts where they are on the screen, with their colours. */
function picture(root) {
  const frame = root.getBoundingClientRect();
  const [wide, high] = [Math.ceil(frame.width) + 2 * MARGIN, Math.ceil(frame.height) + 2 * MARGIN];
  const at = ({ left, top }) => [left - frame.left + MARGIN, top - frame.top + MARGIN];
  const paper = getComputedStyle(document.body).backgroundColor;
  const svg = drawn("svg", { xmlns: "http://www.w3.org/2000/svg", width: wide, height: high, viewBox: `0 0 ${wide} ${high}` }, drawn("rect", { width: wide, height: high, fill: paper }));
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, (node) =>
    node instanceof Element && !isShown(node) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  let left = MOST;
  for (let node = walker.currentNode; node && left > 0; node = walker.nextNode()) {
    if (node instanceof SVGElement) drawShape(svg, node, at);
    else if (node instanceof Element) drawBox(svg, node, at);
    else left -= drawText(svg, node, at);
  }
  return new XMLSerializer().serializeToString(svg);
}

const isShown = (node) => !node.hidden && node.checkVisibility?.() !== false && !(node instanceof SVGSVGElement && !node.childElementCount);

function drawBox(svg, node, at) {
  const style = getComputedStyle(node);
  const isBare = style.backgroundColor === "rgba(0, 0, 0, 0)" && (style.borderTopStyle === "none" || style.borderLeftStyle === "none");
  if (isBare && style.outlineStyle === "none") return;
  for (const box of node.getClientRects()) {
    const [x, y] = at(box);
    const isLined = style.borderLeftStyle !== "none" && style.borderTopStyle !== "none";
    svg.append(drawn("rect", {
      x, y, width: box.width, height: box.height, rx: parseFloat(style.borderTopLeftRadius) || 0, fill: style.backgroundColor,
      stroke: isLined ? style.borderTopColor : style.outlineStyle === "none" ? "none" : style.outlineColor,
    }));
  }
}

/** A text node, one line at a time. */
function drawText(svg, node, at) {
  const text = node.data;
  if (!text.trim()) return 0;
  const style = getComputedStyle(node.parentElement);
  const range = document.createRange();
  const lines = [];
  for (let place = 0; place < Math.min(text.length, MOST); place++) {
    range.setStart(node, place);
    range.setEnd(node, place + 1);
    const box = range.getClientRects()[0];
    if (!box?.width) continue;
    const line = lines.at(-1);
    if (line && Math.abs(line.box.top - box.top) < 2) line.text += text[place];
    else lines.push({ box, text: text[place] });
  }
  for (const line of lines) {
    const [x, y] = at(line.box);
    svg.append(drawn("text", {
      x, y: y + line.box.height * 0.78, fill: style.color, opacity: style.opacity, "font-family": style.fontFamily, "font-size": style.fontSize,
      "font-weight": style.fontWeight, "xml:space": "preserve", "text-decoration": style.textDecorationLine === "none" ? null : style.textDecorationLine,
    }, line.text));
  }
  return text.length;
}

/** A small chart, with the colours it has here. */
function drawShape(svg, node, at) {
  if (!(node instanceof SVGSVGElement)) return;
  const box = node.getBoundingClientRect();
  const [x, y] = at(box);
  const copy = drawn("svg", { x, y, width: box.width, height: box.height, viewBox: node.getAttribute("viewBox"), preserveAspectRatio: "none" });
  for (const shape of node.children) {
    const { fill, stroke } = getComputedStyle(shape);
    const made = shape.cloneNode(false);
    made.removeAttribute("class");
    made.setAttribute("fill", fill);
    made.setAttribute("stroke", stroke);
    copy.append(made);
  }
  svg.append(copy);
}

/** The picture as PNG, with two dots for each pixel. */
async function pixels(source) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("the picture is too large for this browser"))), "image/png"));
}
