// What a step is made of, and the colour of each part: the same in every figure.

export const KINDS = {
  sample: ["s1", "samples completions"], rollout: ["s1", "samples completions"], update: ["s2", "forward and backward passes, and the optimizer"],
  score: ["s5", "passes without gradient"], assemble: ["s5", "builds the batch, with passes without gradient"], push: ["s3", "new weights for the sampler"],
  probe: ["s4", "log-probs are compared with the policy's"], grade: ["s7", "waits for grades"], wait: ["line", "waits for rollouts"],
  evaluate: ["s6", "held-out problems"], save: ["faint", "checkpoint"], write: ["s8", "rollouts"], start: ["faint", "an engine starts"],
};

/** The colour of each of these names; one that is not known here gets a colour that no other has. */
export function shadesOf(names, count) {
  const own = names.map((name) => KINDS[name]?.[0]).filter((shade) => /^s\d$/.test(shade ?? ""));
  const free = Array.from({ length: count }, (_, place) => `s${place + 1}`).filter((shade) => !own.includes(shade));
  return names.map((name) => (own.includes(KINDS[name]?.[0]) ? KINDS[name][0] : free.shift() ?? "faint"));
}
