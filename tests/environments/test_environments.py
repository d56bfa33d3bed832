"""Environments: what is asked of the sampler, and that training and evaluation both go through them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from proximo.algorithms import GRPO
from proximo.environments import Ask, Environment, Question, SingleTurn
from proximo.models import tiny_model, tiny_tokenizer
from proximo.samplers import SamplingOptions, Stream
from proximo.samplers.embedded import EmbeddedSampler
from proximo.tasks.arithmetic import Arithmetic
from proximo.training.config import EvaluationOptions, TrainingOptions
from proximo.training.records import DataCursor
from proximo.training.rl.collect import Collector
from proximo.training.rl.evaluate import evaluate
from proximo.types import Problem, Request

TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(max_tokens=6)
REQUEST = Request(key=7, prompt_tokens=(5, 6, 7), num_samples=4)


@pytest.fixture(scope="module")
def sampler() -> EmbeddedSampler:
    return EmbeddedSampler(tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1), TOKENIZER)


def asking(sampler: EmbeddedSampler, step: int = 3) -> Ask:
    return Ask(sampler, TOKENIZER, OPTIONS, seed=1, step=step, version=9)


def test_a_single_turn_is_what_the_sampler_streams(sampler):
    requests = [replace(REQUEST, key=key) for key in (1, 2, 3)]
    questions = [Question(Problem(str(each.key), "?", None), each) for each in requests]
    found = list(SingleTurn().play(questions, asking(sampler)))
    assert found == list(sampler.stream(requests, OPTIONS, seed=1, step=3, version=9))
    assert {each.version for _, siblings in found for each in siblings} == {9}
    assert isinstance(SingleTurn(), Environment)


def test_a_sample_asked_for_alone_is_the_one_among_its_siblings(sampler):
    [(_, siblings)] = asking(sampler)([REQUEST])
    alone = asking(sampler)([replace(REQUEST, num_samples=1, first_sample=number) for number in range(4)])
    assert [completion.tokens for _, (completion,) in sorted(alone)] == [each.tokens for each in siblings]
    assert len({each.tokens for each in siblings}) > 1


def test_each_turn_has_random_numbers_of_its_own(sampler):
    turns = [dict(asking(sampler)([replace(REQUEST, turn=turn)]))[0] for turn in range(3)]
    assert len({tuple(each.tokens for each in siblings) for siblings in turns}) == 3
    again = dict(asking(sampler)([replace(REQUEST, turn=2)]))[0]
    assert again == turns[2]


def test_a_turn_before_the_first_is_refused(sampler):
    with pytest.raises(ValueError, match=r"requests\[0\]: turn -1, first_sample 0: both count from 0"):
        list(asking(sampler)([replace(REQUEST, turn=-1)]))


@dataclass(frozen=True)
class Marking:
    """Says who it was that sampled, in front of what was sampled."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        for number, siblings in ask([each.request for each in questions]):
            yield number, tuple(replace(each, text=f"{questions[number].problem.id}:{each.text}") for each in siblings)


def test_training_and_evaluation_go_through_the_environment(sampler):
    task, training = Arithmetic(held_out=5), TrainingOptions(groups=2, group_size=2, minibatches=1)
    collector = Collector(task, sampler, TOKENIZER, OPTIONS, training, GRPO.keep, seed=0, environment=Marking())
    groups = collector.collect(DataCursor(), step=0, version=0).groups
    assert all(each.completion.text.startswith(f"{g.problem.id}:") for g in groups for each in g.rollouts)
    options = EvaluationOptions(problems=3, samples=2)
    _, answered = evaluate(task, sampler, TOKENIZER, OPTIONS, options, seed=0, environment=Marking(), version=4)
    assert [each.completion.text.split(":")[0] for each in answered] == [each.problem.id for each in answered]
    assert {each.completion.version for each in answered} == {4}
