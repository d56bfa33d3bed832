// Markdown as elements, for texts of a model: nothing of it becomes markup of its own. Links and images stay text, so
// that nothing is fetched and nothing leads away.

import { element, visible } from "../elements.js";
import { math } from "./latex.js";

const MOST = 200_000; // characters; the rest is left out
const LONGEST = 8000; // characters of a paragraph that is searched for marks, so that none takes long
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)|(\*\*|__)(?=\S)([\s\S]+?)(?<=\S)\7|(?<![\w*])([*_])(?=\S)([^*_\n]+?)(?<=\S)\9(?![\w*])|~~(?=\S)([^~]+)~~/g;

/** An element with the text. */
export function markdown(text) {
  const lines = text.slice(0, MOST).split("\n");
  const root = element("div", { class: "markdown" });
  for (let place = 0; place < lines.length; ) place = block(root, lines, place);
  if (text.length > MOST) root.append(element("p", { class: "faint" }, `… ${(text.length - MOST).toLocaleString("en")} more characters`));
  return root;
}

/** Append the block that begins at a line; returns the line after it. */
function block(root, lines, place) {
  const line = lines[place];
  const fence = /^\s{0,3}(```+|~~~+)/.exec(line);
  if (fence) return code(root, lines, place, fence[1]);
  if (!line.trim()) return place + 1;
  const heading = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/.exec(line);
  if (heading) return root.append(element("p", { class: "heading", role: "heading", "aria-level": Math.min(heading[1].length + 2, 6) }, ...inline(heading[2]))), place + 1;
  if (/^\s{0,3}([-*_])\s*(\1\s*){2,}$/.test(line)) return root.append(element("hr")), place + 1;
  if (/^\s{0,3}\|.*\|\s*$/.test(line) && /^\s{0,3}\|[\s:|-]+\|\s*$/.test(lines[place + 1] ?? "")) return table(root, lines, place);
  if (/^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line)) return list(root, lines, place);
  const isOn = (next) => next !== undefined && next.trim() && !/^\s{0,3}(#{1,6}\s|```|~~~|\||>)/.test(next) && !/^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(next);
  const isQuote = /^\s{0,3}>/.test(line);
  let end = place + 1;
  while (isQuote ? /^\s{0,3}>/.test(lines[end] ?? "") : isOn(lines[end])) end += 1;
  const text = lines.slice(place, end).map((each) => (isQuote ? each.replace(/^\s{0,3}>\s?/, "") : each)).join("\n");
  root.append(element(isQuote ? "blockquote" : "p", {}, ...inline(text)));
  return end;
}

function code(root, lines, place, fence) {
  let end = place + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(fence)) end += 1;
  root.append(element("pre", {}, element("code", {}, visible(lines.slice(place + 1, end).join("\n")))));
  return end + 1;
}

function list(root, lines, place) {
  const isOrdered = /^\s*\d/.test(lines[place]);
  const items = [];
  for (; place < lines.length; place++) {
    const found = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(lines[place]);
    if (found) items.push({ depth: Math.min(Math.floor(found[1].length / 2), 5), text: found[3] });
    else if (lines[place].trim() && /^\s{2,}/.test(lines[place])) items.at(-1).text += `\n${lines[place].trim()}`;
    else break;
  }
  const first = Number(/^\s*(\d+)/.exec(lines[place - items.length])?.[1] ?? 1);
  const made = items.map(({ depth, text }) => {
    const item = element("li", {}, ...inline(text));
    item.style.marginLeft = `${depth * 1.4}em`;
    return item;
  });
  root.append(element(isOrdered ? "ol" : "ul", isOrdered && first !== 1 ? { start: first } : {}, ...made));
  return place;
}

function table(root, lines, place) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  let end = place + 2;
  while (/^\s{0,3}\|.*\|\s*$/.test(lines[end] ?? "")) end += 1;
  const body = lines.slice(place + 2, end).map((line) => row(line, "td"));
  root.append(element("table", {}, element("thead", {}, row(lines[place], "th")), element("tbody", {}, ...body)));
  return end;
}

/** Text with code, formulas, bold, italic and struck parts. */
function inline(text, depth = 0) {
  const found = [];
  let end = 0;
  for (const match of depth < 4 && text.length <= LONGEST ? text.matchAll(INLINE) : []) {
    const [all, , codeText, display, bracketed, parenthesised, dollars, , bold, , italic, struck] = match;
    found.push(visible(text.slice(end, match.index)));
    if (codeText !== undefined) found.push(element("code", {}, visible(codeText.trim())));
    else if (display ?? bracketed) found.push(math(display ?? bracketed, true));
    else if (parenthesised ?? dollars) found.push(math(parenthesised ?? dollars, false));
    else if (bold !== undefined) found.push(element("strong", {}, ...inline(bold, depth + 1)));
    else if (italic !== undefined) found.push(element("em", {}, ...inline(italic, depth + 1)));
    else found.push(element("s", {}, ...inline(struck, depth + 1)));
    end = match.index + all.length;
  }
  return [...found, visible(text.slice(end))];
}
