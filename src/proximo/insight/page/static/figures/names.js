// Short names and colours of runs that are shown together: what all names share is left out, long names lose their
// middle, and runs that differ only in their seed share a colour.

export const COLOURS = 8;
const AROUND = 3; // letters on each side of a difference
const WORDS = /(?:\d+(?:\.\d+)?(?:e-?\d+)?|[^/_\-.\s])+[/_\-.\s]*|[/_\-.\s]+/g; // a number such as 1e-4 is in one word

/** The text with at most this many characters: the middle is left out, since names often differ at their ends. */
export function middle(text, most) {
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const tail = Math.floor((most - 1) / 2);
  return `${letters.slice(0, most - 1 - tail).join("")}…${letters.slice(letters.length - tail).join("")}`;
}

/** A short name for each name, all different: without the words that all begin and end with; of one, without folders. */
export function shortNames(names, most = 28) {
  const whole = [...new Set(names)];
  if (whole.length === 1) return new Map([[whole[0], middle(whole[0].replace(/^.*\/(?=[^/])/su, ""), most)]]);
  const parts = whole.map((name) => name.match(WORDS) ?? [name]);
  const [begin, end] = shared(parts);
  const bare = parts.map((words) => words.slice(begin, words.length - end).join("").replace(/[/_\-.\s]+$/, ""));
  const kept = bare.every(Boolean) && new Set(bare).size === whole.length ? bare : whole;
  for (let room = most; ; room += 8) {
    const short = apart(kept, room);
    if (new Set(short).size === whole.length || kept.every((name) => name.length <= room)) return new Map(whole.map((name, place) => [name, short[place]]));
  }
}

/** Names with at most this many characters; where two would look alike, what is around their difference. */
function apart(names, most) {
  const made = new Map();
  for (const [text, alike] of Map.groupBy(names, (name) => middle(name, most))) {
    const letters = alike.map((name) => Array.from(name));
    const least = Math.min(...letters.map((each) => each.length));
    const same = (of) => { let count = 0; while (count < least && letters.every((each) => of(each, count) === of(letters[0], count))) count++; return Math.max(count - AROUND, 0); };
    const [begin, end] = [same((each, place) => each[place]), same((each, place) => each[each.length - 1 - place])];
    const part = (each) => `${begin ? "…" : ""}${each.slice(begin, each.length - end).join("")}${end ? "…" : ""}`;
    alike.forEach((name, place) => made.set(name, alike.length > 1 ? middle(part(letters[place]), most) : text));
  }
  return names.map((name) => made.get(name));
}

/** How many words all begin with, and end with; one of each is left, and a number keeps the word before it. */
function shared(parts) {
  if (parts.length < 2) return [0, 0];
  const least = Math.min(...parts.map((words) => words.length));
  const count = (word, most) => {
    let number = 0;
    while (number < most && parts.every((words) => word(words, number) === word(parts[0], number))) number++;
    return number;
  };
  let begin = count((words, place) => words[place], least - 1);
  const end = count((words, place) => words[words.length - 1 - place], least - begin - 1);
  if (begin && parts.some((words) => /^[\d.]+$/.test(words.slice(begin, words.length - end).join("")))) begin--;
  return [begin, end];
}

/** The arm of each run by name: runs that differ only in their seed. A fork, or the same seed once more, is its own. */
function armsBy(listed) {
  const [arms, taken] = [new Map(), new Set()];
  for (const { name, arm, seed, fork } of listed.toReversed()) {
    const key = `${arm} ${seed}`;
    arms.set(name, arm && !fork && !taken.has(key) ? arm : `run ${name}`);
    taken.add(key);
  }
  return arms;
}

/** Colour, short name and arm of each selected run. The colour goes by the age of the arm's first run, so that it stays
 * when runs are added; arms shown together differ, a ninth from the first by its `turn`, which is drawn as a dash. */
export function shownRuns(listed, chosen) {
  const arms = armsBy(listed);
  const ages = [...new Set(arms.values())];
  const [shades, turns] = [new Map(), new Map()];
  for (const name of chosen) {
    const arm = arms.get(name);
    if (shades.has(arm)) continue;
    let shade = ages.indexOf(arm) % COLOURS;
    const taken = new Set(shades.values());
    while (taken.size < COLOURS && taken.has(shade)) shade = (shade + 1) % COLOURS;
    turns.set(arm, [...shades.values()].filter((each) => each === shade).length);
    shades.set(arm, shade);
  }
  const short = shortNames(chosen);
  return chosen.map((name) => {
    const arm = arms.get(name);
    return { name, arm, shade: `s${shades.get(arm) + 1}`, turn: turns.get(arm), label: short.get(name) };
  });
}

/** A name for each arm: what the names of its runs begin with, without what all arms share. */
export function armNames(shown) {
  const members = new Map();
  shown.forEach(({ arm, label }) => members.set(arm, [...(members.get(arm) ?? []), label]));
  const names = new Map();
  for (const [arm, labels] of members) {
    const words = labels.map((label) => label.match(WORDS) ?? [label]);
    const same = words[0].findIndex((word, place) => words.some((each) => each[place] !== word));
    const common = same > 0 ? words[0].slice(0, same).join("").replace(/[/_\-.\s]*(seed)?[/_\-.\s]*$/, "") : labels.length > 1 ? "" : labels[0];
    const name = common || (labels.length > 1 ? `mean of ${labels.length}` : labels[0]);
    names.set(arm, [...names.values()].includes(name) ? labels[0] : name);
  }
  const short = shortNames([...names.values()]);
  return new Map([...names].map(([arm, name]) => [arm, short.get(name)]));
}
