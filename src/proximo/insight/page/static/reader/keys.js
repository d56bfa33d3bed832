// The keyboard of the reader.

import { CHANNELS, hasChannel } from "./channels.js";
import { isField } from "../elements.js";
import { ELSEWHERE, besides } from "./bar.js";
import { nextLens } from "./lens.js";
import { stops } from "./rows.js";

/** Handles a key; false if it has no meaning here. */
export function pressed(reader, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !reader.root.isConnected || !reader.about) return false;
  if (isField(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return false;
  }
  if (event.key === "Escape" && reader.bar.help.open) return !(reader.bar.help.open = false);
  const action = actions(reader)[event.key] ?? channelKey(reader, event.key);
  action?.();
  return Boolean(action);
}

function actions(reader) {
  const [before, after] = besides(reader.about.steps, reader.state.step);
  const always = {
    "<": () => toStep(reader, before),
    ">": () => toStep(reader, after),
    "/": () => reader.bar.find.focus(),
    "?": () => (reader.bar.help.open = !reader.bar.help.open),
  };
  if (!reader.step) return always;
  const withStep = {
    ...always,
    "[": () => toGroup(reader, -1),
    "]": () => toGroup(reader, 1),
    a: () => reader.go({ as: nextLens(reader.about, reader.step.algorithm.name) }),
  };
  if (!reader.siblings.length) return withStep;
  return {
    ...withStep,
    n: () => toStop(reader, 1),
    p: () => toStop(reader, -1),
    w: () => reader.toggleSpaces(),
    m: () => reader.toggleMarkdown(),
    Home: () => toEnd(reader, false),
    End: () => toEnd(reader, true),
    ArrowRight: () => toToken(reader, 1),
    ArrowLeft: () => toToken(reader, -1),
    ArrowDown: () => toSibling(reader, 1),
    ArrowUp: () => toSibling(reader, -1),
    Escape: () => reader.go({ group: null, row: null, token: null }),
  };
}

function channelKey(reader, key) {
  const channel = /^[1-8]$/.test(key) ? CHANNELS[Number(key) - 1] : null;
  return channel && hasChannel(channel, reader.step?.ranges) ? () => reader.go({ channel: channel.name }) : null;
}

function toStep(reader, next) {
  if (next !== undefined) reader.go({ step: next, ...ELSEWHERE });
}

function toGroup(reader, by) {
  const { groups } = reader.list;
  const place = groups.findIndex(({ group }) => String(group.group) === String(reader.state.group));
  const next = groups[place < 0 ? 0 : place + by];
  if (next) reader.go({ group: next.group.group, row: null, token: null });
}

/** Move along the tokens of all completions. */
function toToken(reader, by) {
  const rows = reader.siblings.map(({ row }) => row);
  if (!reader.picked) return reader.go({ row: rows[0].row, token: 0 });
  const place = rows.findIndex(({ row }) => row === reader.picked.row);
  const token = reader.picked.token + by;
  if (token >= 0 && token < rows[place].pieces.length) return reader.go({ row: rows[place].row, token });
  const beside = rows[place + by];
  if (beside) reader.go({ row: beside.row, token: by > 0 ? 0 : beside.pieces.length - 1 });
}

function toEnd(reader, isLast) {
  const rows = reader.siblings.map(({ row }) => row);
  const { row, pieces } = rows.find((each) => each.row === reader.picked?.row) ?? rows[0];
  reader.go({ row, token: isLast ? pieces.length - 1 : 0 });
}

function toSibling(reader, by) {
  const rows = reader.siblings.map(({ row }) => row);
  const place = rows.findIndex(({ row }) => row === reader.picked?.row);
  const next = rows[place < 0 ? 0 : place + by];
  if (next) reader.go({ row: next.row, token: Math.min(reader.picked?.token ?? 0, next.pieces.length - 1) });
}

function toStop(reader, by) {
  const { siblings, channel, step, picked } = reader;
  const all = stops(siblings.map(({ row }) => row), channel, step.ranges);
  if (!all.length) return;
  const place = all.findIndex((each) => each.row === picked?.row && each.token === picked?.token);
  const next = place >= 0 ? all[(place + by + all.length) % all.length] : from(all, siblings, picked, by);
  reader.go({ row: next.row, token: next.token });
}

/** The first stop after, or before, a token that is not a stop; stops by value begin with the largest. */
function from(all, siblings, picked, by) {
  if (!picked || !all[0].isBlocked) return all[by > 0 ? 0 : all.length - 1];
  const order = new Map(siblings.map(({ row }, place) => [row.row, place]));
  const compared = (each) => order.get(each.row) - order.get(picked.row) || each.token - picked.token;
  const found = by > 0 ? all.find((each) => compared(each) > 0) : all.findLast((each) => compared(each) < 0);
  return found ?? all[by > 0 ? 0 : all.length - 1];
}
