"""The config that a command line names: a preset or a file, an algorithm, a reward model."""

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from proximo.algorithms import Algorithm, explain
from proximo.algorithms.explain import Card
from proximo.api.rewards import with_rewards
from proximo.api.settings import measured, scheduled
from proximo.api.training import STARTING_CONFIG
from proximo.cli.arguments import (
    asks_for_help,
    flag_names,
    nearest,
    read_number,
    refuse,
    refusing,
    say,
    take,
    take_all,
    take_number,
)
from proximo.cli.data import (
    DATA_FLAGS,
    METRICS,
    STEP_FLAGS,
    is_rewarded,
    take_environment,
    take_rewards,
    take_schedules,
    take_task,
)
from proximo.cli.flags import changed, read_flags
from proximo.cli.mistakes import half, no_such_preset
from proximo.cli.naming import DEMO, named
from proximo.cli.pieces import said_later, with_pieces
from proximo.config import toml
from proximo.recipes.defaults import Default, defaults_for, kept, traits_of, with_defaults
from proximo.recipes.pipeline import PipelineConfig
from proximo.recipes.presets import ARITHMETIC, PRESETS, with_algorithm, with_values
from proximo.rewards import ExactMatch
from proximo.rl.config import RunConfig, load_run, steps_of
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.system.opening import read_file, without_links
from proximo.tasks import Code, File
from proximo.tasks.sources.mixture import with_reward


def base_config(arguments: list[str], default: RunConfig = ARITHMETIC) -> RunConfig:
    """The preset or file that comes first, with the algorithm and reward model that are named; all are taken."""
    name, judge = take(arguments, "--algorithm"), take(arguments, "--reward-model")
    rewards = take_rewards(arguments)
    given = bool(arguments) and not arguments[0].startswith("-")
    config = preset_or_file(arguments.pop(0), arguments) if given else default
    config = _with_weight(config, arguments)
    if name is not None:
        config = with_named(config, named_algorithm("--algorithm", name).value, arguments)
    mix = config.rewards if judge is None else _with_judge(config.rewards, judge, take(arguments, "--rewards.task"))
    environment = take_environment(arguments, config.environment)
    is_paid = bool(rewards) or is_rewarded(mix, environment)
    task = take_task(arguments, config.model, rewarded=is_paid, watched=mix.only_watches)
    if task is not None and rewards:
        task = with_reward(task, ExactMatch())  # stands for the rewards until they take its place
    with refusing():
        # At once: what chooses by a verdict may refuse the demo's task beside a reward that suits the named one.
        if task is None:
            config = replace(config, rewards=mix)
        else:
            config = replace(config, rewards=mix, task=task, environment=environment)
        return with_rewards(with_values(config), rewards or None)


def run_config(
    arguments: list[str], *, prog: str, usage: str, description: str, help_more: str, skip_bad: bool = False
) -> tuple[RunConfig, list[Default]]:
    """The run that a command line describes, and the defaults in it that were chosen for its model and data."""
    of_file = bool(arguments) and arguments[0].endswith(".toml") and not asks_for_help(arguments)
    is_demo = of_file and not named(arguments)
    epochs = take_number(arguments, "--epochs", float)
    if epochs is not None and "--steps" in flag_names(arguments):
        refuse("--epochs and --steps: give one of them")
    schedules, metrics = take_schedules(arguments), take_all(arguments, METRICS) or None
    base, defaults = suited_base(arguments, prog=prog, skip_bad=skip_bad, epochs=epochs)
    config = changed(base, arguments, prog=prog, usage=usage, description=description, help_more=help_more)
    config = _with_task_read(config, base)
    if epochs is not None and not defaults:  # else they have the steps
        with refusing():
            config = replace(config, steps=steps_of(epochs, config))
    with refusing():
        config = measured(scheduled(config, schedules), metrics)
    if is_demo:
        say(DEMO)
    given = {name.removeprefix("--").replace("-", "_") for name in flag_names(arguments)}
    return skipping(config, skip_bad), kept(config, defaults, given)


def suited_base(
    arguments: list[str], *, prog: str, skip_bad: bool = False, epochs: float | None = None
) -> tuple[RunConfig, list[Default]]:
    """Config that flags are applied to: a preset or a file, or if the flags name a model or data, one with defaults for
    those, which are returned too. What names the config is taken from the arguments. `epochs`: passes over the data,
    if they are given in the place of steps."""
    if not asks_for_help(arguments) and (not arguments or arguments[0].startswith("-")):
        refuse_half(prog, named(arguments))
    if not _names_own(arguments):
        return base_config(arguments), []
    base = base_config(arguments, STARTING_CONFIG)
    if asks_for_help(arguments):
        return base, []
    asked = skipping(
        _with_task_read(read_flags(base, arguments, prog=prog, description=_naming(prog))[0], base), skip_bad
    )
    with refusing():
        defaults = defaults_for(asked, traits_of(asked), epochs)
    return with_defaults(base, defaults), defaults


def _naming(prog: str) -> str:
    """Help on what names a config, of which the config itself has no flags."""
    return naming_flags(prog.rpartition(" ")[2], "")


def _with_task_read(config: RunConfig, base: RunConfig) -> RunConfig:
    """The config with the base's own task, where it is equal: that one keeps the problems that it has read."""
    return replace(config, task=base.task) if config.task == base.task else config


def _names_own(arguments: Sequence[str]) -> bool:
    """True if the flags name a model or data, and no preset or file comes first: the demo's settings would not suit."""
    if arguments and not arguments[0].startswith("-"):
        return False
    return bool(named(arguments))


def refuse_half(source: str, named: set[str]) -> None:
    """Refuse a model without data, or data without a model."""
    if (complaint := half(source, named)) is not None:
        refuse(complaint)


def skipping(config: RunConfig, skip_bad: bool) -> RunConfig:
    """The config with bad rows of its data file skipped, if that is asked for."""
    if not skip_bad:
        return config
    if not isinstance(config.task, File | Code):
        refuse("--skip-bad is for problems from a file: task.type File or Code")
    return replace(config, task=replace(config.task, skip_bad=True))


OF_ONE_RUN = ("train", "init", "selfcheck", "fork", "iterate")
"""Commands whose config `run_config` reads."""


def naming_flags(command: str, of_command: str) -> str:
    """Help on what names a config as a whole, which is no field of it, and between them on the command's own flags."""
    lines = [
        f"base config (proximo {command} [PRESET | run.toml]):",
        "  run.toml              config file, such as the config.toml of a run folder",
        *textwrap.wrap(
            f"--algorithm NAME      one of {', '.join(card.name for card in explain.CARDS)}",
            116,
            initial_indent=" " * 2,
            subsequent_indent=" " * 24,
            break_on_hyphens=False,
        ),
        "  --reward-model DIR    add a reward model; --rewards.task is the weight of the task's score",
        "",
        "presets (the first is the default):",
        *(f"  {each.name:<18} {each.what}" for each in PRESETS),
        "",
    ]
    return f"{DATA_FLAGS}{STEP_FLAGS * (command in OF_ONE_RUN)}{of_command}{chr(10).join(lines)}"


def named_algorithm(flag: str, name: str) -> Card:
    """The algorithm that a flag names, or a refusal."""
    card = explain.card(name)
    if card is None:
        names = [each.name for each in explain.CARDS]
        refuse(f"{flag} {name}: no algorithm is called so{nearest(name, names)}; there are {', '.join(names)}")
    return card


def with_named(config: RunConfig, named: Algorithm, flags: Sequence[str]) -> RunConfig:
    """The config with an algorithm, and with the pieces that flags put in its stages: it may suit the run only so."""
    try:
        with said_later():
            return with_algorithm(_with_weight(config, flags), _with_stages(named, flags))
    except ValueError as error:
        if asks_for_help(flags):
            return config
        refuse(str(error))


def _with_weight(config: RunConfig, flags: Sequence[str]) -> RunConfig:
    """A verdict that is not rewarded gets the weight that a flag says: what chooses by the verdict needs one."""
    weight = take_number(list(flags), "--rewards.task", float)
    if weight is None or config.rewards.task:
        return config
    with refusing():
        return replace(config, rewards=replace(config.rewards, task=weight))


@dataclass(frozen=True)
class _Named:
    algorithm: Algorithm


def _with_stages(algorithm: Algorithm, flags: Sequence[str]) -> Algorithm:
    """All flags are read again later, so what they add is left for then."""
    groups: list[list[str]] = [[]]
    for each in flags:
        if each.startswith("--"):
            groups.append([])
        groups[-1].append(each)
    stage_flags = [each for group in groups if group and _is_stage(group[0].partition("=")[0]) for each in group]
    return with_pieces(_Named(algorithm), [*stage_flags, *["--help"] * asks_for_help(flags)]).algorithm


def _is_stage(flag: str) -> bool:
    return flag.startswith("--algorithm.") and not flag.endswith(".add")


def preset_or_file(name: str, flags: Sequence[str] = ()) -> RunConfig:
    """The config that a name or a file stands for. `flags` may name what a file leaves out, a model or data."""
    if name.endswith(".toml"):
        with refusing(), said_later():
            config = load_run(name)
        if not asks_for_help(flags):
            refuse_half(name, named([name, *flags]))
        return config
    chosen = preset(name)
    if chosen is None:
        refuse(no_such_preset(name, [preset.name for preset in PRESETS]))
    if isinstance(chosen, PipelineConfig):
        refuse(f"{name} is a chain of runs, not one: proximo train {name}, without an algorithm")
    return chosen


def algorithm_file(name: str) -> Algorithm:
    """The algorithm of a run's config, or one that is a file of its own; ValueError says what is wrong with it."""
    path = Path(name)
    try:
        is_run = path.is_file() and "algorithm" in tomllib.loads(read_file(without_links(path)).decode("utf-8-sig"))
    except ValueError:
        is_run = False  # toml.load says what is wrong
    with said_later():
        return load_run(name).algorithm if is_run else toml.load(name, Algorithm)


def preset(name: str) -> RunConfig | PipelineConfig | None:
    return next((preset.config for preset in PRESETS if preset.name == name), None)


def _with_judge(mix: RewardMix, path: str, task_weight: str | None) -> RewardMix:
    """Rewarded by a reward model too; the weight of the task's verdict is taken at once, as 0 may be the only one."""
    with refusing():
        weight = mix.task if task_weight is None else read_number("--rewards.task", task_weight, float)
        return replace(mix, task=weight, models=(*mix.models, RewardModel(path)))
