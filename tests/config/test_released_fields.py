"""Every field that a released version's config could have still opens: under its name, or by an entry in RENAMED.

`python -m tests.config.test_released_fields` adds today's fields to the list; a release asks for that.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

import proximo
from proximo.config.aliases import RENAMED
from proximo.config.unions import classes, given_fields
from proximo.recipes.pipeline.config import PipelineConfig
from proximo.rl.config import RunConfig
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig

LIST = Path(__file__).with_name("released_fields.txt")
CONFIGS = {
    "run": RunConfig,
    "sft": SftConfig,
    "reward-model": RewardModelConfig,
    "dpo": DpoConfig,
    "pipeline": PipelineConfig,
}
"""What run folders and users' own TOML files hold."""


def fields_of(kind: type, path: str = "", inside: tuple[type, ...] = ()) -> Iterator[str]:
    """Dotted names of a config's fields, "gate:Clip.low" for a field of one of several classes; what a class holds of
    its own kind is left out."""
    for field, hint in given_fields(kind):
        yield f"{path}{field.name}"
        listed = [part for part in get_args(hint) if part is not ...] if get_args(hint)[1:] == (...,) else [hint]
        held = [each for part in listed for each in classes(part)]
        for each in set(held) - {kind, *inside}:
            chosen = f":{each.__name__}" if len(held) > 1 else ""
            yield from fields_of(each, f"{path}{field.name}{chosen}.", (*inside, kind))


def today() -> set[str]:
    """Every field of today's configs, behind the config's name."""
    return {f"{name} {field}" for name, config in CONFIGS.items() for field in fields_of(config)}


def lost(released: set[str], fields: set[str], renamed: Mapping[str, str]) -> list[str]:
    """Released fields that no longer open, by the entries of RENAMED. One that was listed when its table could hold a
    single class needs no class today."""
    fields = fields | {re.sub(r":\w+", "", entry) for entry in fields}
    return sorted(entry for entry in released if renewed(entry, renamed) not in fields)


def renewed(entry: str, renamed: Mapping[str, str]) -> str:
    """The entry with today's name of its field, and of the tables that it is in."""
    config, field = entry.split()
    parts = field.split(".")
    old = [part.partition(":")[0] for part in parts]
    for end in range(len(parts)):
        if (new := renamed.get(".".join(old[: end + 1]))) is not None:
            parts[end] = new + parts[end].removeprefix(old[end])
    return f"{config} {'.'.join(parts)}"


def released() -> tuple[str, set[str]]:
    """The version that the list was written at, and every field up to then."""
    version, *entries = LIST.read_text().splitlines()
    return version, set(entries)


def test_every_released_field_has_its_name_or_an_entry():
    assert lost(released()[1], today(), RENAMED) == [], "give config/aliases.py an entry in RENAMED"


def test_the_list_is_of_this_version():
    assert released()[0] == proximo.__version__, (
        "a release adds its fields: python -m tests.config.test_released_fields"
    )


def test_a_renamed_field_is_noticed_until_it_has_an_entry():
    fields = today() - {"run training.learning_rate"} | {"run training.rate"}
    assert lost(released()[1], fields, RENAMED) == ["run training.learning_rate"]
    assert lost(released()[1], fields, RENAMED | {"training.learning_rate": "rate"}) == []
    assert lost(released()[1], fields, RENAMED | {"training.learning_rate": "rates"}) != []
    fields = today() - {"run algorithm.gate:Clip.low"} | {"run algorithm.gate:Clip.lower"}
    assert lost(released()[1], fields, RENAMED) == ["run algorithm.gate:Clip.low"]
    assert "run algorithm.gate:CappedScore.low" in lost(released()[1], fields, {"algorithm.gate.low": "lower"})


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_every_entry_leads_to_a_field(old: str, new: str):
    table = old.rpartition(".")[0]
    current = f"{table}.{new}" if table else new
    assert any(entry.split()[1] == current for entry in today())
    assert any(entry.split()[1] == old for entry in released()[1])


if __name__ == "__main__":
    known = released()[1] if LIST.exists() else set()
    LIST.write_text("\n".join([proximo.__version__, *sorted(known | today())]) + "\n")
