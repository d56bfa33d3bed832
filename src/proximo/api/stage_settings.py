"""Settings of stages by one word, as keyword arguments: `lr=1e-5` for the field fit.learning_rate."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict, TypeVar

from proximo.api.settings import WITHOUT_TABLE, as_lora, no_such_argument
from proximo.config.unions import walk, with_fields
from proximo.config.vocabulary import field_of, foreign, names_in_stages, words_of
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.schedule import fit_length
from proximo.supervised.sft import SftConfig

ARGUMENTS = (
    *("data", "run", "model", "evaluation_data", "resume", "allow_change", "accept_lost_rows", "track", "notify"),
    *("quiet", "dry_run", "settings"),
)
"""Arguments of each stage that are no settings."""
Config = TypeVar("Config", DpoConfig, RewardModelConfig, SftConfig)


class StageSettings(TypedDict, total=False):
    """Settings of a stage by one word; the fields that they stand for are in proximo/config/vocabulary.py."""

    learning_rate: float
    lr: float
    max_tokens: int
    batch: int
    epochs: float
    steps: int
    lora: Any
    """A rank, True, a proximo.Lora or peft's LoraConfig."""
    warmup_steps: int
    weight_decay: float
    token_budget: int
    seed: int
    dtype: str


class DpoSettings(StageSettings, total=False):
    """Settings of DPO, which has one more."""

    beta: float


def with_stage_settings(
    kind: str, config: Config, settings: Mapping[str, Any], more: Mapping[str, Any] | None
) -> Config:
    """The config with its settings changed: `settings` by their words, `more` by the dotted names of fields. TypeError
    for names that are no words, with a line for each; another library's is answered with ours."""
    unknown = [name for name in settings if name not in WITHOUT_TABLE and field_of(kind, name) is None]
    if unknown:
        raise TypeError("\n".join(f"{name}: {_answer(kind, config, name)}" for name in unknown))
    if not isinstance(rank := settings.get("lora"), int) or isinstance(rank, bool):
        config = replace(config, adapter=as_lora(rank)) if "lora" in settings else config
        settings = {word: value for word, value in settings.items() if word != "lora"}
    named = {word if word in WITHOUT_TABLE else field_of(kind, word): value for word, value in settings.items()}
    given = {field: value for field, value in named.items() if field} | dict(more or {})
    config = replace(config, fit=fit_length(config.fit, given))
    return with_fields(config, given)


def _answer(kind: str, config: Config, name: str) -> str:
    """Advice for a name that is no word of a stage."""
    words = (each for word, _ in words_of(kind) for each in (word.name, word.also) if each)
    unknown = no_such_argument(name, kind.replace("-", "_"), [*ARGUMENTS, *words, *WITHOUT_TABLE])
    if (answer := foreign(name, kind)) is None:
        return unknown
    if not answer.ours:
        return answer.remark
    here = next(_here(kind, config, answer.ours), None)
    return unknown if here is None else f"here it is {here}{answer.remark and f', {answer.remark}'}"


def _here(kind: str, config: Config, ours: str) -> Iterator[str]:
    """Ways to give what a word or a field of training is in a stage; none where the stage has no such thing."""
    if field_of(kind, ours) is not None or ours in (*ARGUMENTS, *WITHOUT_TABLE):
        yield ours
    if ours == "data.held_out":
        yield "evaluation_data"
    fields = {path for path, _, _ in walk(config)}
    for field in names_in_stages(ours):
        if field in fields:
            yield f"`settings={{'{field}': ...}}`"
