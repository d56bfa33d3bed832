"""Settings by one word, as keyword arguments: `learning_rate=1e-6` for the field training.learning_rate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypedDict

from proximo.config.unions import with_fields
from proximo.config.vocabulary import field_of, foreign
from proximo.models.adapters.lora import Lora
from proximo.rewards.metrics import Given, with_metrics
from proximo.rl.config import RunConfig
from proximo.rl.schedules import Changing, with_schedules

EXAMPLE = "linear:1.0:0.7"
OF_COMMANDS = {"dry_run": "nothing is trained here; `proximo.train(...)` takes it, with the same arguments"}
"""Answers to flags of the command line that are no arguments."""
IN_PYTHON = {"eval_data": "evaluation_data"}
"""Words of the command line that are arguments under another name."""
WITHOUT_TABLE = ("seed", "dtype")
"""Fields without a table that are settings, too."""
LORA = ("r", "lora_alpha", "target_modules")
"""Fields of peft's LoraConfig that an adapter of ours has, too."""
NOT_TRAINED = (
    "task_type",
    "peft_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
)
"""Fields of peft's LoraConfig that say nothing about training."""


class Settings(TypedDict, total=False):
    """Settings of a run by one word; the fields that they stand for are in proximo/config/vocabulary.py."""

    learning_rate: float
    lr: float
    max_tokens: int
    group_size: int
    batch: int
    epochs: float
    temperature: float
    kl: float
    lora: Any
    """A rank, True, a proximo.Lora or peft's LoraConfig."""
    system: str
    template: str
    chat: bool
    warmup_steps: int
    weight_decay: float
    token_budget: int
    seed: int
    dtype: str


def refuse_unknown(settings: Mapping[str, object], function: Callable[..., object]) -> None:
    """Raise TypeError for names that are no settings, with a line for each; another library's is answered with
    ours."""
    known = [name for name in signature(function).parameters if name != "words"]
    unknown = [name for name in settings if name not in Settings.__annotations__]
    if unknown:
        raise TypeError("\n".join(f"{name}: {_answer(name, function.__name__, known)}" for name in unknown))


def _answer(name: str, function: str, known: Sequence[str]) -> str:
    """Advice for a name that is no argument of a function."""
    if name in OF_COMMANDS:
        return OF_COMMANDS[name]
    answer = foreign(name, "train")
    if answer is None or (how := _here(answer.ours, known)) is None:
        return no_such_argument(name, function, [*known, *Settings.__annotations__])
    return ", ".join(filter(None, (how, answer.remark)))


def no_such_argument(name: str, function: str, known: Sequence[str]) -> str:
    """Complaint about an argument that a function does not take, with those that it takes."""
    close = get_close_matches(name, known, n=1)
    perhaps = f", the nearest is {close[0]}" if close else ""
    return f"{function} takes no such argument{perhaps}; it takes {', '.join(known)}"


def _here(ours: str, known: Sequence[str]) -> str | None:
    """Way to give what a word or field is; None where there is none, empty where nothing has to be given."""
    name = IN_PYTHON.get(ours, ours)
    if not name or name in known or name in Settings.__annotations__:
        return name and f"here it is {name}"
    return f"here it is `settings={{'{name}': ...}}`" if "." in name else None


def with_settings(config: RunConfig, settings: Mapping[str, Any], more: Mapping[str, Any]) -> RunConfig:
    """The config with its settings changed: `settings` by their words, `more` by the dotted names of fields."""
    if not isinstance(rank := settings.get("lora"), int) or isinstance(rank, bool):
        config = replace(config, adapter=as_lora(rank)) if "lora" in settings else config
        settings = {word: value for word, value in settings.items() if word != "lora"}
    named = {word if word in WITHOUT_TABLE else field_of("train", word): value for word, value in settings.items()}
    return with_fields(config, {field: value for field, value in named.items() if field} | dict(more))


def scheduled(config: RunConfig, schedules: Mapping[str, Changing] | None) -> RunConfig:
    """The config with schedules for these fields, added to those that it has."""
    if not schedules:
        return config
    if not isinstance(schedules, Mapping):
        raise TypeError(f"schedules is {schedules!r}: give a dict of fields, such as {{'temperature': '{EXAMPLE}'}}")
    return replace(config, schedules=with_schedules(schedules, config.schedules, config.steps))


def measured(config: RunConfig, metrics: "Given | Sequence[Given] | None") -> RunConfig:
    """The config with metrics of a user's own, added to those that it has."""
    return config if metrics is None else replace(config, metrics=with_metrics(metrics, config.metrics))


def as_lora(given: Any) -> Lora | None:
    """A LoRA adapter as it is, or the one that peft's LoraConfig describes; ValueError for what is not trained here."""
    if isinstance(given, bool):
        return Lora() if given else None
    if given is None or isinstance(given, Lora):
        return given
    if type(given).__name__ != "LoraConfig" or not hasattr(given, "__dataclass_fields__"):
        raise TypeError(f"lora is {given!r}: give a rank, a proximo.Lora or peft's LoraConfig")
    plain = type(given)()
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in {*LORA, *NOT_TRAINED} and value != getattr(plain, field.name):
            raise ValueError(
                f"lora has {field.name} {value!r}, which is not there: leave it out, or give a proximo.Lora"
            )
    targets = given.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(f"lora has target_modules {targets!r}, a pattern: give the names of the layers as a list")
    names = () if isinstance(targets, str) or targets is None else tuple(sorted(targets))
    return Lora(rank=given.r, alpha=given.lora_alpha, targets=names)
