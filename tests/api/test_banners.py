"""The banner of a run: what it says of the config, the data and the grader, and how hostile text is shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proximo.api import training
from proximo.api.banners import Opening, planned, run_lines, shortened
from proximo.environments.kinds import MultiTurn
from proximo.models.tiny import tiny_model, tiny_tokenizer
from proximo.recipes.defaults import Default
from proximo.recipes.presets import ARITHMETIC
from proximo.rewards import ExactMatch
from proximo.rl.config import RunConfig
from proximo.rl.preflight.calibration import Calibration
from proximo.rl.preflight.preflight import rehearse
from proximo.rl.preflight.prompts import PromptLengths
from proximo.rl.schedules import Linear
from proximo.runs.banner import banner
from proximo.tasks import File

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def lines_of(config: RunConfig, opening: Opening | None = None) -> dict[str, str]:
    rehearsal = rehearse(config)
    plan = planned(config, rehearsal.checked.tokenizer)
    return dict(run_lines(config, rehearsal.checked, plan, rehearsal.calibration, opening or Opening("runs/a")))


@pytest.fixture(scope="module")
def templated(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("templated")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64).save_pretrained(folder)
    return str(folder)


def test_the_demo_in_lines():
    chosen = [Default("training.learning_rate", 2e-5, "as measured"), Default("training.groups", 32, "many")]
    lines = lines_of(ARITHMETIC, Opening("runs/a", chosen, "a flag changes each"))
    assert lines["model"] == "tiny-arithmetic: policy (801 k, trained), reference (801 k, frozen); float32 on cpu"
    assert lines["algorithm"].startswith("grpo; ")
    assert lines["algorithm"].endswith("ratios clipped to 0.8 to 1.2; KL 0.04 in the loss")
    assert lines["data"] == "Arithmetic: problems without end to train on, 1,000 held out"
    assert lines["prompt"] == "6 tokens, '55+66='"
    assert lines["lengths"].endswith(
        "/ 6 / 6 tokens in prompts (min / median / 95 % / max, of 256 looked at); the context has 4,096"
    )
    assert lines["reward"].startswith("1 for the reference answer '121', 0 for ")
    assert lines["step"] == "32 prompts × 8 completions = 256 of at most 8 tokens; 4 updates of 64 completions each"
    assert lines["run"] == "150 steps: 600 updates, 38,400 completions, at most 307,200 tokens"
    assert lines["learning rate"] == "2e-05, constant after 2 steps of warm-up: as measured"
    assert "150 steps " in lines["memory, time"]
    assert lines["chosen"] == "for this model and data, a flag changes each: learning_rate, batch"
    assert lines["environment"] == ""


def test_numbers_that_follow_a_schedule_are_said_with_their_ends():
    assert lines_of(ARITHMETIC)["schedules"] == ""
    config = replace(ARITHMETIC, steps=5, schedules={"algorithm.gate.high": Linear(0.28, 0.2)})
    assert lines_of(config)["schedules"] == "algorithm.gate.high 0.28 at step 1, 0.2 at 5"


def test_a_templates_special_tokens_are_seen_and_a_files_text_is_inert(templated: str, tmp_path: Path):
    rows = [{"question": f"What is {n} + {n}?\x1b[2J\u202e", "answer": str(2 * n)} for n in range(9)]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": None}]))
    task = File(
        str(file), prompt_column="question", chat=True, held_out=0.2, skip_bad=True, reward=ExactMatch(last_number=True)
    )
    lines = lines_of(replace(ARITHMETIC, model=templated, task=task))
    assert "'<|user|>\\nWhat is " in lines["prompt"]
    assert lines["prompt"].endswith("<end>\\n<|assistant|>\\n'")
    assert lines["data"].startswith("File ")
    assert lines["data"].endswith(" held out, 1 bad row left out; in memory, all checked")
    for line in banner(list(lines.items()), 80):
        assert line.isprintable()


def test_an_environment_is_named_with_what_was_changed():
    config = replace(
        ARITHMETIC,
        model="tiny-agent",
        environment=MultiTurn("proximo.environments.examples:NumberGuessing", max_turns=5, max_turn_tokens=4),
    )
    lines = lines_of(replace(config, sampling=replace(config.sampling, max_tokens=40)))
    shown = "MultiTurn, path proximo.environments.examples:NumberGuessing, max_turns 5, max_turn_tokens 4"
    assert lines["environment"] == shown


def test_a_long_prompt_shows_its_beginning_and_its_end():
    shown = shortened("begin " + "x" * 5000 + " end\n")
    assert shown.startswith("'begin xxx")
    assert shown.endswith(" end\\n'")
    assert " … 4,211 more characters … " in shown
    assert shortened("a\n" * 100) == repr("a\n" * 100)


@pytest.mark.parametrize(("share", "tokens"), [(0.0, 1), (0.5, 10), (0.95, 19), (1.0, 20)])
def test_shares_of_prompt_lengths(share: float, tokens: int):
    lengths = PromptLengths(tuple(range(1, 21)), 20)
    assert lengths.quantile(share) == tokens
    assert lengths.is_whole
    assert PromptLengths((7,), None).quantile(share) == 7
    assert not PromptLengths((7,), None).is_whole


def test_a_run_that_cannot_be_predicted_begins_all_the_same(monkeypatch):
    def fails(*_: object) -> None:
        raise AttributeError("no such shape")

    monkeypatch.setattr(training, "planned", fails)
    told: list[str] = []
    checked = rehearse(ARITHMETIC).checked
    training._banner(ARITHMETIC, checked, Opening("runs/a"), told.append)(Calibration([]))
    assert told == ["memory and time are not predicted: no such shape"]
    training._banner(ARITHMETIC, checked, None, told.append)(Calibration([]))  # quiet: nothing is predicted
    assert len(told) == 1
