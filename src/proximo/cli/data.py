"""`--data` and `--eval-data`: the task of data that a person has, recognised and said line by line."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proximo.cli.arguments import asks_for_help, read_number, refuse, refusing, say, take_all, take_several, take_switch
from proximo.cli.flags import read_flags
from proximo.environments.kinds import Acting, EnvironmentOptions
from proximo.models import load_tokenizer
from proximo.models.shipped import resolve
from proximo.rewards import ExactMatch, Reward, reward_named
from proximo.rl.reward_config import RewardMix
from proximo.tasks import Mixture, TaskOptions
from proximo.tasks.sources.mixture import with_reward
from proximo.tasks.sources.opening import open_data
from proximo.tasks.sources.recognising import Chosen

SCHEDULE, METRICS = "--schedule", "--metrics"
DATA_FLAGS = """model, data and reward:
  --model MODEL         model to train: a folder, a hub id, or the name of one that ships with Proximo
  --data DATA ...       train on a .jsonl, .json, .parquet, .csv, .tsv or .arrow file, a pattern, a folder or a hub id;
                        the shapes of TRL, verl, open-instruct, verifiers and GSM8K are recognised, and a line says
                        how.
                        Several are mixed by weight: --data math.jsonl=0.7 code.jsonl=0.3
  --eval-data DATA ...  evaluate on these and hold out nothing of the others; NAME=DATA names one in the metrics
  --reward REWARD ...   FILE.py:FUNCTION, in TRL's, verl's or verifiers' form, or ExactMatch or MathVerify, in the place
                        of the verdict on the data's answers; several are added up, FILE.py:FUNCTION=WEIGHT

"""
STEP_FLAGS = f"""numbers that change, and metrics:
  {SCHEDULE} FIELD=SCHEDULE ...
                        numbers that change from step to step, such as algorithm.gate.high=linear:0.28:0.2 or
                        temperature=cosine:1.0:0.7:50 (in 50 steps); also constant:VALUE, piecewise:VALUE:STEP:VALUE
                        and FILE.py:FUNCTION, called as f(step, steps)
  {METRICS} FILE.py:FUNCTION ...
                        measure what each step has sampled: f(prompts, completions, **columns) gives a list of numbers
                        or a dict of such lists and of numbers, which are logged as user/NAME

"""
TASK = "--task."


@dataclass(frozen=True)
class _Played:
    """A config's environment alone, so that its flags can be read before the others are."""

    environment: EnvironmentOptions


def take_environment(
    arguments: list[str], environment: EnvironmentOptions, prog: str = "proximo train"
) -> EnvironmentOptions:
    """The environment of a config with what flags change in it, which are removed if --data is given: whether data
    need answers depends on it."""
    if take_several(list(arguments), "--data") is None or asks_for_help(arguments):
        return environment
    flags, others, is_its = [], [], False
    for each in arguments:
        is_its = each.startswith("--environment.") if each.startswith("--") else is_its
        (flags if is_its else others).append(each)
    arguments[:] = others
    return read_flags(_Played(environment), flags, prog=prog)[0].environment


def take_rewards(arguments: list[str]) -> list[Reward | tuple[Reward, float]]:
    """Rewards that --reward names, FILE.py:FUNCTION or one of ours, each alone or as NAME=WEIGHT; the flag is removed
    from the arguments."""
    rewards = []
    for flag in ("--reward", "--rewards"):
        for given in take_several(arguments, flag) or ():
            name, _, weight = given.partition("=")
            with refusing(about=f"{flag} {given}"):
                reward = reward_named(name)
            rewards.append((reward, read_number(flag, weight, float)) if weight else reward)
    return rewards


def take_schedules(arguments: list[str]) -> dict[str, str]:
    """Schedules that --schedule names, by their fields; the flag is removed from the arguments."""
    pairs = dict[str, str]()
    for each in take_all(arguments, SCHEDULE):
        field, equals, schedule = each.removeprefix("--").partition("=")
        if not equals:
            refuse(f"{SCHEDULE} {each}: give FIELD=SCHEDULE, such as temperature=linear:1.0:0.7")
        pairs[field.replace("-", "_")] = schedule
    return pairs


def is_rewarded(rewards: RewardMix, environment: EnvironmentOptions) -> bool:
    """True if something else is rewarded in the place of the data's answers."""
    has_functions = rewards.task == 0 and not rewards.models
    return has_functions or (isinstance(environment, Acting) and environment.scores)


def take_task(
    arguments: list[str], model: str, *, rewarded: bool = False, watched: bool = False, held_out: float | None = None
) -> TaskOptions | None:
    """The task that --data names, removed from the arguments; None where it is not given. Flags of the task decide
    what they name, and stay. `rewarded` says whether something else than the data's answers is rewarded, `watched`
    whether a reward model is and answers are graded where there are any, `held_out` the share that is held out where
    no flag says it."""
    data, evaluation = take_several(arguments, "--data"), take_several(arguments, "--eval-data")
    if (data is None and evaluation is None) or asks_for_help(arguments):
        return None
    if data is None:
        refuse("--eval-data goes with --data: give the data to train on too")
    if _peeked(arguments, "type"):
        refuse("--data and --task.type: give one of them; --data chooses the task itself")
    chosen = replace(_chosen(arguments, rewarded, held_out), only_watched=watched)
    with refusing():
        opened = open_data(data, evaluation or (), chosen, chat=_has_chat_template(_model(arguments) or model))
    for line in opened.lines:
        say(line)
    _take_applied(arguments, APPLIED if isinstance(opened.task, Mixture) else APPLIED[:1])
    if not (reward := _peeked(arguments, "reward.type")):
        return opened.task
    # Stands for the reward that the flags name, and is replaced when they are read. Answers that nothing rewards may be
    # left ungraded at once: what chooses by a verdict would refuse one.
    is_ungraded = watched and reward[0].lower() == "none"
    return with_reward(opened.task, None if is_ungraded else ExactMatch())


APPLIED = (
    "chat-template-kwargs",
    "prompt-column",
    "answer-columns",
    "held-out",
    "template",
    "system",
    "chat",
    "no-chat",
)
"""Flags of a file that apply to each of several sources. Of the first, tyro knows only one flag for each key then."""


def _take_applied(arguments: list[str], names: Sequence[str]) -> None:
    """Remove flags that have been applied, where they are none of the task that was made."""
    for name in names:
        for flag in (f"{TASK}{name}", f"{TASK}{name.replace('-', '_')}"):
            if name.endswith("chat"):
                take_switch(arguments, flag)
            else:
                take_several(arguments, flag)


def _chosen(arguments: Sequence[str], rewarded: bool, held_out: float | None) -> Chosen:
    share = _peeked(arguments, "held-out")
    columns = _peeked(arguments, "answer-columns")
    named = _peeked(arguments, "chat-template-kwargs")
    return Chosen(
        prompt_column=next(iter(_peeked(arguments, "prompt-column")), None),
        answer_columns=tuple(columns) or None,
        held_out=_number_or_path(share[0]) if share else held_out,
        template=next(iter(_peeked(arguments, "template")), ""),
        system=next(iter(_peeked(arguments, "system")), ""),
        chat=True if f"{TASK}chat" in arguments else False if f"{TASK}no-chat" in arguments else None,
        chat_template_kwargs={name: _value(text) for name, text in zip(named[::2], named[1::2], strict=False)},
        has_reward=bool(_peeked(arguments, "reward.type")) or rewarded,
    )


def _peeked(arguments: Sequence[str], field: str) -> list[str]:
    """The values of a flag of the task; it stays among the arguments."""
    for flag in (f"{TASK}{field}", f"{TASK}{field.replace('-', '_')}"):
        if (values := take_several(list(arguments), flag)) is not None:
            return values
    return []


def _model(arguments: Sequence[str]) -> str | None:
    values = take_several(list(arguments), "--model")
    return values[0] if values else None


def _value(text: str) -> bool | int | float | str:
    """Value of an argument of a chat template, as tyro reads it."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        return _number_or_path(text)


def _number_or_path(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _has_chat_template(model: str) -> bool:
    with refusing(OSError):
        return load_tokenizer(resolve(model)).chat_template is not None
