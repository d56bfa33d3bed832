"""Settings by one word, as keyword arguments: `learning_rate=1e-6` for the field training.learning_rate."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypedDict, TypeVar

from proximo.config.unions import classes, kinds_of
from proximo.config.vocabulary import WORDS, field_of, foreign
from proximo.models.adapters.lora import Lora

Config = TypeVar("Config")
WITHOUT_TABLE = ("seed", "dtype")
"""Fields without a table that are settings, too."""
ELSEWHERE = ("environment", "tools", "max_turns", "epochs")
"""Words that are arguments of their own, or set more than a field."""
LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""Fields of peft's LoraConfig, and ours."""
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
    """A rank, a proximo.Lora or peft's LoraConfig."""
    system: str
    template: str
    chat: bool
    warmup_steps: int
    weight_decay: float
    token_budget: int
    seed: int
    dtype: str


def refuse_unknown(settings: Mapping[str, object], function: str) -> None:
    """Raise TypeError for a name that is no setting; another library's is answered with ours."""
    for name in settings:
        if name in Settings.__annotations__:
            continue
        if (answer := foreign(name)) is None:
            known = ", ".join(word.name for word in WORDS)
            raise TypeError(f"{name}: {function} takes no such argument; settings by one word are {known}")
        raise TypeError(f"{name}: {_here(answer.ours, answer.remark)}")


def _here(ours: str, remark: str) -> str:
    if not ours:
        return remark
    how = ours if "." not in ours else f"`settings={{'{ours}': ...}}`"
    return f"here it is {how}{remark and f', {remark}'}"


def with_settings(config: Config, settings: Mapping[str, Any], more: Mapping[str, Any]) -> Config:
    """The config with its settings changed: `settings` by their words, `more` by the dotted names of fields."""
    for word, value in settings.items():
        if word in ELSEWHERE:
            continue
        if word == "lora" and not isinstance(value, int):
            config = _changed(config, adapter=as_lora(value))
            continue
        path = word if word in WITHOUT_TABLE else field_of("train", word)
        assert path, f"{word} is a setting without a field"
        config = set_field(config, path, value, word)
    for path, value in more.items():
        config = set_field(config, path, value, path)
    return config


def set_field(value: Config, path: str, new: object, name: str) -> Config:
    """The value with another one in the field at a dotted path; `name` is what the user called it. A table that is not
    there, and can be of one class only, is added."""
    field, _, rest = path.partition(".")
    kinds = kinds_of(type(value)) if is_dataclass(value) else {}
    if field not in kinds:
        there = f"; {type(value).__name__} has {', '.join(kinds)}" if kinds else ""
        raise ValueError(f"{name} is {new!r}: this run has no such field{there}")
    if not rest:
        return _changed(value, **{field: new})
    held, known = vars(value)[field], classes(kinds[field])
    if held is None and len(known) == 1:
        held = known[0]()
    return _changed(value, **{field: set_field(held, rest, new, name)})


def as_lora(given: Any) -> Lora | None:
    """A LoRA adapter as it is, or the one that peft's LoraConfig describes; ValueError for what is not trained here."""
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


def _changed(value: Config, **changes: Any) -> Config:
    return replace(value, **changes)  # pyright: ignore[reportArgumentType]
