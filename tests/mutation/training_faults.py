"""Small faults of the learner, the loop and the sampler: state that is lost, a count off by one, a row too many."""

from tests.mutation.faults import Fault

TRAINING_FAULTS = (
    Fault(
        "learner/learner.py", "batch.version < self.sampled_version", "batch.version <= self.sampled_version", "stale"
    ),
    Fault(
        "learner/learner.py",
        "self.trusts_sampler and self.sampled_version == self.version",
        "self.trusts_sampler",
        "a sampler with older weights is trusted",
    ),
    Fault(
        "learner/learner.py",
        "return self.options.updates == 1 or",
        "return self.options.updates <= 2 or",
        "no old pass",
    ),
    Fault("learner/learner.py", "+= update.skipped is None", "+= 1", "a skipped update counts"),
    Fault(
        "learner/learner.py",
        '{"shuffle": self.shuffle.get_state()}',
        '{"shuffle": torch.Generator().get_state()}',
        "the order after a resume",
    ),
    Fault(
        "learner/learner.py",
        'self._lost_trust = values.get("lost_trust", False)',
        "self._lost_trust = False",
        "trust after a resume",
    ),
    Fault(
        "learner/guard.py",
        "max_tokens = smaller.token_budget",
        "max_tokens = passes.token_budget",
        "memory that ran out",
    ),
    Fault(
        "learner/guard.py",
        "        self.in_a_row = 0\n        return None",
        "        return None",
        "skipped updates in a row",
    ),
    Fault(
        "learner/guard.py",
        "self._in_spell, self.in_a_row, self.max_tokens = state",
        "self._in_spell, _, self.max_tokens = state",
        "skipped updates over a resume",
    ),
    Fault(
        "learner/gradients.py",
        "self._policy.zero_grad()\n        trained",
        "trained",
        "an update that begins with the gradient of the one before",
    ),
    Fault(
        "learner/passes.py",
        "options.groups // options.minibatches",
        "len(groups) // options.minibatches",
        "minibatches of a step that is not full",
    ),
    Fault(
        "rl/train.py",
        "index >= run.config.pretrain_steps",
        "index > run.config.pretrain_steps",
        "value pre-training a step longer",
    ),
    Fault(
        "rl/train.py",
        "policy_step=index - run.config.pretrain_steps",
        "policy_step=index",
        "the policy's rate begins early",
    ),
    Fault("rl/train.py", "index % every == 0:", "index % every == 1:", "the reference is reset a step later"),
    Fault(
        "rl/train.py",
        "step % every == 0 and not state.evaluated",
        "step % every == 0",
        "evaluated twice after a resume",
    ),
    Fault(
        "rl/rollouts.py",
        "seed = self.seed + 1_000_003 * round_number",
        "seed = self.seed",
        "a prompt asked again draws the same",
    ),
    Fault(
        "rl/rollouts.py", "self._next += len(chosen) + len(skipped)", "self._next += len(chosen)", "prompts drawn twice"
    ),
    Fault(
        "rl/rollouts.py", "groups=tuple(self._kept[:full])", "groups=tuple(self._kept)", "more groups than a step has"
    ),
    Fault("rl/rollouts.py", "tuple(self._kept[full:]), rates", "(), rates", "groups beyond a step are lost"),
    Fault("rl/rollouts.py", "(self._refills and is_left)", "is_left", "refills where nothing asks for them"),
    Fault("rl/rollouts.py", "self._tokens < limit)", "self._tokens >= limit)", "the limit of refills"),
    Fault("rl/rollouts.py", "0.25)\n", "0.75)\n", "draws to replace what is dropped"),
    Fault("rl/assemble.py", "everyone.group < len(groups)", "everyone.group <= len(groups)", "a dropped group trains"),
    Fault(
        "rl/assemble.py",
        "mask=trained_mask(algorithm.keep, batch.mask, batch.truncated)",
        "mask=batch.mask",
        "cut completions train",
    ),
    Fault(
        "rl/assemble.py",
        "index = (is_kept & trained_rows(algorithm.keep, batch))",
        "index = (is_kept)",
        "rows that nothing could score train",
    ),
    Fault(
        "rl/assemble.py",
        "int((is_kept & ~is_scored).sum())",
        "int((~is_scored).sum())",
        "unscored rows of dropped groups counted",
    ),
    Fault(
        "rl/monitor.py",
        "self._bad_steps + 1 if is_bad else 0",
        "self._bad_steps + is_bad",
        "bad steps that are not in a row",
    ),
    Fault(
        "rl/monitor.py",
        "for check in (self.health.update, self.clip_range.update, self.staleness.update):",
        "for check in (self.clip_range.update, self.staleness.update):",
        "findings reported again after a resume",
    ),
    Fault("runs/checkpointer.py", 'self.failures.load(parts["unscored"])', "pass", "bad steps over a resume"),
    Fault(
        "runs/checkpointer.py",
        "best=state.former_best) if is_best and self._saved != step",
        "best=state.former_best) if False",
        "a best checkpoint that is not there",
    ),
    Fault("samplers/partial.py", "request.first_sample + sample,", "sample,", "samples of a request draw the same"),
    Fault("samplers/partial.py", "turn_key(request.key, request.turn)", "request.key", "turns draw the same"),
    Fault(
        "samplers/partial.py",
        "in (self.options.max_tokens, partial.max_tokens)",
        "in (self.options.max_tokens,)",
        "a request's own limit",
    ),
    Fault(
        "samplers/partial.py",
        "tail = self._tail(partial.tokens, len(stop.encode()) + 4)",
        "tail = self._tail(partial.tokens, 1)",
        "stop strings of several tokens",
    ),
    Fault(
        "samplers/rng.py",
        "_mixed(_mixed(keys + state) + samples)",
        "_mixed(_mixed(keys + state))",
        "siblings draw the same",
    ),
    Fault("samplers/rng.py", "_mixed(states + positions)", "_mixed(states)", "every token draws the same number"),
    Fault(
        "samplers/rng.py",
        "short.sum(dim=-1, keepdim=True) + 1)",
        "short.sum(dim=-1, keepdim=True))",
        "top-p without the token that crosses it",
    ),
    Fault(
        "samplers/rng.py",
        "options.top_p * heights[:, -1:]",
        "options.top_p",
        "top-p of everything, not of what top-k left",
    ),
    Fault("samplers/rng.py", ">= options.min_p * ranked[:, :1].exp()", ">= options.min_p", "min-p without the highest"),
    Fault(
        "samplers/rng.py",
        "else logits.float() / temperature",
        "else logits.float() * temperature",
        "the temperature's inverse",
    ),
    Fault(
        "samplers/embedded/decoding.py",
        "self._live[hole], self._counts[hole] = self._live[mover], self._counts[mover]",
        "self._live[hole] = self._live[mover]",
        "counts of rows that moved",
    ),
    Fault("rl/schedules.py", "step / max(length - 1, 1)", "step / length", "a schedule that does not reach its end"),
    Fault(
        "rl/schedules.py",
        "bisect_right(self.at, step)",
        "bisect_right(self.at, step - 1)",
        "a number that begins a step late",
    ),
    Fault(
        "rl/rollouts.py",
        "self.sampling if self.sampling_at is None else self.sampling_at(step)",
        "self.sampling",
        "completions without the step's temperature",
    ),
    Fault(
        "learner/learner.py",
        "self.passes = replace(self.passes, temperature=temperature)",
        "pass",
        "log-probs without the step's temperature",
    ),
    Fault(
        "learner/learner.py",
        "shape = replace(shape, coefficient=before.coefficient)",
        "pass",
        "a controller's coefficient lost to a schedule of another number",
    ),
    Fault("rewards/metrics.py", "math.fsum(numbers) / len(numbers)", "sum(numbers)", "a sum for a metric's mean"),
)
