// A copy of the page without a server: the answers to its requests are in scripts next to it, loaded when needed.

import { element, oneLine, quoted } from "../elements.js";

/** What the copy holds; null if a server answers. */
export const bundle = globalThis.proximoBundle ?? null;

const [waiting, loaded] = [new Map(), new Map()];
const MOST = 200; // hits of a search
const AROUND = 60; // characters around a hit

if (bundle) {
  bundle.take = (name, value) => waiting.get(name)?.(value);
  document.querySelector("header.top").append(banner());
}

/** The value of a data file. */
function load(name) {
  if (!loaded.has(name)) {
    loaded.set(name, new Promise((done, fail) => {
      waiting.set(name, done);
      const failed = () => fail(new Error(`the file data/${name}.js of this copy is missing`));
      document.head.append(element("script", { src: `data/${name}.js`, onerror: failed }));
    }));
  }
  return loaded.get(name);
}

/** The answer that a server would give; an error says what this copy does not hold. */
export async function fromBundle(path, params = {}) {
  const name = path.replace("/api/", "");
  if (name === "runs") return bundle.listed;
  const run = bundle.runs[params.run];
  if (!Object.hasOwn(bundle.runs, params.run)) throw new Error(`this copy has no run called ${oneLine(params.run)}`);
  const about = await load(run.file);
  if (name === "run" || name === "health" || name === "parting") return about[name];
  if (name === "steps") return steps(run, about, params);
  const own = about.steps?.own;
  const files = run.steps[String(Number(params.step))];
  if (!files) throw new Error(missing(run, params.step));
  if (params.outline) throw new Error("a copy needs no outline");
  if (params.find) return { matches: (await rowsWith(files[own], params.find)).map(({ row }) => row.row) };
  const file = files[params.as ?? own];
  if (!file) throw new Error(`this copy has step ${params.step} under ${Object.keys(files).join(", ")} only`);
  return ofStep(name, await load(file), await load(files[own]), params);
}

function ofStep(name, told, own, { group, row, token, pass, from, all }) {
  if (pass !== undefined && pass !== null && pass !== "" && Number(pass) !== told.step.pass) throw new Error(`this copy has pass ${told.step.pass} of this step only`);
  if (name === "step") return told.step;
  if (name === "lens") {
    if (all) throw new Error("this copy has the run's own algorithm and the five only");
    return own.lens;
  }
  if (name === "group") {
    if (from) throw new Error("the rest of this completion is not in this copy");
    const found = told.groups[String(Number(group))];
    if (!found) throw new Error(`step ${told.step.step} has no group ${oneLine(group)}`);
    return found;
  }
  if (!told.why) return { words: "the reason is not in this copy: the step has too many tokens for that" };
  const [words, turn, other] = told.why.rows[row][token].map((place) => told.why.sentences[place]);
  return { words, ...(turn && { turn }), ...(other && { own: other }) };
}

function missing(run, step) {
  const number = Number(step);
  if (Object.hasOwn(run.damaged, number)) return run.damaged[number];
  const there = Object.keys(run.steps).join(", ");
  return there ? `step ${oneLine(step)} is not in this copy, which has steps ${there}` : "this copy has no rollouts of this run";
}

async function steps(run, about, { problem, find }) {
  if (!about.steps) throw new Error("this copy has no rollouts of this run");
  if (problem) return { found: about.problems[problem] ?? [] };
  if (!find) return about.steps;
  const found = [];
  for (const step of about.steps.steps) {
    const hits = await rowsWith(run.steps[step][about.steps.own], find);
    found.push(...hits.map(({ row, text, place }) => ({
      step, group: row.group, row: row.row, reward: row.reward, before: text.slice(Math.max(place - AROUND, 0), place),
      text: text.slice(place, place + find.length), after: text.slice(place + find.length, place + find.length + AROUND),
    })));
    if (found.length >= MOST) break;
  }
  return { found: found.slice(0, MOST), next: null, steps: about.steps.steps.length };
}

/** Rows of a step whose completion or prompt contains a text, ignoring case. */
async function rowsWith(file, find) {
  const { groups } = await load(file);
  const wanted = find.toLowerCase();
  return Object.values(groups).flatMap((group) => group.rows.flatMap((row) => {
    const texts = [row.pieces.join(""), group.prompt];
    const text = texts.find((each) => each.toLowerCase().includes(wanted));
    return text === undefined ? [] : [{ row, text, place: text.toLowerCase().indexOf(wanted) }];
  }));
}

/** A file's rows, all at once. */
export async function rowsInBundle(run, file, from) {
  const lines = from ? [] : (await load(bundle.runs[run].file)).rows[file];
  return { from, next: from || 1, size: from || 1, lines };
}

/** What this copy is, and which steps it has. */
function banner() {
  const line = ([name, { steps: there, of }]) => {
    const some = Object.keys(there);
    const words = !of.length ? "no rollouts were stored" : `rollouts of ${some.length} of ${of.length} steps: ${some.join(", ") || "none"}`;
    return element("li", {}, quoted(oneLine(name)), `: ${words}`);
  };
  return element("details", { class: "copy" }, element("summary", {}, "copy"),
    element("div", {}, element("p", {}, `This page is a copy, made on ${oneLine(bundle.made)}: it does not follow the runs. It has their curves, findings and settings, and of their rollouts:`),
      element("ul", {}, ...Object.entries(bundle.runs).map(line))));
}
