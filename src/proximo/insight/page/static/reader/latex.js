// A small part of LaTeX's formulas as MathML, which browsers draw themselves. What is not known stays as it was written.

import { element, visible } from "../elements.js";

const SPACE = "http://www.w3.org/1998/Math/MathML";
const [LONGEST, DEEPEST] = [4000, 40];
const SYMBOLS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι", kappa: "κ",
  lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", ell: "ℓ",
  emptyset: "∅", degree: "°", circ: "∘", hbar: "ℏ", Re: "ℜ", Im: "ℑ", angle: "∠", triangle: "△",
};
const OPERATORS = {
  cdot: "·", times: "×", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡",
  sim: "∼", cong: "≅", propto: "∝", to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", implies: "⟹", iff: "⟺", mapsto: "↦",
  in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", cup: "∪", cap: "∩", forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨",
  sum: "∑", prod: "∏", int: "∫", partial: "∂", nabla: "∇", ldots: "…", cdots: "⋯", dots: "…", mid: "|", parallel: "∥", perp: "⊥",
  lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", langle: "⟨", rangle: "⟩", "{": "{", "}": "}", "|": "‖", "%": "%", "$": "$", "#": "#", "&": "&",
};
const SPACES = { ",": 0.17, ":": 0.22, ";": 0.28, "!": 0, " ": 0.25, quad: 1, qquad: 2 };
const NAMES = new Set("sin cos tan cot sec csc log ln exp min max gcd lcm lim det arg deg dim mod sup inf arcsin arccos arctan".split(" "));
const LETTERS = { mathbb: "double-struck", mathbf: "bold", mathcal: "script", mathrm: "normal", operatorname: "normal", text: "text", textbf: "text", textit: "text", mbox: "text" };

/** A formula as an element; as text if a part of it is not understood. */
export function math(source, isDisplay) {
  try {
    if (source.length > LONGEST) throw new Error("too long");
    const parser = new Parser(source.trim());
    const made = node("math", ...parser.row());
    if (parser.place < parser.parts.length) throw new Error("more than a formula");
    if (isDisplay) made.setAttribute("display", "block");
    made.setAttribute("title", visible(source.trim()));
    return made;
  } catch {
    return element("code", { class: "formula" }, visible(source.trim()));
  }
}

function node(tag, ...children) {
  const made = document.createElementNS(SPACE, tag);
  made.append(...children);
  return made;
}

const grouped = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", ...nodes));

class Parser {
  constructor(source) {
    this.parts = source.match(/\\[a-zA-Z]+|\\.|\d+(?:[.,]\d+)*|\s+|[^]/g) ?? [];
    this.place = this.depth = 0;
  }

  skip() {
    while (/^\s+$/.test(this.parts[this.place] ?? "x")) this.place += 1;
  }

  peek() {
    this.skip();
    return this.parts[this.place];
  }

  /** Terms up to a closing brace or the end. */
  row() {
    if ((this.depth += 1) > DEEPEST) throw new Error("too deep");
    const found = [];
    for (let part = this.peek(); part !== undefined && part !== "}"; part = this.peek()) found.push(this.scripted());
    this.depth -= 1;
    return found;
  }

  scripted() {
    const body = this.term();
    const scripts = {};
    for (let sign = this.peek(); sign === "^" || sign === "_"; sign = this.peek()) {
      this.place += 1;
      scripts[sign] = this.term();
    }
    if (scripts._ && scripts["^"]) return node("msubsup", body, scripts._, scripts["^"]);
    if (scripts._) return node("msub", body, scripts._);
    return scripts["^"] ? node("msup", body, scripts["^"]) : body;
  }

  term() {
    const part = this.peek();
    if (part === undefined || part === "}" || part === "&") throw new Error("a term is missing");
    this.place += 1;
    if (part === "{") {
      const inside = this.row();
      if (this.peek() !== "}") throw new Error("a brace is missing");
      this.place += 1;
      return grouped(inside);
    }
    if (part.startsWith("\\")) return this.command(part.slice(1));
    if (/^\d/.test(part)) return node("mn", part);
    if (/^\p{L}$/u.test(part)) return node("mi", part);
    return node("mo", visible(part === "-" ? "−" : part));
  }

  command(name) {
    if (["frac", "dfrac", "tfrac"].includes(name)) return node("mfrac", this.term(), this.term());
    if (name === "binom") return node("mrow", node("mo", "("), withLine(node("mfrac", this.term(), this.term()), "0"), node("mo", ")"));
    if (name === "sqrt") return this.root();
    if (["boxed", "fbox"].includes(name)) return boxed(this.term());
    if (["left", "right", "big", "Big", "bigl", "bigr"].includes(name)) return this.fence();
    if (["overline", "bar", "hat", "vec"].includes(name)) return node("mover", this.term(), node("mo", { hat: "^", vec: "→" }[name] ?? "‾"));
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (Object.hasOwn(LETTERS, name)) return this.letters(LETTERS[name]);
    if (Object.hasOwn(SYMBOLS, name)) return node("mi", SYMBOLS[name]);
    if (Object.hasOwn(OPERATORS, name)) return node("mo", OPERATORS[name]);
    if (NAMES.has(name)) return node("mi", name);
    if (["displaystyle", "limits", "nolimits"].includes(name)) return space(0);
    throw new Error(`\\${name} is not known`);
  }

  root() {
    if (this.peek() !== "[") return node("msqrt", this.term());
    const end = this.parts.indexOf("]", this.place);
    if (end < 0) throw new Error("a bracket is missing");
    const index = this.parts.slice(this.place + 1, end).join("");
    this.place = end + 1;
    return node("mroot", this.term(), node("mn", visible(index)));
  }

  fence() {
    const part = this.peek();
    if (part === undefined) throw new Error("a bracket is missing");
    this.place += 1;
    return part === "." ? space(0) : node("mo", visible(part.startsWith("\\") ? (OPERATORS[part.slice(1)] ?? part) : part));
  }

  /** The text in braces, as it is. */
  letters(kind) {
    if (this.peek() !== "{") return this.term();
    const end = this.parts.indexOf("}", this.place);
    if (end < 0) throw new Error("a brace is missing");
    const text = visible(this.parts.slice(this.place + 1, end).join(""));
    this.place = end + 1;
    if (kind === "text") return node("mtext", text);
    const made = node("mi", text);
    if (kind === "normal") made.setAttribute("mathvariant", "normal");
    else made.setAttribute("class", kind);
    return made;
  }
}

function space(width) {
  const made = node("mspace");
  made.setAttribute("width", `${width}em`);
  return made;
}

function withLine(fraction, thickness) {
  fraction.setAttribute("linethickness", thickness);
  return fraction;
}

function boxed(inside) {
  const made = node("mrow", inside);
  made.setAttribute("class", "boxed");
  return made;
}
