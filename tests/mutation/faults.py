"""Small faults, each of a kind that has been shipped somewhere: a sign, a ddof, a min for a max, a mask left out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    file: str
    """Under src/proximo/maths."""
    right: str
    """Must occur exactly once in the file."""
    wrong: str
    what: str


FAULTS = (
    Fault("gates.py", "gain = torch.minimum(ratio", "gain = torch.maximum(ratio", "clip: max for min"),
    Fault("gates.py", "return 1 - self.low, 1 + self.high\n\n    def __call__(\n        self,\n        log_ratio: Float[Tensor, \"B T\"],\n        logprobs: Float[Tensor, \"B T\"],\n        advantages: Float[Tensor, \"B T\"],\n        mask: Bool[Tensor, \"B T\"],\n    ) -> Float[Tensor, \"B T\"]:\n        ratio = bounded_exp(log_ratio)\n        gain", "return 1 - self.high, 1 + self.low\n\n    def __call__(\n        self,\n        log_ratio: Float[Tensor, \"B T\"],\n        logprobs: Float[Tensor, \"B T\"],\n        advantages: Float[Tensor, \"B T\"],\n        mask: Bool[Tensor, \"B T\"],\n    ) -> Float[Tensor, \"B T\"]:\n        ratio = bounded_exp(log_ratio)\n        gain", "clip: low and high swapped"),
    Fault("gates.py", "torch.where(advantages < 0, torch.maximum(gain, self.dual * advantages), gain)", "torch.maximum(gain, self.dual * advantages)", "dual clip applied to good tokens too"),
    Fault("gates.py", "(advantages < 0) & (ratio < lowest))\n", "(advantages < 0) & (ratio > highest))\n", "statistics: wrong side of the clip for bad tokens"),
    Fault("gates.py", "scale = 4 / tau if", "scale = 2 / tau if", "soft gate: 2/τ for 4/τ"),
    Fault("gates.py", "            torch.full_like(advantages, self.tau_pos),\n            torch.full_like(advantages, self.tau_neg),", "            torch.full_like(advantages, self.tau_neg),\n            torch.full_like(advantages, self.tau_pos),", "soft gate: temperatures swapped"),
    Fault("gates.py", "bounded_exp(log_ratio).clamp(*self.band).detach() * advantages * logprobs", "bounded_exp(log_ratio).clamp(*self.band) * advantages * logprobs", "CISPO: weight not detached"),
    Fault("gates.py", "log_ratio.clamp(max=self.high), log_ratio.clamp(min=-self.low))", "log_ratio.clamp(-self.low, self.high), log_ratio.clamp(-self.low, self.high))", "GMPO: clip on both sides"),
    Fault("gates.py", "torch.where(advantages >= 0, positive, negative)", "torch.where(advantages >= 0, negative, positive)", "VESPO: signs swapped"),
    Fault("gates.py", "return -advantages * logprobs", "return advantages * logprobs", "REINFORCE: wrong sign"),
    Fault("ratios.py", "return row_mean(log_ratio, mask).expand_as(log_ratio)", "return log_ratio.mean(dim=1, keepdim=True).expand_as(log_ratio)", "GSPO: mean over the padded width"),
    Fault("ratios.py", "return row_mean(log_ratio, mask).expand_as(log_ratio)", "return row_sum(log_ratio, mask).expand_as(log_ratio)", "GSPO: no length normalisation"),
    Fault("ratios.py", "(log_ratio - log_ratio.detach()) + row_mean(log_ratio, mask).detach()", "(log_ratio - log_ratio.detach()) + row_mean(log_ratio, mask)", "GSPO-token: mean not detached"),
    Fault("weights.py", "return weights / (max(len(mask), 1) * weights.sum(dim=1, keepdim=True).clamp(min=1))", "return weights / weights.sum().clamp(min=1)", "SequenceMean computing a token mean"),
    Fault("weights.py", "return weights / (max(len(mask), 1) * weights.sum(dim=1, keepdim=True).clamp(min=1))", "return weights / (mask.any(dim=1).sum().clamp(min=1) * weights.sum(dim=1, keepdim=True).clamp(min=1))", "SequenceMean forgetting fully masked rows"),
    Fault("weights.py", "(max(num_groups, 1) * tokens[index].unsqueeze(1))", "(max(len(mask), 1) * tokens[index].unsqueeze(1))", "PromptMean divided by rows"),
    Fault("weights.py", "        return mask.double() / (max(len(mask), 1) * self.length)", "        return mask.double() / (max(len(mask), 1) * mask.shape[1])", "Dr. GRPO: padded width for the budget"),
    Fault("weights.py", "        weights = mask.double()\n        return weights / weights.sum().clamp(min=1)", "        weights = mask.float()\n        return weights / weights.sum().clamp(min=1)", "TokenMean in float32"),
    Fault("advantages.py", "std = (group.square_sum / (group.count - self.ddof).clamp(min=1)).sqrt()", "std = (group.square_sum / group.count.clamp(min=1)).sqrt()", "group std: ddof ignored"),
    Fault("advantages.py", "return _settled(group.deviation / (std + self.epsilon), group.unanimous, feedback)\n\n\n@dataclass(frozen=True)\nclass GroupCentred", "return _settled(group.deviation / (std.square() + self.epsilon).sqrt(), group.unanimous, feedback)\n\n\n@dataclass(frozen=True)\nclass GroupCentred", "epsilon inside the root"),
    Fault("advantages.py", "return advantages.masked_fill(unanimous, 0.0).masked_fill(~feedback.scored, torch.nan)", "return advantages.masked_fill(~feedback.scored, torch.nan)", "unanimous group not exactly 0"),
    Fault("advantages.py", ".masked_fill(~feedback.scored, torch.nan)", ".masked_fill(~feedback.scored, 0.0)", "unscored read as advantage 0"),
    Fault("advantages.py", "group.count / (group.count - 1).clamp(min=1)", "(group.count - 1) / group.count.clamp(min=1)", "leave-one-out factor upside down"),
    Fault("advantages.py", "batch = siblings(totals, torch.zeros_like(feedback.group))", "batch = siblings(totals, feedback.group)", "batch std over the group"),
    Fault("advantages.py", "live = feedback.scored & ~group.unanimous", "live = feedback.scored & (feedback.rewards != 0)", "GPG's α over non-zero rewards"),
    Fault("advantages.py", "rates.var(correction=0)", "rates.var(correction=1)", "BNPO: ddof of the moments"),
    Fault("groups.py", "scored = ~torch.isnan(values)", "scored = torch.ones_like(values, dtype=torch.bool)\n    values = values.nan_to_num(0.0)", "unscored read as reward 0"),
    Fault("groups.py", "unanimous=(highest <= lowest)[index]", "unanimous=(square_sum == 0)[index]", "zero variance tested by the variance"),
    Fault("credit.py", "total = torch.where(mask[:, t], values[:, t] + factor * total, total)", "total = values[:, t] + factor * total", "GAE not stepping over unsampled tokens"),
    Fault("credit.py", "upcoming = torch.where(mask[:, t], values[:, t], upcoming)", "upcoming = values[:, t]", "next value read at an unsampled token"),
    Fault("credit.py", "is_last = feedback.mask & (order == order[:, -1:])", "is_last = torch.arange(order.shape[1]).expand_as(order) == order.shape[1] - 1", "reward on the last column"),
    Fault("credit.py", "return Credit(advantages, critic + values)", "return Credit(advantages, advantages + values)", "decoupled critic λ ignored"),
    Fault("credit.py", "values.var(correction=1)", "values.var(correction=0)", "whitening with the biased variance"),
    Fault("credit.py", "whitened = whiten(credit.advantages[counted], self.epsilon)\n        return Credit(credit.advantages.masked_scatter(counted, whitened), credit.returns)", "whitened = whiten(credit.advantages[counted], self.epsilon)\n        return Credit(credit.advantages.masked_scatter(counted, whitened), credit.advantages)", "returns replaced by raw advantages"),
    Fault("credit.py", "1 - 1 / (self.length_adaptive * lengths).clamp(min=1)", "1 - 1 / (self.length_adaptive * lengths)", "length-adaptive λ below 0"),
    Fault("credit.py", "is_step = feedback.mask & ~feedback.token_rewards.isnan()", "is_step = feedback.mask & (feedback.token_rewards.nan_to_num(0.0) != 0)", "a process step of reward 0 forgotten"),
    Fault("divergences.py", "return bounded_exp(gap) - gap - 1\n", "return bounded_exp(-gap) + gap - 1\n", "k3 the wrong way round"),
    Fault("divergences.py", "return bounded_exp(log_ratio + gap) - bounded_exp(log_ratio) * (gap + 1)", "return bounded_exp(log_ratio.detach() + gap) - bounded_exp(log_ratio.detach()) * (gap + 1)", "unbiased k3 without the ratio's gradient"),
    Fault("divergences.py", "(logprobs - ref_logprobs).square() / 2", "(logprobs - ref_logprobs).square()", "k2 without the half"),
    Fault("corrections.py", "return bounded_exp(log_weight).clamp(max=self.cap)", "return bounded_exp(-log_weight).clamp(max=self.cap)", "TIS weight upside down"),
    Fault("corrections.py", "return torch.where((weight >= low) & (weight <= high), weight, torch.zeros_like(weight))", "return weight.clamp(low, high)", "masked weights clamped instead"),
    Fault("corrections.py", "mean = bounded_exp(row_mean(log_weight, mask))", "mean = bounded_exp(row_sum(log_weight, mask))", "geometric rejection by the product"),
    Fault("shaping.py", "penalty.clamp(max=self.cap))", "penalty)", "overlong penalty without its cap"),
    Fault("shaping.py", "return sampled(-self.coefficient *", "return sampled(self.coefficient *", "KL in the reward with the wrong sign"),
    Fault("keeping.py", "return ~torch.isnan(outcome) & ~siblings(outcome, group).unanimous", "return ~torch.isnan(outcome) & siblings(outcome, group).unanimous", "dynamic sampling keeps the dead groups"),
    Fault("selection.py", "is_open = candidates.through[candidates.mask] > 0", "is_open = candidates.through[candidates.mask] > -1", "Clip-Cov drops tokens already blocked"),
    Fault("selection.py", "return candidates.mask & (candidates.advantages < 0) & (drift > self.threshold)", "return candidates.mask & (drift > self.threshold)", "off-policy mask drops good completions"),
    Fault("pairwise.py", "chosen - rejected - margin", "chosen - rejected + margin", "margin with the wrong sign"),
    Fault("pairwise.py", "- self.label_smoothing * logsigmoid(-logit)", "- self.label_smoothing * logsigmoid(logit)", "label smoothing that does nothing"),
    Fault("extras.py", "error = torch.maximum(error, (near - returns).square())", "error = torch.minimum(error, (near - returns).square())", "value clip: min for max"),
    Fault("extras.py", "return error / 2", "return error", "value loss without the half"),
    Fault("rows.py", "anchor = current.detach()", "anchor = current", "self anchor not detached"),
    Fault("rows.py", "return sampled(tensor.detach().to(current.dtype), mask)", "return tensor.detach().to(current.dtype)", "padding read as data"),
    Fault("rows.py", "current = sampled(at_least_float32(logprobs), mask)", "current = sampled(logprobs, mask)", "bf16 arithmetic"),
    Fault("objective.py", "policy = policy * correction\n", "policy = policy * correction.mean()\n", "correction averaged away"),
    Fault("objective.py", "kl = algorithm.kl(rows.logprobs, rows.ref_logprobs, token_log_ratio) * weights", "kl = algorithm.kl(rows.logprobs, rows.ref_logprobs, token_log_ratio) * weights * (1 if correction is None else correction)", "KL corrected for mismatch"),
    Fault("objective.py", "algorithm.weights(rows.mask[rows.scored], rows.group[rows.scored])", "algorithm.weights(rows.mask, rows.group)[rows.scored]", "unscored rows in the denominator"),
    Fault("arithmetic.py", "return exponent.clamp(-MAX_LOG, MAX_LOG).exp()", "return exponent.exp()", "unbounded exponential"),
)  # fmt: skip
