"""Prompts of a file are checked before a model loads; that all of many fit is found once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl.config import RunConfig
from proximo.rl.preflight import prompts
from proximo.rl.preflight.prompts import check_prompts
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import File
from tests.models.test_architectures import built


@pytest.fixture
def checked(tmp_path: Path, monkeypatch) -> list[str]:
    """Prompts that were tokenised; however few and quick they are, it is remembered that they fit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "MANY", 0)
    monkeypatch.setattr(prompts, "SECONDS", -1.0)
    tiny_model().config.save_pretrained(tmp_path / "model")
    asked, tokens = [], prompts.each_prompt_tokens
    monkeypatch.setattr(
        prompts,
        "each_prompt_tokens",
        lambda tokenizer, problems, *more: (
            asked.extend(each.prompt for each in problems) or tokens(tokenizer, problems, *more)
        ),
    )
    return asked


def config_of(path: Path, rows: list[dict[str, str]], **more: Any) -> RunConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(task=File(str(path), skip_bad=True, **more), sampling=SamplingOptions(max_tokens=8))


ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]


def test_that_all_prompts_fit_is_found_once(tmp_path, checked):
    tokenizer, model = tiny_tokenizer(), str(tmp_path / "model")
    for _ in range(2):
        assert check_prompts(config_of(tmp_path / "a.jsonl", ROWS), model, tokenizer) == []
        assert sorted(checked) == sorted(row["prompt"] for row in ROWS)
    check_prompts(config_of(tmp_path / "b.jsonl", [*ROWS, {"prompt": "more", "answer": "1"}]), model, tokenizer)
    assert "more" in checked
    checked.clear()
    longer = replace(config_of(tmp_path / "a.jsonl", ROWS), sampling=SamplingOptions(max_tokens=9))
    check_prompts(longer, model, tokenizer)
    tokenizer.add_tokens(["+1"])
    check_prompts(longer, model, tokenizer)
    assert len(checked) == 2 * len(ROWS)


def test_prompts_that_do_not_fit_are_named_each_time(tmp_path, checked):
    tokenizer, model = tiny_tokenizer(), str(tmp_path / "model")
    built("gpt2").config.save_pretrained(model)  # which has 64 positions
    rows = [*ROWS, {"prompt": "1" * 60, "answer": "1"}]
    for number in (1, 2):
        [line] = check_prompts(config_of(tmp_path / "a.jsonl", rows, held_out=0), model, tokenizer)
        assert "the prompt has 60 tokens" in line
        assert len(checked) == number * len(rows)
