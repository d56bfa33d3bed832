"""The trial of several turns: an environment in a file of its own asks the sampler twice for each completion."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from proximo.config import toml
from proximo.environments.kinds import Ask, Interaction, Question
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Problem, Request
from tests.outside.two_turns import TwoTurns

TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(max_tokens=9)
PROMPTS = {11: (5, 6, 7), 12: (8, 9)}
QUESTIONS = [Question(Problem(str(key), "?", None), Request(key, prompt, 3)) for key, prompt in PROMPTS.items()]


def test_a_config_holds_an_environment_from_outside():
    config = RunConfig(environment=TwoTurns(note="="))
    assert isinstance(TwoTurns(), Interaction)
    assert toml.loads(toml.dumps(config), RunConfig).environment == TwoTurns(note="=")


def test_the_second_turn_reads_the_first_and_the_tools_answer():
    model, judge = (tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1) for _ in range(2))
    judge.set_attn_implementation("sdpa")
    sampler = EmbeddedSampler(model, TOKENIZER)
    ask = Ask(sampler, TOKENIZER, OPTIONS, seed=1, step=2, version=4)
    found = dict(TwoTurns().play(QUESTIONS, ask))
    again = Ask(sampler, TOKENIZER, OPTIONS, seed=1, step=2, version=4)
    assert found == dict(TwoTurns().play(QUESTIONS, again))
    assert found != dict(TwoTurns().play(QUESTIONS, again))  # the same turns asked again are drawn anew
    tool = tuple(TOKENIZER.encode("1+", add_special_tokens=False))
    firsts = sampler.sample([each.request for each in QUESTIONS], replace(OPTIONS, max_tokens=2), seed=1, step=2)
    for number, question in enumerate(QUESTIONS):
        assert len(found[number]) == 3
        for first, whole in zip(firsts[number], found[number], strict=True):
            start = len(first.tokens) + len(tool)
            assert whole.tokens[:start] == first.tokens + tool
            assert start < len(whole.tokens) == len(whole.logprobs) == len(whole.entropies) <= OPTIONS.max_tokens
            assert whole.logprobs[len(first.tokens) : start] == (0.0,) * len(tool)
            assert whole.sampled == tuple(
                place not in range(len(first.tokens), start) for place in range(len(whole.tokens))
            )
            assert whole.version == 4
            # Every sampled token has the log-prob of the model that has read everything before it.
            rows = torch.tensor([question.request.prompt_tokens + whole.tokens])
            with torch.no_grad():
                logprobs = torch.log_softmax(judge(input_ids=rows).logits.float()[0, :-1], dim=-1)
            own = logprobs.gather(1, rows[0, 1:, None])[-len(whole.tokens) :, 0]
            sampled = [*range(len(first.tokens)), *range(start, len(whole.tokens))]
            torch.testing.assert_close(own[sampled], torch.tensor(whole.logprobs)[sampled].to(own), atol=1e-4, rtol=0)
    assert len({each.tokens for each in found[0]}) > 1


@pytest.mark.slow("trains a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_trains_on_what_was_sampled_in_both_turns(tmp_path: Path):
    config = RunConfig(
        sampling=SamplingOptions(max_tokens=9),
        environment=TwoTurns(),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-3, warmup_steps=0),
        evaluation=EvaluationOptions(problems=4),
        steps=2,
    )
    train(Run(config, tmp_path, ProgressLines()))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "sampler_gap" in row]
    assert len(steps) == 2
    # The learner, which reads prompt, both turns and the tool's answer as one text, agrees with what was sampled.
    assert max(row["sampler_gap"] for row in steps) < 1e-4
    for row in pq.read_table(tmp_path / "rollouts" / "step-000001.parquet").to_pylist():
        assert row["sampled"].count(False) == 2
        assert not any(masked and not sampled for masked, sampled in zip(row["mask"], row["sampled"], strict=True))
