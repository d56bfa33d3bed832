"""Rows beyond a model's reach are refused in one line wherever their length is known; up to it everything is exact."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from proximo.data import DataFile, Mistakes
from proximo.data.examples import read_examples
from proximo.models import load_model, score, tiny_tokenizer
from proximo.models.context_length import reach_of
from proximo.models.reward_models import completion_scores
from proximo.rl.config import RunConfig
from proximo.rl.preflight.prompts import check_prompts
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.encoding import prepare
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Request
from tests.models.test_architectures import built, by_itself

pytestmark = pytest.mark.filterwarnings("ignore::proximo.models.PaddedFallback")
TOKENIZER = tiny_tokenizer()
ORIGINAL = 24
DYNAMIC = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
}
LONGROPE = {
    "max_position_embeddings": 96,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": ORIGINAL,
    },
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", LONGROPE),
    "llama, longrope": ("llama", LONGROPE),
    "llama, dynamic": ("llama", DYNAMIC),
    "qwen2, dynamic": ("qwen2", DYNAMIC),
}
PROMPT = (7, 20, 33, 41)


@pytest.fixture(params=KINDS)
def reference(request) -> PreTrainedModel:
    """As transformers builds it."""
    name, more = KINDS[request.param]
    return built(name, **more)


@pytest.fixture
def model(reference, tmp_path) -> PreTrainedModel:
    """The same, as we load it."""
    reference.save_pretrained(tmp_path / "model")
    return load_model(str(tmp_path / "model"))


def scored(model: PreTrainedModel, lengths: list[int], layout: Any = "packed") -> torch.Tensor:
    tokens = torch.arange(len(lengths) * max(lengths)).reshape(len(lengths), -1) % 60 + 5
    group, counts = torch.zeros(len(lengths), dtype=torch.long), torch.tensor(lengths)
    with torch.no_grad():
        return score(model, prompts=[PROMPT], tokens=tokens, lengths=counts, group=group, layout=layout).logprobs


def test_at_the_original_length_a_row_is_what_it_is_alone(model, reference):
    most = ORIGINAL - len(PROMPT)
    whole, long = scored(model, [3, most]), tuple((torch.arange(most, 2 * most) % 60 + 5).tolist())
    for layout in ("packed", "padded"):
        rows = scored(model, [3, most], layout)
        torch.testing.assert_close(rows, whole, atol=2e-5, rtol=0)
        torch.testing.assert_close(rows[1], by_itself(reference, PROMPT, long), atol=2e-5, rtol=0)


def test_a_long_call_from_elsewhere_moves_no_frequency(model, reference):
    most, tokens = ORIGINAL - len(PROMPT), tuple(range(5, 65))
    before = scored(model, [most])
    short, long = (by_itself(model, PROMPT, each)[:most] for each in (tokens[:most], tokens))
    torch.testing.assert_close(long, short, atol=2e-5, rtol=0)
    assert torch.equal(scored(model, [most]), before)
    # Left to transformers, the same tokens would have other log-probs in a longer row.
    assert (by_itself(reference, PROMPT, tokens)[:most] - short).abs().max() > 0.1


def test_the_sampler_is_the_learner_up_to_the_original_length(model, reference):
    most = ORIGINAL - len(PROMPT)
    sampler = local_sampler(model, TOKENIZER)
    [found] = sampler.sample([Request(0, PROMPT, 3)], SamplingOptions(max_tokens=most), seed=0, step=0)
    for each in found:
        own = by_itself(reference, PROMPT, each.tokens)
        torch.testing.assert_close(torch.tensor(each.logprobs, dtype=own.dtype), own, atol=3e-5, rtol=0)


def test_one_token_more_is_refused_before_anything_is_sampled_or_scored(model):
    most = ORIGINAL - len(PROMPT) + 1
    said = rf"rope changes its frequencies with the longest row beyond {ORIGINAL} tokens"
    with pytest.raises(ValueError, match=said) as error:
        local_sampler(model, TOKENIZER).sample(
            [Request(0, PROMPT, 1)], SamplingOptions(max_tokens=most), seed=0, step=0
        )
    assert "\n" not in str(error.value)
    for layout in ("packed", "padded"):
        with pytest.raises(ValueError, match=said):
            scored(model, [3, most], layout)


def test_a_reward_model_refuses_too():
    judge = AutoModelForSequenceClassification.from_config(built("llama", num_labels=1, **DYNAMIC).config).eval()
    judge.config.pad_token_id = 0
    rows = {"prompts": [PROMPT], "group": torch.tensor([0])}
    with torch.no_grad():
        fits = torch.full((1, ORIGINAL - len(PROMPT)), 9)
        completion_scores(judge, tokens=fits, lengths=torch.tensor([fits.shape[1]]), **rows)
        beyond = torch.full((1, ORIGINAL - len(PROMPT) + 1), 9)
        with pytest.raises(ValueError, match=f"a prompt of 4 tokens with a completion of {beyond.shape[1]}"):
            completion_scores(judge, tokens=beyond, lengths=torch.tensor([beyond.shape[1]]), **rows)


def test_rows_of_a_file_are_refused_before_training(model, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "9" * 20, "completion": "12345"}) + "\n")
    prepared = prepare(DataFile(str(path), held_out=0.0), read_examples, TOKENIZER)
    with pytest.raises(ValueError, match=f"allows 26 tokens, but .*: set it to {ORIGINAL}"):
        prepared.check_room(model)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mpt"])
def test_learned_positions_are_refused_by_name_outside_the_fast_path(name: str):
    model = built(name)
    with pytest.raises(ValueError, match="max_tokens is 61: the model has 64 positions"):
        local_sampler(model, TOKENIZER).sample([Request(0, PROMPT, 1)], SamplingOptions(max_tokens=61), seed=0, step=0)
    with pytest.raises(ValueError, match="the model has 64 positions"):
        scored(model, [61])


def test_what_limits_a_row():
    def why(name: str, **more: Any) -> tuple[int, str] | None:
        reach = reach_of(built(name, **more).config)
        return reach and (reach.tokens, reach.why.split(" rope")[0])

    assert why("llama") == (64, "the model has 64 positions")
    assert why("llama", **DYNAMIC) == (24, "the model's dynamic")
    assert why("phi3", **LONGROPE) == (24, "the model's longrope")
    assert why("gpt2") == (64, "the model has 64 positions")
    assert reach_of(built("bloom", max_position_embeddings=None).config) is None


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path):
    built("gpt2").config.save_pretrained(tmp_path)
    config = RunConfig(task=Arithmetic(), sampling=SamplingOptions(max_tokens=64))
    with pytest.raises(ValueError, match="max_tokens is 64.*the model has 64.*give less than 64"):
        check_prompts(config, str(tmp_path), TOKENIZER)
    config = replace(config, sampling=SamplingOptions(max_tokens=62))
    with pytest.raises(ValueError, match="sampling.max_tokens is 62: the model has 64 positions, which leaves 2"):
        check_prompts(config, str(tmp_path), TOKENIZER)
    assert check_prompts(replace(config, sampling=SamplingOptions(max_tokens=8)), str(tmp_path), TOKENIZER) == []


def test_one_mistake_of_many_rows_is_said_once():
    mistakes = Mistakes()
    for row in range(1, 201):
        mistakes.add(f"x.jsonl:{row}", f"the prompt has {3900 + row} tokens")
    mistakes.add("x.jsonl:7", "no column 'answer'")
    assert str(mistakes).splitlines() == [
        "x.jsonl:1: the prompt has 3901 tokens (and 199 more rows like it)",
        "x.jsonl:7: no column 'answer'",
    ]
    assert len(list(mistakes)) == 201
