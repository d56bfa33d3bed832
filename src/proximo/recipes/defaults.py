"""Defaults that follow from a run's model and data, each with its reason."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from proximo.config.unions import with_fields
from proximo.environments.kinds import Acting
from proximo.losses.pieces.protocols import AnchorTraits
from proximo.models import load_tokenizer, problem_tokens
from proximo.models.context_length import reach_of
from proximo.models.loading import is_new, read_config, skeleton
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.packing.support import supports_packing
from proximo.models.shipped import resolve
from proximo.models.values import OwnModel
from proximo.rewards.grading import grading
from proximo.rl.config import RunConfig, TrainingOptions, ValueOptions, steps_of
from proximo.rl.preflight.calibration import probed
from proximo.system.amounts import in_units
from proximo.tasks import Task
from proximo.types import Problem

OF_STEPS = "evaluation.every"
"""Field that is chosen by the number of steps."""
LOOKED_AT = 20_000
"""Problems whose texts are compared for length."""
TOKENIZED = 32
"""The longest of them, in characters, of which tokens are counted."""
GENERATED = 256
"""Problems that are looked at where a task generates them without end."""


@dataclass(frozen=True)
class BatchSize:
    """Size of a training step: what it samples, and how often it updates."""

    groups: int
    group_size: int
    minibatches: int

    @property
    def completions(self) -> str:
        return f"{self.groups} × {self.group_size}"


SMALL, LARGE = BatchSize(16, 8, 4), BatchSize(32, 16, 2)
"""Batches of small models and of those from LARGE_FROM parameters on. Measured with 1e-6 on Qwen2.5-Coder-0.5B and
GSM8K: LARGE took held-out accuracy from 26 to 41 % in 60 steps, SMALL from 30 to 35 % in 48, where half of the groups
were all correct or all wrong. The package's tiny models learn with SMALL in minutes on a CPU."""
LARGE_FROM = 1e8
REASONING, THINKING = 1024, 4096
"""Completion limits, in tokens, for a model that answers and for one whose template has it think first."""
RATES = ((1e6, 2e-5), (494e6, 1e-6))
"""Learning rates of full fine-tuning by number of parameters; between them a straight line in the logarithms of both,
beyond them the nearest. Measured: 2e-5 for the package's tiny models of 0.8 M; Qwen2.5-Coder-0.5B rose on with 1e-6 and
turned with 5e-6, SmolLM2-135M rose hardly with 2e-5. 1e-6 is also what DeepSeekMath, DAPO, TRL and verl take."""
NEW = 10
"""The learning rate of weights that nothing has trained yet, as a multiple of pretrained ones'. Measured on 0.8 M, 40
steps rewarded for digits: 0.11 to 0.22 with 2e-5, to 0.85 with 2e-4."""
LORA = 10
"""A LoRA adapter's learning rate, as a multiple of the whole model's (Schulman et al. 2025, LoRA Without Regret)."""
FEWEST_STEPS, MOST_STEPS, ENDLESS_STEPS = 50, 500, 200
EVALUATIONS = 10
EVALUATED = 200
"""Held-out problems: with 200, an accuracy is known to about ±7 points (95 %)."""


START = RunConfig(
    training=TrainingOptions(groups=SMALL.groups, group_size=SMALL.group_size, minibatches=1), steps=10**6
)
"""Config that flags are read onto before defaults are chosen: it refuses none, and what differs was given."""


@dataclass(frozen=True)
class Default:
    """A value chosen for a field, and why."""

    field: str
    """Path of the field, such as `sampling.max_tokens`."""
    value: int | float | OwnModel
    reason: str

    @property
    def shown(self) -> int | float | str:
        """A number, or the name of a piece."""
        return self.value if isinstance(self.value, int | float) else type(self.value).__name__

    def __str__(self) -> str:
        return f"{self.field} {self.shown}: {self.reason}"


@dataclass(frozen=True)
class RunTraits:
    """Traits of a run's model and data that are known before it starts."""

    parameters: int
    positions: int | None
    """Maximum tokens of prompt and completion together; None: no limit."""
    thinks: bool
    """True if the chat template has the model think before it answers."""
    has_adapter: bool
    """True if a LoRA adapter is trained."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    answer_tokens: int | None
    """Tokens of the longest reference answer; None if none is known."""
    is_literal: bool
    """True if a completion must be the answer and nothing else; one of several turns is more."""
    problems: int | None
    """Number of training problems; None if endless."""
    held_out: int | None
    is_packed: bool = True
    """True if the model is read in packed passes."""
    is_new: bool = False
    """True if nothing has trained the model's weights yet."""


def traits_of(config: RunConfig) -> RunTraits:
    """Read the model's config and tokenizer and the task's problems; no weights. ValueError says what is missing."""
    task, problems = config.task, _problems(config)
    if not problems:
        raise ValueError("task.held_out leaves no problem to train on: hold out less")
    path = resolve(config.model)
    tokenizer, reach = load_tokenizer(path), reach_of(read_config(path))
    answers = [text for problem in problems if (text := _answer(task, problem)) is not None]
    shape = skeleton(path)
    return RunTraits(
        parameters=sum(each.numel() for each in shape.parameters()),
        positions=None if reach is None else reach.tokens,
        thinks=_thinks(tokenizer, problems[0]),
        has_adapter=config.adapter is not None,
        prompt_tokens=_longest_prompt(tokenizer, problems, config.environment),
        answer_tokens=_longest(tokenizer, answers) if answers else None,
        is_literal=not isinstance(config.environment, Acting) and _is_literal(task, problems[:4]),
        problems=task.size("train"),
        held_out=task.size("held_out"),
        is_packed=supports_packing(shape),
        is_new=is_new(path),
    )


def defaults_for(config: RunConfig, traits: RunTraits, epochs: float | None = None) -> list[Default]:
    """Defaults for what a config has from START; they suit what was given. `epochs`: passes over the data, if they are
    given in the place of steps."""
    batch, steps = _batch_size(traits), config.steps
    groups = config.training.groups
    if groups == START.training.groups:
        groups = batch.groups if traits.problems is None else min(batch.groups, traits.problems)
    rate = learning_rate(traits.parameters, has_adapter=traits.has_adapter, is_new=traits.is_new)
    defaults = [_max_tokens(traits), rate, *_value(config, traits), *_batch(config, groups, batch, traits)]
    if steps == START.steps:
        chosen = _steps(groups, traits) if epochs is None else _epochs(epochs, groups, config, traits)
        defaults.append(chosen)
        assert isinstance(chosen.value, int)
        steps = chosen.value
    if not config.evaluation.problems:  # evaluation is switched off
        return defaults
    if steps >= 2 * EVALUATIONS:
        why = f"{EVALUATIONS} evaluations in the run, from which the best checkpoint is kept"
        defaults.append(Default(OF_STEPS, steps // EVALUATIONS, why))
    return [*defaults, _evaluated(traits)]


def with_defaults(config: RunConfig, defaults: Sequence[Default]) -> RunConfig:
    """The config with all of them in place."""
    values = config.value_options
    # Flags may choose an advantage that needs values where the config's own does not.
    chosen = {each.field: each.value for each in defaults if values or not each.field.startswith("value.")}
    given = replace(config, value=values) if any(field.startswith("value.") for field in chosen) else config
    return with_fields(given, chosen)


def as_begun(config: RunConfig, chosen: Sequence[Default], began: Mapping[str, Any]) -> RunConfig:
    """The config of a run that goes on for other steps, with its own value of what was chosen by its steps. `began`:
    the tables of its config."""
    if OF_STEPS not in {each.field for each in chosen}:
        return config
    table, _, name = OF_STEPS.partition(".")
    return with_fields(config, {OF_STEPS: began.get(table, {}).get(name)})


def kept(config: RunConfig, defaults: Sequence[Default], given: Collection[str] = ()) -> list[Default]:
    """The defaults that the config still has, after what the user gave, without the fields that are given."""
    return [each for each in defaults if each.field not in given and _at(config, each.field) == each.value]


def listed(defaults: Sequence[Default], how: str = "a flag changes each") -> list[str]:
    """Lines for a person; `how` says how to change what was chosen."""
    return [f"chosen for this model and data; {how}:", *(f"  {each}" for each in defaults)] * bool(defaults)


def _at(value: object, path: str) -> object:
    for name in path.split("."):
        assert is_dataclass(value)
        value = getattr(value, name)
    return value


# One field each


def _max_tokens(traits: RunTraits) -> Default:
    answer = traits.answer_tokens
    if traits.is_literal and answer is not None:
        wanted = 8 * math.ceil((answer + 2) / 8)
        why = f"a completion must equal the answer, and the longest has {answer} tokens"
    elif traits.thinks:
        wanted, why = THINKING, "the chat template has the model think before it answers"
    elif answer is not None and 2 * answer > REASONING:
        wanted = min(2 ** math.ceil(math.log2(2 * answer)), THINKING)
        why = f"room to reason; the longest answer in the data has {answer} tokens"
    else:
        wanted, why = REASONING, "room to reason before the answer"
    if traits.positions is not None and traits.positions - traits.prompt_tokens < wanted:
        wanted, why = traits.positions - traits.prompt_tokens, f"the longest prompt takes {traits.prompt_tokens}"
        if wanted < traits.positions // 4:  # a few prompts are much too long: the run names them
            wanted, why = max(1, traits.positions // 2), "half of them for the prompt"
        why = f"the model has {traits.positions} positions; {why}"
    return Default("sampling.max_tokens", wanted, why)


def learning_rate(parameters: float, *, has_adapter: bool, is_new: bool = False) -> Default:
    """The policy's learning rate for a model of that size."""
    weights = "new weights, which nothing has trained yet" if is_new else "pretrained weights"
    why = f"for {weights}, {in_units(parameters)} of them; {_READINGS}"
    rate = _whole_rate(parameters, is_new)
    if has_adapter:
        rate, why = rate * LORA, f"{why}; ten times that of the whole model, as a LoRA adapter is trained"
    return Default("training.learning_rate", _rounded(rate), why)


_READINGS = "a real model of 0.5 B rose on with 1e-6 and fell again with 5e-6, tiny ones need 2e-5"


def _whole_rate(parameters: float, is_new: bool) -> float:
    """The learning rate of the whole model, without an adapter."""
    (small, high), (large, low) = RATES
    along = math.log(min(max(parameters, small), large) / small) / math.log(large / small)
    return high * (low / high) ** along * (NEW if is_new else 1)


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


def _value(config: RunConfig, traits: RunTraits) -> list[Default]:
    options = config.value_options
    if options is None:
        return []
    defaults, form = list[Default](), options.form
    if not traits.is_packed and form == ValueOptions().form:
        form = OwnModel()
        why = "a copy of the policy; layers of its own on the policy's trunk need a model that is read in packed passes"
        defaults.append(Default("value.form", form, why))
    if traits.has_adapter and options.learning_rate is None:
        why = "that of the whole model times what suits a value model, which is trained without an adapter"
        defaults.append(
            Default("value.learning_rate", _rounded(form.pace * _whole_rate(traits.parameters, traits.is_new)), why)
        )
    return defaults


def _batch_size(traits: RunTraits) -> BatchSize:
    return LARGE if traits.parameters >= LARGE_FROM else SMALL


def _batch(config: RunConfig, groups: int, batch: BatchSize, traits: RunTraits) -> list[Default]:
    few = traits.problems is not None and traits.problems < batch.groups
    why = "the data has no more prompts" if few else "prompts per step"
    if batch is LARGE and not few:
        why += f"; a real model of 0.5 B rose faster with {LARGE.completions} completions than with {SMALL.completions}"
    prompts = [Default("training.groups", groups, why)]
    if groups == config.training.groups != START.training.groups:  # it was given
        prompts = []
    why = "completions of a prompt, enough to differ in their rewards"
    size = Default("training.group_size", batch.group_size, why)
    if AnchorTraits.read(config.algorithm.anchor).on_policy:
        return [*prompts, size, Default("training.minibatches", 1, "the algorithm is defined for one update per step")]
    number = max(each for each in range(1, batch.minibatches + 1) if groups % each == 0)
    return [*prompts, size, Default("training.minibatches", number, "updates per step")]


def _epochs(epochs: float, groups: int, config: RunConfig, traits: RunTraits) -> Default:
    steps = steps_of(epochs, config, groups)
    return Default("steps", steps, f"{epochs:g} times the {traits.problems:,} prompts, {groups} of them a step")


def _steps(groups: int, traits: RunTraits) -> Default:
    problems = traits.problems
    if problems is None:
        return Default("steps", ENDLESS_STEPS, "the task generates problems without end")
    steps = min(max(math.ceil(problems / groups), FEWEST_STEPS), MOST_STEPS)
    seen = steps * groups
    if seen < problems:
        why = f"{seen:,} of the {problems:,} prompts, each once"
    elif seen < 2 * problems:
        why = f"one pass over the {problems:,} prompts"
    else:
        why = f"{seen // problems} passes over the {problems:,} prompts"
    return Default("steps", steps, why)


def _evaluated(traits: RunTraits) -> Default:
    if traits.held_out is not None and traits.held_out <= EVALUATED:
        return Default("evaluation.problems", max(1, traits.held_out), "all problems that are held out")
    return Default("evaluation.problems", EVALUATED, "held-out problems: enough for an accuracy within about 7 points")


# Reading


def _answer(task: Task, problem: Problem) -> str | None:
    """Example of a right completion; None if none is known."""
    known = task.reference(problem)
    return problem.answer if known is None and isinstance(problem.answer, str) else known


def _thinks(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> bool:
    """True if the problem is asked in a chat template that has the model think, and thinking is not switched off."""
    if isinstance(problem.prompt, str) or problem.chat_template_kwargs.get("enable_thinking") is False:
        return False
    return "<think>" in str(tokenizer.chat_template or "")


def _is_literal(task: Task, problems: Sequence[Problem]) -> bool:
    """True if the grader rejects a reference answer with a sentence before it."""
    asked = [(problem, text) for problem in problems if (text := task.reference(problem)) is not None]
    with grading():
        alone = probed(task, asked)
        led = probed(task, [(problem, f"Let me think step by step.\n{text}") for problem, text in asked])
    return any(one.is_right and not two.is_right for one, two in zip(alone, led, strict=True))


def longest_prompt(config: RunConfig) -> int:
    """Tokens of the longest prompt of the training problems."""
    return _longest_prompt(load_tokenizer(resolve(config.model)), _problems(config), config.environment)


def _problems(config: RunConfig) -> list[Problem]:
    size = config.task.size("train")
    count = GENERATED if size is None else min(size, LOOKED_AT)
    return [config.task.problem(index, "train", config.seed) for index in range(count)]


def _longest_prompt(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], environment: object) -> int:
    """Tokens of the longest prompt as it is asked, such as with the tools that the policy may call."""
    longest = sorted(problems, key=lambda problem: len(str(problem.prompt)))[-TOKENIZED:]
    lengths, refused = list[int](), None
    for problem in longest:
        try:
            asked = environment.prepared(problem, tokenizer) if isinstance(environment, Acting) else problem
            lengths.append(len(problem_tokens(tokenizer, asked)))
        except ValueError as error:  # a prompt that the template refuses: the run names it
            refused = error
    if refused is not None and not lengths:  # all of them: what is wrong is not a prompt
        raise refused
    return max(lengths)


def _longest(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> int:
    longest = sorted(texts, key=len)[-TOKENIZED:]
    return max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in longest)
