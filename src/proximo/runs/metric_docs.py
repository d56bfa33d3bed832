"""Meaning of each metric in metrics.jsonl; docs/guides/health.md has the same text as tables."""

from collections.abc import Mapping

from proximo.config.unions import classes
from proximo.losses.pieces.gates import Gate
from proximo.losses.pieces.protocols import Description

OF_GATES = {name: words for gate in classes(Gate) for name, words in Description.read(gate()).metrics.items()}
"""Metrics that are a gate's own statistics: their meaning stands on the gate."""

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Sampling: everything sampled for the step, dropped groups included": {
        "outcome": "task score: mean over the scored completions; 1 or more counts as correct. Equals the "
        "reward if the task gives no score",
        "reward": "the reward that is trained on, length penalties included, mean over the scored completions; so it "
        "is in the rollouts. A KL in the reward is not in it",
        "reward_unshaped": "the reward before length penalties, of an algorithm that has some; otherwise it is "
        "`reward`",
        "length_penalty": "what length penalties add to the reward, mean over the scored completions; 0 or negative",
        "reward_p10": "10th percentile of the reward",
        "reward_p90": "90th percentile of the reward",
        "rewards/…": "mean of one part of the reward, weight included",
        "reward_spread": "standard deviation of the reward before length penalties within a group, mean over groups; "
        "at 0 nothing is learned",
        "solved_by_all": "share of the groups whose scored completions are all correct; null if the task gives no "
        "score",
        "solved_by_any": "share of the groups with a correct completion: pass@k of the rollouts",
        "solved_by_any/…": "the same for groups of 2, 4, 8, … completions, estimated from all choices of that many",
        "dead_groups": "no-signal groups: share of the groups whose completions all have the same reward before length "
        "penalties, or none is scored",
        "dead_solved": "share of all groups that give no signal because every completion is correct",
        "duplicates": "share of the pairs of completions in a group that are identical token by token, mean over "
        "groups",
        "duplicates_unsolved": "`duplicates` over the groups that are not solved by all completions",
        "length": "mean number of sampled tokens per completion",
        "length_p10": "10th percentile of the length",
        "length_p90": "90th percentile of the length",
        "length_right": "mean length of the correct completions; null if there is none",
        "length_wrong": "mean length of the completions that are not correct",
        "loops": "share of the completions with a phrase of up to 4 tokens at least 4 times in a row",
        "entropy": "entropy of the policy per sampled token, in nats, at the sampling temperature; with engines that "
        "do not say it, the mean of −log p over the sampled tokens, which estimates it",
        "truncated": "share of the completions that were cut off at the token limit",
        "completions": "number of completions sampled",
        "unscored": "number of completions without a reward because a grader failed",
        "groups": "number of groups that are trained on",
        "rounds": "number of sampling rounds, the first of as many prompts as the step has groups and the others of "
        "twice as many; more than 1 if dropped groups were replaced",
        "carried_groups": "number of groups carried over to the next step, as dynamic sampling does with "
        '`training.refill = "same_prompt"`',
        "unneeded_prompts": "number of prompts that dynamic sampling asked for and did not need: the next step begins "
        "with them; absent where there is none",
        "turns": "mean number of replies per episode, of a run with an environment or tools",
        "failed_episodes": "share of the episodes that an environment or a process that failed has ended",
        "repeated_turns": "share of the replies after the first that say the same as the one before",
        "calls": "mean number of calls of tools per episode",
        "failed_calls": "share of the calls that failed, of whatever reason",
        "malformed_calls": "share of the calls that could not be read, or that name no tool",
        "lost_groups": "number of groups that would have taught something and are not trained on; left out if 0",
        "expired_groups": "number of them that were given up because they took too long",
        "longer_lost": "how much longer the completions of dropped ones are than those trained on, as a share",
        "easier_lost": "how much higher their task score is",
        "passed_over": "number of prompts that the curriculum passed over, or that were too long for the model",
        "sampled_tokens": "number of tokens sampled",
        "wasted_tokens": "share of the sampled tokens that are in dropped groups",
    },
    "Sources: of a task with several": {
        "sources/…/outcome": "mean task score of one source's scored completions",
        "sources/…/accuracy": "share of one source's scored completions that are correct",
        "sources/…/completions": "number of completions of one source",
        "sources/…/unscored": "number of them without a reward",
    },
    "Advantages": {
        "dead_rows": "share of the trained rows whose advantage is exactly 0",
        "masked": "share of the sampled tokens of groups to train on that no loss reads; left out if 0",
        "advantage": "mean advantage of the trained tokens",
        "advantage_std": "standard deviation of the advantage",
        "advantage_min": "smallest advantage",
        "advantage_max": "largest advantage",
    },
    "Updates: means over the tokens of all applied updates": {
        "updates": "number of updates in the step, skipped ones included",
        "skipped_updates": "number of updates that were not applied: gradient not finite, or a spike",
        "learning_rate": "learning rate of the policy in this step",
        "schedule/…": "number of a field in this step, by its schedule; of a learning rate before the warm-up",
        "measured": "share of the trained tokens that the update metrics below cover; rows without an advantage may be "
        "left out",
        "loss": "loss of an update, all terms; its size says nothing about progress",
        "policy_loss": "policy term of the loss",
        "kl_loss": "KL term of the loss, coefficient included",
        "extra_loss": "entropy bonus and imitation terms of the loss, coefficients included",
        "ptx_loss": "NLL of the examples that are mixed in (ptx), a mean over their tokens, without its coefficient",
        "gradient_norm": "norm of the policy's gradient before clipping, mean over updates",
        "gradient_norm_max": "largest such norm in the step",
        "update_entropy": "entropy of the policy per token during the updates, in nats; rows without an "
        "advantage may be left out",
        "gate": "gradient kept: share of the gradient that clipping or the soft gate lets through",
        "blocked": "share of the tokens whose gradient is blocked completely",
        "clip_high": "clipped high: share of the tokens that are blocked and have a positive advantage",
        "clip_high/rare": "share that is blocked of the tokens with positive advantage and an old probability below "
        "0.1",
        "clip_high/unlikely": "the same for an old probability from 0.1 to 0.5",
        "clip_high/likely": "the same from 0.5 to 0.9",
        "clip_high/sure": "the same from 0.9",
        "clip_high/old_probability": "mean old probability of the tokens that are blocked and have a positive "
        "advantage; null if there is none",
        "clip_low": "clipped low: share of the tokens that are blocked and have a negative advantage",
        "positive_above": "share of the tokens with positive advantage and a ratio above the clip range",
        "positive_below": "share of the tokens with positive advantage and a ratio below the clip range",
        "negative_above": "share of the tokens with negative advantage and a ratio above the clip range",
        "negative_below": "share of the tokens with negative advantage and a ratio below the clip range",
        "ratio": "new over old probability, as it is clipped",
        "ratio_max": "largest ratio",
        "ratio_spread": "standard deviation of the ratio",
        "ratio_far": "share of the tokens whose ratio is further than 0.5 from 1",
        "log_ratio": "mean log-ratio of a token",
        "log_ratio_max": "largest |log-ratio| that was clipped or weighted",
        "old_kl": "KL from the old policy to the new one per token, estimated by r − 1 − log r",
        "ess": "effective sample size as a share of the tokens, each weighted by its ratio; 1 is on-policy",
        "selected": "share of the tokens that the algorithm's selection picked",
        **OF_GATES,
    },
    "Distance from the reference": {
        "kl": "KL to the reference per token, in nats, by the k3 estimator, measured in each update",
        "reference_kl": "KL to the reference per completion, in nats, before the step's updates",
        "kl_coefficient": "coefficient of the KL penalty in the reward",
        "teacher_kl": "reverse KL to the teacher per sampled token, in nats, before the step's updates",
    },
    "Sampler against learner, measured before the first update": {
        "sampler_gap": "mean |log w|, where w is the learner's probability of a token over the sampler's",
        "mismatch_kl": "KL from sampler to learner per token, estimated by w − 1 − log w",
        "mismatch_kl_k1": "the same KL, estimated by −log w",
        "mismatch_ratio_mean": "mean w",
        "mismatch_ratio_max": "largest w",
        "mismatch_ess": "effective sample size as a share of the tokens, each weighted by w",
        "mismatch_sequence_spread": "standard deviation of log Πw over completions",
        "correction": "mean correction factor on a token's loss",
        "correction_max": "largest correction factor",
        "correction_ess": "effective sample size as a share of the tokens, each weighted by its correction factor",
        "rejected": "share of the tokens whose correction factor is 0",
    },
    "Value model": {
        "value": "mean value estimate of the trained tokens",
        "value_std": "standard deviation of the value estimates",
        "return": "mean return of the trained tokens",
        "return_std": "standard deviation of the returns",
        "explained_variance": "share of the returns' variance that the values explain: 1 is perfect, 0 no better than "
        "a constant",
        "value_error/quarter_1": "root mean squared error of the values in the first quarter of a completion",
        "value_error/quarter_2": "the same in the second quarter",
        "value_error/quarter_3": "the same in the third quarter",
        "value_error/quarter_4": "the same in the last quarter",
        "baseline_error/value": "mean squared error of the values as a baseline",
        "baseline_error/group": "mean squared error of the group mean, without the completion itself, as a baseline",
        "value_loss": "value loss of an update, without its coefficient",
        "value_clip": "share of the tokens whose value change exceeds the value clip",
        "value_gradient_norm": "gradient norm of the value model's own parameters, those not shared with the policy",
    },
    "Mixtures of experts": {
        "routing_overlap": "share of the replayed experts that the router would choose again",
        "routing_changed": "share of the tokens for which the router would choose at least one other expert",
        "routing_drift": "share of the experts chosen before the step's first update that are not chosen after it",
        "routing_drift_tokens": "share of the tokens for which that update changed at least one expert",
        "router_loss": "load-balancing loss of an update: how unevenly experts are used",
    },
    "Metrics of your own": {
        "user/…": "number that a function of `metrics` gives for the step, or a reward function to `log_metric`: the "
        "mean where there is one for each completion; null where it fails or gives none",
    },
    "Held-out problems, in separate rows": {
        "held_out/accuracy": "share of the greedy answers that are correct",
        "held_out/low": "lower end of the accuracy's 95 % interval (Wilson)",
        "held_out/high": "upper end of that interval",
        "held_out/outcome": "mean task score of the greedy answers",
        "held_out/outcome_half_width": "half the width of its 95 % interval, if task scores are not just 1 or 0",
        "held_out/reward": "mean reward of the greedy answers",
        "held_out/parts/…": "mean of one part of that reward",
        "held_out/problems": "number of problems evaluated",
        "held_out/unscored": "number of answers without a task score",
        "held_out/best_step": "step of the evaluation with the best `evaluation.metric` before this one; 0 is before "
        "training",
        "held_out/since_best": "change of the mean task score since that evaluation, over the same problems",
        "held_out/since_best_error": "standard error of that change, of the differences by problem",
        "held_out/…/accuracy": "the same of one source, if the task has several; so are low, high, outcome, problems "
        "and unscored",
        "held_out/k": "number of completions sampled per problem for the metrics below",
        "held_out/mean_at_k": "share of the sampled completions that are correct",
        "held_out/mean_half_width": "half the width of its 95 % interval",
        "held_out/pass_at_k": "share of the problems with a correct completion",
        "held_out/pass_low": "lower end of pass@k's 95 % interval (Wilson)",
        "held_out/pass_high": "upper end of that interval",
    },
}
"""Meaning of each metric, by section."""

STAGES: Mapping[str, str] = {
    "loss": "loss of a step, or of held-out data; of pairs 0.693 is chance (except Ipo)",
    "perplexity": "e to the loss of the held-out data: 1 if every token was certain",
    "accuracy": "share of the pairs in which the preferred completion has the higher score; none has before the first "
    "update of dpo",
    "score_gap": "score of the preferred completion less that of the other, mean over pairs",
    "calibration": "distance of σ(score gap) from the share of pairs ranked right; 0 is best",
    "score_mean": "mean score of all completions",
    "score_std": "standard deviation of the scores",
    "margin": "chosen reward less rejected reward, mean over pairs",
    "chosen_reward": "β · (log π − log π_ref) of the preferred completion",
    "rejected_reward": "β · (log π − log π_ref) of the other completion",
    "chosen_logprob": "log-prob of the preferred completion; of a loss that averages, per token",
    "rejected_logprob": "log-prob of the other completion, which falls as the policy moves away from it; of a loss "
    "that averages, per token",
    "drift": "how much likelier than the reference's the preferred completion is: log π − log π_ref, per token. Below "
    "0 it has become less likely, though it may still win against the other",
    "tokens": "tokens of the step's completions",
    "gradient_norm": "norm of the gradient before clipping",
    "learning_rate": "learning rate of the step",
}
"""Meaning of each metric of a stage: the words of a run's metrics are about sampled completions and problems."""

RENAMED: Mapping[str, str | None] = {
    "entropy": "update_entropy",
    "ref_kl": "kl",
    "blocked_positive": "clip_high",
    "blocked_negative": "clip_low",
    "unscored": None,
    "rows": None,
    "tokens": None,
    "ratio_squared": None,
    "routing_positions": None,
    "routing_equal": None,
    "routing_changed": None,
    "drift_positions": None,
    "drift_experts": None,
    "drift_tokens": None,
    "correction_squared": None,
}
"""Statistics of the loss that go by another name in the metrics, or are counted elsewhere."""

_FLAT = {name: words for section in MEANINGS.values() for name, words in section.items()}


def meaning(name: str) -> str | None:
    """Meaning of a metric; None if `proximo train` does not write it.

    Example: meaning("rewards/format") == "mean of one part of the reward, weight included"
    """
    head, slash, last = name.rpartition("/")
    known = _FLAT.get(name) or _FLAT.get(f"{head}{slash}…")
    if known is not None or head.count("/") != 1:
        return known
    whole = head.partition("/")[0]  # sources/NAME/outcome, held_out/NAME/low
    return _FLAT.get(f"{whole}/…/{last}") or _FLAT.get(f"{whole}/{last}")


def stage_meaning(name: str) -> str | None:
    """Meaning of a metric of sft, dpo or reward-model, in training or held out; None if they do not write it."""
    return STAGES.get(name.removeprefix("held_out/"))


def is_taken(name: str) -> bool:
    """True if a run computes a number of this name itself, so that no piece may log another under it."""
    return name in RENAMED or (meaning(name) is not None and name not in OF_GATES)
