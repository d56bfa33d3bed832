// Definitions of the charts, in the order of the page. A chart that a run has no values for is
// not drawn. The loss is left out: in reinforcement learning it says nothing about progress.

import { isNumber, seconds } from "./following.js";

const some = (rows, test) => rows.some(test);
const differ = (rows, one, other) => some(rows, (row) => isNumber(row[one]) && Math.abs(row[one] - row[other]) > 1e-9);
const isSoft = (run) => run.about?.algorithm.soft || some(run.trained, (row) => isNumber(row.gate) && Math.abs(1 - row.gate - row.blocked) > 1e-9);
const isAbove = (key) => (run) => some(run.trained, (row) => row[key] > 0);

const inRange = (run) => run.trained.every((row) => !(row.outcome < 0 || row.outcome > 1));
const isScored = (run) => !run.trained.length || some(run.trained, (row) => row.solved_by_all !== null);

/** The unit of task scores: a share where all are from 0 to 1 and the task says which completions are correct. */
export const outcomeUnit = (runs) => (runs.every((run) => inRange(run) && isScored(run)) ? "share" : undefined);
const outcomeNote = (runs) => {
  if (outcomeUnit(runs)) return "mean task score of the sampled completions; 1 is correct";
  return runs.every(isScored) ? "mean score of the sampled completions" : "mean reward, as the task gives no score";
};

/** `of` is a metric or a function of a row; `low` and `high` are the metrics of its band; `when` asks the run;
 * `unit` and `note` may depend on the runs; an `inner` line is drawn where one run is shown alone. */
const line = (label, of, more = {}) => ({ label, of, ...more });

export const PANELS = {
  overview: [
    { id: "outcome", title: "Task score", unit: outcomeUnit, note: outcomeNote, lines: [line("task score", "outcome")] },
    {
      id: "held_out", title: "Held-out accuracy", unit: "share", note: "greedy answers, with 95 % intervals", from: "evaluated", dots: true,
      lines: [line("accuracy", "held_out/accuracy", { low: "held_out/low", high: "held_out/high" })],
    },
    {
      id: "pass", title: "Held-out pass@k", unit: "share", note: "share of problems with a correct answer among k samples", from: "evaluated", dots: true,
      lines: [line("pass@k", "held_out/pass_at_k", { low: "held_out/pass_low", high: "held_out/pass_high" }), line("mean@k", "held_out/mean_at_k")],
    },
    {
      id: "reward", title: "Reward", note: "mean, and the range from the 10th to the 90th percentile", when: (run) => differ(run.trained, "reward", "outcome"),
      lines: [line("reward", "reward", { low: "reward_p10", high: "reward_p90" })], each: { prefix: "rewards/", when: (run) => some(run.trained, (row) => Object.keys(row).filter((key) => key.startsWith("rewards/")).length > 1) },
    },
    { id: "length_penalty", title: "Length penalty", note: "what it adds to the reward, mean over completions", lines: [line("penalty", "length_penalty")] },
    {
      id: "length", title: "Length", unit: "tokens", note: "of completions: mean, and the range from the 10th to the 90th percentile",
      lines: [line("length", "length", { low: "length_p10", high: "length_p90" })], cap: (run) => run.about?.cap,
    },
    { id: "entropy", title: "Entropy", unit: "nats", note: "of the policy, mean over all sampled tokens", lines: [line("entropy", "entropy")] },
    { id: "truncated", title: "Truncated", unit: "share", note: "share of completions cut off at the token limit", lines: [line("truncated", "truncated")] },
    { id: "unscored", title: "Unscored", note: "completions without a reward because a grader failed", lines: [line("unscored", "unscored", { when: isAbove("unscored") })] },
  ],
  stability: [
    {
      id: "held_back", title: "Clipped", unit: "share", note: "share of tokens clipped low and high; for a soft gate, 1 − the gradient kept",
      lines: [
        line("clipped low", "clip_low", { when: (run) => !isSoft(run) }), line("clipped high", "clip_high", { when: (run) => !isSoft(run) }),
        line("soft gate", (row) => (isNumber(row.gate) ? 1 - row.gate : null), { when: isSoft }),
      ],
    },
    { id: "kl", title: "KL to the reference", unit: "nats", note: "mean over tokens", lines: [line("KL", "kl")] },
    {
      id: "kl_whole", title: "KL of whole completions", unit: "nats", note: "to the reference, before the step's updates",
      when: (run) => !some(run.trained, (row) => isNumber(row.kl)), lines: [line("KL", "reference_kl")],
    },
    { id: "ratio_spread", title: "Spread of the ratio", note: "standard deviation; 0 if the policy is the one that sampled", lines: [line("spread", "ratio_spread")] },
    { id: "ratio_max", title: "Largest ratio", floor: 1, note: "of the step's updates", lines: [line("largest", "ratio_max")] },
    {
      id: "dead", title: "No-signal groups", unit: "share", note: "groups whose completions all have the same reward: nothing to learn",
      lines: [
        line("no signal", "dead_groups"), line("all solved", "dead_solved", { inner: true }),
        line("not solved", (row) => (isNumber(row.dead_solved) ? row.dead_groups - row.dead_solved : null), { inner: true }),
      ],
    },
    { id: "ess", title: "Effective samples", unit: "share", note: "effective sample size as a share of the tokens, weighted by their ratios", lines: [line("ESS", "ess"), line("of the correction", "correction_ess")] },
    {
      id: "gradient_norm", title: "Gradient norm", note: "before clipping: mean and largest of a step; ▲ an update was skipped",
      lines: [line("mean", "gradient_norm"), line("largest", "gradient_norm_max", { inner: true })], marks: (row) => row.skipped_updates > 0,
    },
    { id: "sampler_gap", title: "Sampler gap", unit: "nats", note: "|Δ log p| between sampler and learner, mean over tokens", lines: [line("gap", "sampler_gap")] },
    { id: "explained", title: "Value model", note: "explained variance of the returns; 1 is perfect, below 0 is worse than a constant", lines: [line("explained variance", "explained_variance")] },
    {
      id: "baseline", title: "Error as a baseline", note: "squared error of the value model, and of the group mean",
      lines: [line("value model", "baseline_error/value"), line("group mean", "baseline_error/group")],
    },
    { id: "routing", title: "Expert overlap", unit: "share", note: "share of experts that sampler and learner both choose", lines: [line("overlap", "routing_overlap")] },
  ],
  performance: [
    { id: "phases", title: "Seconds by phase", unit: "s", from: "timed", stacked: true, lines: [] },
    {
      id: "speed", title: "Tokens per second", note: "generated tokens per second of the whole step, and of its sampling", from: "timed",
      lines: [line("step", (row) => row.tokens / seconds(row)), line("sampling", (row) => row.tokens / row.rollout)],
    },
    { id: "turns", title: "Turns per episode", note: "replies of the policy, and calls of tools", lines: [line("replies", "turns"), line("calls", "calls")] },
    {
      id: "episode", title: "Seconds per episode", unit: "s", note: "from its start to its end: mean and longest of a step; and those in which all waited for environments and tools", from: "timed",
      lines: [line("mean", (row) => row.episode_seconds / row.episode_count), line("longest", "episode_slowest", { inner: true }), line("waiting", "episode_answering", { inner: true })],
    },
    { id: "wasted", title: "Wasted tokens", unit: "share", note: "share of sampled tokens in dropped groups", lines: [line("wasted", "wasted_tokens")] },
    { id: "rounds", title: "Sampling rounds", note: "until there were enough groups to train on", lines: [line("rounds", "rounds", { when: (run) => some(run.trained, (row) => row.rounds > 1) })] },
    { id: "sampled", title: "Tokens per step", unit: "tokens", lines: [line("sampled", "sampled_tokens")] },
  ],
};

/** A chart for every metric, with training and held-out values together: for stages, and for metrics without a panel. */
export function everyPanel(runs) {
  const names = new Set();
  const keys = (rows) => rows.slice(-50).concat(rows.slice(0, 5)).forEach((row) => Object.keys(row).forEach((key) => isNumber(row[key]) && names.add(key)));
  runs.forEach((run) => (keys(run.trained), keys(run.evaluated)));
  names.delete("step");
  const plain = [...new Set([...names].map((name) => name.replace(/^held_out\//, "")))];
  const meaning = (name) => runs.map((run) => run.about?.meanings[name] ?? run.about?.meanings[`held_out/${name}`]).find(Boolean);
  const isOfPairs = (name) => name === "accuracy" && runs.every((run) => !isRun(run));
  const of = (name, prefix = "") => (isOfPairs(name) ? pairsRight(prefix) : `${prefix}${name}`);
  return plain.map((name) => ({
    id: `all:${name}`, title: isOfPairs(name) ? "accuracy of pairs" : name.replaceAll("_", " "), unit: isOfPairs(name) ? "share" : undefined,
    note: runs.some((run) => isNumber(keptStep(run, name))) ? ["▲ the step whose weights are kept", meaning(name)].filter(Boolean).join("; ") : meaning(name), kept: (run) => keptStep(run, name),
    lines: [...(names.has(name) ? [line("training", of(name))] : []), ...(names.has(`held_out/${name}`) ? [line("held out", of(name, "held_out/"), { from: "evaluated" })] : [])],
  }));
}

/** The step whose weights a stage keeps by this metric: of a finished one as its result says, else the best so far. */
function keptStep(run, name) {
  const { metric, lower, step } = run.about?.best ?? {};
  const rows = metric === name ? run.evaluated.filter((row) => isNumber(row[`held_out/${name}`])) : [];
  const isBetter = (one, other) => (lower ? one < other : one > other);
  const best = rows.reduce((best, row) => (best && !isBetter(row[`held_out/${name}`], best[`held_out/${name}`]) ? best : row), null);
  return best && isNumber(step) ? step : best?.step;
}

/** Share of pairs ranked right; unknown where policy and reference are still the same model, so that all are ties. */
const pairsRight = (prefix) => (row) => (row[`${prefix}accuracy`] === 0 && row[`${prefix}margin`] === 0 ? null : row[`${prefix}accuracy`]);

/** Whether this is a reinforcement-learning run; stages write other metrics. */
export const isRun = (run) => !run.about?.stage && hasScores(run);
const hasScores = (run) => some(run.trained.slice(0, 5), (row) => "outcome" in row || "reward" in row) || !run.trained.length;
