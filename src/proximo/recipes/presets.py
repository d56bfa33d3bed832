"""Presets: configs that are known to work."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, VAPO, Algorithm
from proximo.environments.kinds import MultiTurn
from proximo.losses.pairwise import BradleyTerry, Dpo
from proximo.losses.pieces.credit import ProcessNormalized
from proximo.losses.pieces.divergences import KlLoss, UnbiasedK3
from proximo.losses.pieces.protocols import AdvantageTraits, AnchorTraits
from proximo.losses.pieces.shaping import KlReward
from proximo.models.values import OwnLayers, OwnModel
from proximo.recipes.pipeline import PipelineConfig, PreferenceOptions, ReinforcementOptions, RewardModelOptions
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.runs.options import CheckpointOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.fitting import FitOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.chain import Chain
from proximo.tasks.echo import Echo
from proximo.tasks.guessing import Guessing
from proximo.tasks.sorting import Sorting


@dataclass(frozen=True)
class Preset:
    name: str
    config: RunConfig | PipelineConfig
    what: str


@dataclass(frozen=True)
class ComparisonPreset:
    """Configs by name; the first is the baseline."""

    name: str
    configs: Mapping[str, RunConfig]
    seeds: int
    what: str


def with_algorithm(config: RunConfig, algorithm: Algorithm) -> RunConfig:
    """Another algorithm on the same run; one that is defined for one update a step gets one."""
    training, advantage = config.training, AdvantageTraits.read(algorithm.advantage)
    value = config.value if advantage.needs_values else None
    teacher = config.teacher if "teacher_logprobs" in advantage.all_needs else None
    if AnchorTraits.read(algorithm.anchor).on_policy:
        training = replace(training, minibatches=1, epochs=1)
    return replace(config, algorithm=algorithm, training=training, value=value, teacher=teacher)


def with_values(config: RunConfig) -> RunConfig:
    """A value model's options written out, where one is needed, so that its fields can be changed and read."""
    return replace(config, value=config.value_options)


def ablated(algorithm: Algorithm) -> dict[str, Algorithm | None]:
    """The algorithm with the default of one stage, by each stage in which it differs from `Algorithm()`. None where the
    stages contradict each other then, as a value loss does without an advantage that asks for values.

    Example: list(ablated(DAPO)) == ["shape", "keep", "gate", "weights"]
    """
    defaults = {each.name: getattr(Algorithm(), each.name) for each in fields(Algorithm)}
    changed = {name: default for name, default in defaults.items() if getattr(algorithm, name) != default}
    ablations: dict[str, Algorithm | None] = dict.fromkeys(changed)
    for name, default in changed.items():
        with suppress(ValueError):
            ablations[name] = replace(algorithm, **{name: default})
    return ablations


ARITHMETIC = RunConfig(
    task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=1000),
    model="tiny-arithmetic",
    sampling=SamplingOptions(temperature=1.0, max_tokens=8),
    training=TrainingOptions(groups=32, group_size=8, minibatches=4, learning_rate=2e-5, warmup_steps=2),
    evaluation=EvaluationOptions(problems=1000),
    checkpoints=CheckpointOptions(every=50),  # its steps are short: saving should take less than 1 % of the time
    steps=150,
)

PPO_ARITHMETIC = replace(ARITHMETIC, algorithm=PPO, value=ValueOptions(OwnLayers(1), learning_rate=1e-3))
VAPO_ARITHMETIC = replace(
    ARITHMETIC, algorithm=VAPO, value=ValueOptions(OwnModel(), learning_rate=3e-4, pretrain_steps=20)
)

LENGTH = replace(
    ARITHMETIC,
    task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=1000, working=True),
    model="tiny-length",
    sampling=SamplingOptions(temperature=1.0, max_tokens=96),
    training=TrainingOptions(groups=8, group_size=8, minibatches=2, learning_rate=2e-4, warmup_steps=2),
    # Sampled: the most likely next word is always another filler word, so a greedy completion never ends.
    evaluation=EvaluationOptions(problems=200, samples=4, metric="mean_at_k"),
    steps=100,
)

CHAIN = replace(
    LENGTH,
    task=Chain(steps=(1, 2, 4, 8, 16), held_out=1000),
    model="tiny-chain",
    sampling=SamplingOptions(temperature=1.0, max_tokens=96),
)

CHAIN_PROCESS = replace(CHAIN, algorithm=replace(GRPO, advantage=ProcessNormalized()))

MOE_ECHO = replace(
    ARITHMETIC,
    task=Echo(length=16, alphabet="abcdefghijklmnop", held_out=200),
    model="tiny-moe",
    sampling=SamplingOptions(temperature=1.0, max_tokens=40),
    training=TrainingOptions(groups=16, group_size=8, minibatches=4, learning_rate=2e-4, warmup_steps=2),
    evaluation=EvaluationOptions(problems=200, samples=4, metric="mean_at_k"),
    steps=60,
)

COPY = replace(MOE_ECHO, model="tiny-copy")

OPEN_ENDED = replace(
    ARITHMETIC,
    task=Sorting(),
    model="tiny-sorter",
    sampling=SamplingOptions(temperature=1.0, max_tokens=8),
    training=TrainingOptions(groups=32, group_size=8, minibatches=2, learning_rate=1e-4, warmup_steps=2),
    rewards=RewardMix(task=0.0, models=(RewardModel("tiny-judge"),)),
    evaluation=EvaluationOptions(problems=200),
    steps=60,
)

SMOLLM_ARITHMETIC = RunConfig(
    task=Arithmetic(operations=("+",), digits=1, terms=2, held_out=12, chat=True),
    model="smollm2-135m",
    sampling=SamplingOptions(temperature=1.0, max_tokens=16),
    training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-5, warmup_steps=2),
    evaluation=EvaluationOptions(problems=12),
    steps=20,
)

_GAME = replace(
    ARITHMETIC,
    model="tiny-agent",
    training=TrainingOptions(groups=16, group_size=8, minibatches=2, learning_rate=3e-4, warmup_steps=2),
    # Sampled: the most likely replies of this model are better than it is.
    evaluation=EvaluationOptions(problems=200, samples=4, metric="mean_at_k"),
    steps=60,
)
GUESSING = replace(
    _GAME,
    task=Guessing("number"),
    environment=MultiTurn(
        "proximo.environments.examples:NumberGuessing", max_turns=3, max_turn_tokens=4, reward_range=(0.0, 1.0)
    ),
    sampling=SamplingOptions(max_tokens=24),
)
CALCULATOR = replace(
    _GAME,
    task=Arithmetic(operations=("*",), digits=2, held_out=200, chat=True),
    environment=MultiTurn(tools=("proximo.environments.examples:calculate",), max_turns=3),
    sampling=SamplingOptions(max_tokens=48),
)
WORDS = replace(
    _GAME,
    model="tiny-words",
    task=Guessing("word"),
    environment=MultiTurn(
        "proximo.environments.examples:WordGuessing", max_turns=3, max_turn_tokens=6, reward_range=(0.0, 1.0)
    ),
    sampling=SamplingOptions(max_tokens=48),
    steps=30,
)
PYTHON = replace(
    _GAME,
    model="tiny-python",
    task=Arithmetic(operations=("+", "-", "*"), digits=2, terms=3, held_out=200, chat=True),
    environment=MultiTurn(tools=("proximo.environments.examples:run_python",), max_turns=3, max_answer_tokens=16),
    sampling=SamplingOptions(max_tokens=80),
    # Fewer episodes than in other games: each call starts a Python.
    training=replace(_GAME.training, groups=8),
    evaluation=replace(_GAME.evaluation, problems=100, samples=2),
    steps=40,
)

PIPELINE_DEMO = PipelineConfig(
    sft=FitOptions(epochs=3.0, batch=32, learning_rate=1e-3, warmup_steps=20),
    reward_model=RewardModelOptions(
        loss=BradleyTerry(centring=0.01), fit=FitOptions(epochs=3.0, batch=32, learning_rate=1e-3)
    ),
    ppo=ReinforcementOptions(
        algorithm=replace(PPO, shape=KlReward(0.2)),
        training=TrainingOptions(groups=32, group_size=8, minibatches=2, learning_rate=1e-4),
        value=ValueOptions(OwnLayers(1), learning_rate=1e-3),
        steps=60,
    ),
    grpo=ReinforcementOptions(
        # K3 pulls no harder the further away a token is; this estimator does, and keeps the policy close.
        algorithm=replace(GRPO, kl=KlLoss(0.5, UnbiasedK3())),
        training=TrainingOptions(groups=32, group_size=8, minibatches=2, learning_rate=1e-4),
        steps=60,
    ),
    dpo=PreferenceOptions(loss=Dpo(beta=1.0), fit=FitOptions(epochs=1.0, batch=32, learning_rate=1e-4)),
)

PRESETS = (
    Preset(
        "arithmetic", ARITHMETIC, "two-digit sums with the tiny model that ships with Proximo; a few minutes on a CPU"
    ),
    Preset("ppo-arithmetic", PPO_ARITHMETIC, "the same with PPO and a value model on its own copy of the last layer"),
    Preset("vapo-arithmetic", VAPO_ARITHMETIC, "the same with VAPO and a separate, pretrained value model"),
    Preset("smollm-arithmetic", SMOLLM_ARITHMETIC, "one-digit sums with SmolLM2-135M; needs the extra smollm"),
    Preset("guessing", GUESSING, "guess a number in three turns, told higher or lower; a minute or two on a CPU"),
    Preset("calculator", CALCULATOR, "products of two-digit numbers with a calculator as a tool; minutes on a CPU"),
    Preset("words", WORDS, "guess a word in three turns, told which letters are right; a minute or two on a CPU"),
    Preset("python", PYTHON, "calculations by programs that run in the sandbox as a tool; minutes on a CPU"),
    Preset("length", LENGTH, "sums answered after filler words, to see what training does to length; minutes on a CPU"),
    Preset("chain", CHAIN, "running sums of 1 to 16 written steps, with accuracy for each number; minutes on a CPU"),
    Preset("chain-process", CHAIN_PROCESS, "the same with GRPO and process supervision: every written step is graded"),
    Preset("moe-echo", MOE_ECHO, "copies by a small mixture of experts, whose routing is measured; minutes on a CPU"),
    Preset("copy", COPY, "copies of 16 letters by a small dense model, of up to 64 if asked; minutes on a CPU"),
    Preset("open-ended", OPEN_ENDED, "letters sorted for a reward model that can be hacked, the true reward beside it"),
    Preset(
        "pipeline-demo",
        PIPELINE_DEMO,
        "fine-tuning, reward model, PPO, GRPO and DPO with a known true reward; five minutes on a CPU",
    ),
)

HALF_DEMO = 64_000
"""Tokens that GRPO samples in half of the demo's steps."""
_HALF = replace(ARITHMETIC, evaluation=replace(ARITHMETIC.evaluation, every=5), max_generated_tokens=HALF_DEMO)

FIVE = ComparisonPreset(
    "five",
    {
        "ppo": replace(_HALF, algorithm=PPO, value=PPO_ARITHMETIC.value),
        "grpo": with_algorithm(_HALF, GRPO),
        "dapo": with_algorithm(_HALF, DAPO),
        "gspo": with_algorithm(_HALF, GSPO),
        "sapo": with_algorithm(_HALF, SAPO),
    },
    seeds=3,
    what="PPO, GRPO, DAPO, GSPO and SAPO on the demo's task, each with half of the tokens that the demo samples",
)

COMPARISONS = (FIVE,)
