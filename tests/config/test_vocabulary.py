"""The words of a run: each is one field of each kind of config, of the type that it says."""

import re
import runpy
import types
import typing

import pytest

from proximo.api.evaluating import EvalConfig
from proximo.config.unions import classes, kinds_of, union_members
from proximo.config.vocabulary import BY_NAME, FOREIGN, WORDS, field_of, fields_by_word, foreign, kind_of, words_of
from proximo.rl.config import RunConfig
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from tests import ROOT

CONFIGS = {
    "train": RunConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward-model": RewardModelConfig,
    "eval": EvalConfig,
}
TYPES = {"INT": int, "[INT]": int, "FLOAT": float, "STR": str, "STR ...": str, "": bool}


def types_at(kind: type, path: str) -> set[type]:
    """The types of the fields at a dotted path, in all classes that may stand on the way."""
    here: list[object] = [kind]
    for name in path.split("."):
        here = [
            member
            for each in here
            for member in union_members(kinds_of(each).get(name, types.NoneType))  # pyright: ignore[reportArgumentType]
            if member is not types.NoneType
        ]
        tables = [table for each in here for table in classes(each)]
        here = list[object](tables) or here
    return {typing.get_args(each)[0] if typing.get_origin(each) is tuple else each for each in here}  # pyright: ignore


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_word_is_a_field_of_the_type_that_it_takes(kind):
    fields = [field for _, field in words_of(kind) if field]
    assert len(set(fields)) == len(fields) > 1
    for word, field in words_of(kind):
        if field:
            assert types_at(CONFIGS[kind], field) == {TYPES[word.takes]}, word.name
    assert not {field.partition(".")[0] for field in fields} - set(kinds_of(CONFIGS[kind]))


def test_a_word_is_found_by_both_spellings():
    assert field_of("train", "lr") == field_of("train", "learning_rate") == "training.learning_rate"
    assert fields_by_word("sft")["lr"] == "fit.learning_rate"
    assert field_of("sft", "group_size") is None
    assert "epochs" not in fields_by_word("train")
    assert kind_of("init") == kind_of("fork") == "train"
    assert kind_of("bench") is None


def test_names_of_others_are_no_words_and_lead_to_something_that_is_there():
    assert not set(FOREIGN) & (set(BY_NAME) - {"beta"})
    own = {
        "model",
        "data",
        "eval_data",
        "run",
        "reward",
        "steps",
        "dtype",
        "track",
        "ranks",
        "algorithm",
        "reward_model",
        "reference",  # of dpo
    }
    for name, answer in FOREIGN.items():
        first, _, rest = answer.ours.partition(".")
        if not answer.ours:
            assert answer.remark, name
        elif answer.ours not in {*BY_NAME, *own}:
            assert types_at(RunConfig, answer.ours.removesuffix(".type")), name
            assert first in kinds_of(RunConfig), name
            assert rest, name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "group_size"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("+data.train_batch_size", "batch"),
        ("actor_rollout_ref.actor.optim.lr", "learning_rate"),
        ("critic.optim.lr", "value.learning_rate"),
        ("trainer.total_epochs", "epochs"),
        ("--n-samples-per-prompt", "group_size"),
        ("init_kl_coef", "kl"),
        ("num_iterations", "training.epochs"),
        ("gradient_accumulation_steps", ""),
    ],
)
def test_other_libraries_names(theirs, ours):
    answer = foreign(theirs)
    assert answer is not None
    assert answer.ours == ours


def test_every_word_says_what_it_is():
    assert all(word.meaning and word.takes in TYPES for word in WORDS)


def test_the_guides_tables_are_written_from_the_words():
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    page = (ROOT / "docs" / "guides" / "command-line.md").read_text()
    rows = re.compile(r"^\| (?:`--lr`|`--learning-rate`|.*`num_generations`).*\n", re.MULTILINE)
    assert len(rows.findall(page)) == 2
    assert script["command_line"](rows.sub("", page)) == page
