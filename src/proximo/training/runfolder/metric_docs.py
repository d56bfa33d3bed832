"""What each number of metrics.jsonl means, for whoever shows it; the guide on health has the same as a table."""

from collections.abc import Mapping

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "What was sampled for the step, dropped groups included": {
        "outcome": "the task's own verdict, mean over the scored completions; at least 1 is right. Where it has none, "
        "the reward",
        "reward": "what is trained on before shaping, mean over the scored completions",
        "reward_p10": "a tenth of the rewards is below this",
        "reward_p90": "a tenth of the rewards is above this",
        "rewards/…": "mean of one part of the reward, weight included",
        "reward_spread": "standard deviation of the reward among siblings, mean over groups: 0 teaches nothing",
        "solved_by_all": "share of the groups whose scored siblings are all right; null where the task has no verdict",
        "solved_by_any": "share of the groups with a right sibling: pass@k of the rollouts",
        "dead_groups": "share of the groups whose siblings all have the same reward, or none",
        "dead_solved": "as many of them, as a share of all groups, as are solved by all siblings",
        "duplicates": "share of the pairs of siblings that are equal to the token, mean over groups: 1 is all the same",
        "duplicates_unsolved": "the same in groups that are not solved by all siblings",
        "length": "tokens of a completion, mean",
        "length_p10": "a tenth of the completions is shorter",
        "length_p90": "a tenth of the completions is longer",
        "entropy": "of the policy at each token that was sampled, in nats, at the sampling temperature",
        "truncated": "share of the completions that were cut at the limit",
        "completions": "how many were sampled",
        "unscored": "how many of them have no reward, because a grader failed",
        "groups": "how many train",
        "rounds": "rounds of sampling, more than one where dropped groups were replaced",
        "carried_groups": "groups left for the next step",
        "sampled_tokens": "tokens sampled",
        "wasted_tokens": "share of them in groups that were dropped",
    },
    "Credit": {
        "dead_rows": "share of the rows that train with an advantage of exactly 0",
        "advantage": "mean over the tokens that train",
        "advantage_std": "their standard deviation",
        "advantage_min": "the least of them",
        "advantage_max": "the largest of them",
    },
    "Updates: over all that were applied, token means": {
        "updates": "how many there were",
        "skipped_updates": "how many of them were not applied: not finite, or a spike",
        "learning_rate": "of the policy in this step",
        "measured": "share of the tokens that the following speak for: dead rows may be left out",
        "loss": "of an update, all terms; its size says nothing about progress",
        "policy_loss": "the policy's term",
        "kl_loss": "the KL's term, coefficient included",
        "extra_loss": "entropy bonus and imitation, coefficients included",
        "gradient_norm": "of the policy before clipping, mean over updates",
        "gradient_norm_max": "the largest",
        "update_entropy": "of the policy at each token that updates ran, in nats: dead rows may be left out",
        "gate": "share of the gradient that the clip or soft gate lets through",
        "blocked": "share of the tokens without gradient",
        "clip_high": "those of them with a positive advantage",
        "clip_low": "those of them with a negative advantage",
        "positive_above": "advantage above 0, ratio above the band",
        "positive_below": "advantage above 0, ratio below the band",
        "negative_above": "advantage below 0, ratio above the band",
        "negative_below": "advantage below 0, ratio below the band",
        "ratio": "new over old probability as the gate sees it",
        "ratio_max": "the largest ratio",
        "ratio_spread": "standard deviation of the ratio",
        "log_ratio": "mean log-ratio of tokens",
        "log_ratio_max": "the largest |log-ratio| that the gate saw",
        "old_kl": "from the old policy to the new, by r − 1 − log r",
        "ess": "share of the tokens that stays in effect when each counts its ratio: 1 is on-policy",
        "selected": "share of the tokens that the selection acts on",
        "sapo_gap": "between a completion's mean soft gate and the gate of its sequence ratio",
    },
    "Distance from the reference": {
        "kl": "per token, in nats, by k3, before each update",
        "reference_kl": "per completion, in nats, before the step's updates",
        "kl_coefficient": "of a KL in the reward",
    },
    "Sampler against learner, before the first update": {
        "sampler_gap": "mean |log w|, w being the learner's probability over the sampler's",
        "mismatch_kl": "from sampler to learner per token, by w − 1 − log w",
        "mismatch_kl_k1": "the same by −log w",
        "mismatch_ratio_mean": "mean w",
        "mismatch_ratio_max": "the largest w",
        "mismatch_ess": "share of the tokens that stays in effect when each counts w times",
        "mismatch_sequence_spread": "standard deviation of log Πw over completions",
        "correction": "mean factor of the correction on a token's loss",
        "correction_max": "the largest",
        "correction_ess": "share of the tokens that stays in effect with it",
        "rejected": "share of the tokens whose factor is 0",
    },
    "Value model": {
        "value": "mean estimate over the tokens that train",
        "value_std": "its standard deviation",
        "return": "what they went on to earn",
        "return_std": "its standard deviation",
        "explained_variance": "1 knows all, 0 no more than a constant",
        "value_error/quarter_1": "root mean squared error in the first quarter of a completion",
        "value_error/quarter_2": "in the second",
        "value_error/quarter_3": "in the third",
        "value_error/quarter_4": "in the last",
        "baseline_error/value": "squared error of the values",
        "baseline_error/group": "squared error of the mean of a completion's siblings",
        "value_loss": "of an update, without its coefficient",
        "value_clip": "share of the tokens beyond the value clip",
        "value_gradient_norm": "of what the value model has beside the policy",
    },
    "Mixtures of experts": {
        "routing_overlap": "share of the replayed experts that the router would choose",
        "routing_changed": "share of the tokens for which at least one is another",
        "router_loss": "of an update: how unevenly experts are used",
    },
    "Held-out problems, in rows of their own": {
        "held_out/accuracy": "share of the greedy answers that are right",
        "held_out/low": "Wilson's 95 % interval around it, from",
        "held_out/high": "to",
        "held_out/outcome": "mean outcome of the greedy answers",
        "held_out/reward": "mean reward of the greedy answers",
        "held_out/parts/…": "mean of one part of it",
        "held_out/problems": "how many were asked",
        "held_out/unscored": "how many answers have no outcome",
        "held_out/k": "completions sampled for each problem for what follows",
        "held_out/mean_at_k": "share of them that are right",
        "held_out/mean_half_width": "half of the 95 % interval around it",
        "held_out/pass_at_k": "share of the problems with a right one",
        "held_out/pass_low": "Wilson's 95 % interval around it, from",
        "held_out/pass_high": "to",
    },
}
"""By section."""

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
    "correction_squared": None,
}
"""Statistics of the loss that go by another name in the metrics, or are counted elsewhere."""
OF_GATES = frozenset({"sapo_gap"})
"""Metrics that are a gate's own statistics."""

_FLAT = {name: words for section in MEANINGS.values() for name, words in section.items()}


def meaning(name: str) -> str | None:
    """Of a metric; None where it is not one of `proximo train`.

    Example: meaning("rewards/format") == "mean of one part of the reward, weight included"
    """
    head, slash, _ = name.rpartition("/")
    return _FLAT.get(name) or _FLAT.get(f"{head}{slash}…")


def is_taken(name: str) -> bool:
    """Whether a run computes a number of this name itself, so that no piece may log another under it."""
    return name in RENAMED or (meaning(name) is not None and name not in OF_GATES)
