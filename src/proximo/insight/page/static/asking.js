// Requests to the server. The secret is after the # of the printed address, which no request contains; it is kept for
// this address only and sent as a header.

import { bundle, fromBundle, rowsInBundle } from "./bundle/bundle.js";

const KEY = "proximo-token";
const PATIENCE = 120_000; // ms: a connection can be lost without a word (a tunnel, a laptop that slept), and polling would wait for ever
let token = null;

/** Take the secret out of the address, so that links to this page do not hold it. */
export function takeToken() {
  if (bundle) return;
  const hash = new URLSearchParams(location.hash.slice(1));
  const all = hash.getAll("token");
  const isPlace = (value) => /^\d{1,9}$/.test(value); // the reader's: index of a token
  const given = all.find((value) => !isPlace(value));
  if (given === undefined) {
    token ??= stored(() => localStorage.getItem(KEY));
    return;
  }
  token = given;
  stored(() => localStorage.setItem(KEY, given));
  hash.delete("token");
  all.filter(isPlace).forEach((value) => hash.append("token", value));
  history.replaceState(null, "", `#${hash}`);
}

/** The browser may refuse to store anything. */
function stored(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, params) {
  const given = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given);
  let response;
  try {
    response = await fetch(`${path.startsWith("/") ? "" : "/api/"}${path}?${query}`, { headers: { "X-Proximo-Token": token ?? "" }, signal: AbortSignal.timeout(PATIENCE) });
  } catch {
    throw new Refused(0, "the server does not answer: is `proximo view` still running?");
  }
  if (response.ok) return response;
  const reason = await response.json().catch(() => ({}));
  throw new Refused(response.status, reason.error ?? `the server answered ${response.status}`);
}

/** The response of an address of /api; in a copy without a server, from its files. */
export async function api(path, params) {
  return bundle ? fromBundle(path, params) : (await ask(path, params)).json();
}

/** New rows of a run's file: where they begin and end, the size of the file, and the rows, parsed on demand. */
export async function rowsFrom(run, file, from) {
  const { lines, ...head } = bundle ? await rowsInBundle(run, file, from) : await linesFrom(run, file, from);
  return { ...head, rows: () => lines.map(row).filter((each) => each !== null) };
}

async function linesFrom(run, file, from) {
  const [head, ...lines] = (await (await ask("rows", { run, file, from })).text()).split("\n");
  return { ...JSON.parse(head), lines };
}

/** Null for a damaged row, or one with an impossible step. */
function row(line) {
  try {
    const made = line ? JSON.parse(line) : null;
    return typeof made === "object" && Number.isSafeInteger(made?.step) ? made : null;
  } catch {
    return null;
  }
}
