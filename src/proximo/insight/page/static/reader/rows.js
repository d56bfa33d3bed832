// The values of a completion's tokens, as the server sends them, and which of them stand out.

import { STATES, channelNamed, look } from "./channels.js";

/** Unpack numbers: 32-bit floats in base 64. */
export function unpacked(text) {
  const bytes = atob(text);
  const numbers = new Uint8Array(bytes.length);
  for (let place = 0; place < bytes.length; place++) numbers[place] = bytes.charCodeAt(place);
  return new Float32Array(numbers.buffer);
}

/** A completion's arrays by name, and its states as words. */
export function unpackedRow(row, states) {
  const arrays = Object.fromEntries(Object.entries(row.arrays).map(([name, text]) => [name, unpacked(text)]));
  arrays.state = Array.from(arrays.state, (code) => states[code]);
  arrays.own = arrays.own && Array.from(arrays.own, (code) => states[code]);
  return { ...row, ...arrays, specials: new Set(row.specials) };
}

/** Append more tokens to a row. */
export function extended(row, more) {
  const joined = { ...row, pieces: row.pieces.concat(more.pieces) };
  for (const name of Object.keys(more)) {
    if (more[name] instanceof Float32Array) {
      joined[name] = new Float32Array(row[name].length + more[name].length);
      joined[name].set(row[name]);
      joined[name].set(more[name], row[name].length);
    }
  }
  joined.state = row.state.concat(more.state);
  joined.own = row.own?.concat(more.own);
  more.specials.forEach((place) => joined.specials.add(place + row.pieces.length));
  return joined;
}

/** Whether a token is blocked only under this algorithm, or only under the run's own. */
export function flip(own, state) {
  const [was, is] = [STATES[own], STATES[state]];
  if (was?.pushes && is?.blocked) return "closes";
  return was?.blocked && is?.pushes ? "opens" : "";
}

/** How far a token stands out in a channel. */
export function weight(channel, row, token, range) {
  const state = row.state[token];
  if (channel.name === "gate" && !STATES[state]?.blocked && !STATES[state]?.pushes) return 0;
  return look(channel, channel.of(row)?.[token], state, range, row.through[token]).amount;
}

/** The tokens that the keys n and p visit: blocked ones in reading order, otherwise those that stand out most. */
export function stops(rows, channel, ranges) {
  const range = ranges[channel.name];
  const places = [];
  const byValue = ["entropy", "logprob", "gap", "kl"].includes(channel.name);
  for (const row of rows) {
    for (let token = 0; token < row.pieces.length; token++) {
      const isBlocked = STATES[row.state[token]]?.blocked;
      const amount = weight(channel, row, token, range);
      if (amount > 0 || isBlocked) places.push({ row: row.row, token, amount, isBlocked });
    }
  }
  const blocked = places.filter((place) => place.isBlocked);
  if (blocked.length && !byValue) return blocked;
  if (!places.length && channel.name !== "gradient") return stops(rows, channelNamed("gradient"), ranges);
  return places.sort((one, other) => other.amount - one.amount).slice(0, 500);
}
