"""The self-check holds on a sound setup, and each check fails when its fault is planted."""

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from proximo.algorithms import CLIP_COV, GRPO, GSPO, PPO, SAPO
from proximo.environments.kinds import Ask, Question
from proximo.learner.gradients import Gradients
from proximo.models import PaddedFallback, tiny_model, tiny_tokenizer
from proximo.models.packing.packed import Bucket, PackedReader
from proximo.recipes.selfcheck.checks import (
    Check,
    completions_end,
    end_of_sequence,
    mask_counts_tokens,
    prompts_decode_back,
    prompts_have_tokens,
    references_are_right,
    silence_is_wrong,
)
from proximo.recipes.selfcheck.selfcheck import (
    made_up_groups,
    micro_batches_add_up,
    packed_is_padded,
    relative_difference,
    sampled_groups,
    selfcheck,
)
from proximo.rl.assemble import to_batch
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.samplers.embedded import EmbeddedSampler, local_sampler
from proximo.samplers.sampler import RunSamplers, Sampler, SamplingOptions, Stream
from proximo.tasks import Arithmetic, Echo, File, Split
from proximo.types import Completion, Grade, Group, Problem, Request, Rollout

TOKENIZER = tiny_tokenizer()
CONFIG = RunConfig(
    algorithm=GRPO,
    task=Arithmetic(held_out=20),
    sampling=SamplingOptions(max_tokens=6),
    training=TrainingOptions(groups=2, group_size=4, minibatches=2),
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


def faults(checks) -> list[str]:
    return [check.name for check in checks if not check.ok]


def random_groups(model) -> list[Group]:
    groups = sampled_groups(CONFIG, CONFIG.task, CONFIG.sampling, TOKENIZER, EmbeddedSampler(model, TOKENIZER))
    return made_up_groups(model, groups, CONFIG.sampling, seed=0)


# Sound


@pytest.mark.slow("checks whole setups")
@pytest.mark.parametrize("algorithm", [GRPO, PPO, GSPO, SAPO, CLIP_COV])
def test_a_sound_setup_passes_and_the_model_is_left_as_it_was(model, algorithm):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    checks = list(selfcheck(replace(CONFIG, algorithm=algorithm), model, TOKENIZER))
    assert faults(checks) == []
    assert len(checks) == 14
    assert all(check.value is not None for check in checks)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_is_never_packed_skips_that_check():
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=len(TOKENIZER), n_positions=64, eos_token_id=1)
    model = GPT2LMHeadModel._from_config(config, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedFallback)
        checks = list(selfcheck(CONFIG, model, TOKENIZER))
    assert faults(checks) == []
    assert [check.name for check in checks if check.value is None] == [
        "packed = padded, log-probs",
        "packed = padded, gradient",
    ]


def test_a_nan_is_under_no_bound():
    assert not Check("x", math.nan, 1.0, "").ok
    assert Check("x", None, 0.0, "skipped").ok
    assert not Check("x", 1.1, 1.0, "").ok


def test_relative_difference_over_all_tensors_together():
    # |(0, 3 − 0)| / |(4, 3)| = 3 / 5.
    assert relative_difference([torch.tensor([4.0]), torch.tensor([3.0])], [torch.tensor([4.0]), torch.zeros(1)]) == 0.6
    assert math.isnan(relative_difference([torch.zeros(2)], [torch.zeros(2)]))


# The sampler


@dataclass
class OffBy:
    """A sampler whose log-probs are not those it drew with."""

    sampler: Sampler
    amount: float
    repeats = True

    def refresh(self, policy, version: int) -> int:
        return self.sampler.refresh(policy, version)

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        for number, siblings in self.sampler.stream(requests, options, seed=seed, step=step, version=version):
            yield (
                number,
                tuple(
                    replace(each, logprobs=tuple(value + self.amount for value in each.logprobs)) for each in siblings
                ),
            )


@dataclass(frozen=True)
class Off:
    """The sampler of a run, from outside; `differs` where that is intended."""

    amount: float
    differs: bool = False
    copies: ClassVar[int] = 0

    def build(self, policy, tokenizer, *, slots: int, record_routes: bool) -> RunSamplers:
        sampler = OffBy(local_sampler(policy.model, tokenizer, slots=slots), self.amount)
        return RunSamplers(sampler, sampler, differs=self.differs)


@pytest.mark.slow("checks a whole setup")
def test_a_sampler_that_disagrees_with_the_learner_is_found(model):
    gaps = ["sampler = learner, largest gap", "sampler = learner, mean gap"]
    assert faults(selfcheck(replace(CONFIG, sampler=Off(1e-3)), model, TOKENIZER)) == gaps
    # One that is meant to differ is shown and not failed.
    checks = list(selfcheck(replace(CONFIG, sampler=Off(1e-3, differs=True)), model, TOKENIZER))
    assert ([check.name for check in checks if check.warns], faults(checks)) == (gaps, [])


@dataclass(frozen=True)
class Noted:
    """An environment that puts a tool's token in front of what is sampled, with or without saying that it did."""

    says_so: bool

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        tool = tuple(TOKENIZER.encode("7", add_special_tokens=False))
        longer = [replace(each.request, prompt_tokens=(*each.request.prompt_tokens, *tool)) for each in questions]
        for number, siblings in ask(longer, replace(ask.options, max_tokens=ask.options.max_tokens - len(tool))):
            yield number, tuple(self._noted(each, tool) for each in siblings)

    def _noted(self, said: Completion, tool: tuple[int, ...]) -> Completion:
        nothing, tokens = (0.0,) * len(tool), (*tool, *said.tokens)
        flags = (not self.says_so,) * len(tool) + (True,) * len(said.tokens)
        logprobs, entropies = nothing + said.logprobs, nothing + said.entropies
        return replace(said, tokens=tokens, logprobs=logprobs, entropies=entropies, sampled=flags)


@pytest.mark.slow("checks a whole setup")
def test_it_samples_through_the_runs_environment(model):
    assert faults(selfcheck(replace(CONFIG, environment=Noted(says_so=True)), model, TOKENIZER)) == []
    # A tool's token that passes for a sampled one is none that the sampler returned.
    with pytest.raises(ValueError, match="whose sampled tokens are not those that the sampler returned"):
        faults(selfcheck(replace(CONFIG, environment=Noted(says_so=False)), model, TOKENIZER))


@pytest.mark.slow("checks whole setups")
def test_what_a_clip_of_ppos_bears_is_too_much_for_gspos(model):
    config = replace(CONFIG, sampler=Off(6e-5))
    assert faults(selfcheck(config, model, TOKENIZER)) == []
    config = replace(config, algorithm=GSPO)  # a tenth of 3e-4
    assert faults(selfcheck(config, model, TOKENIZER)) == ["sampler = learner, log-ratio"]


# Gradients


def test_attention_that_sees_padding_and_the_future_is_found(model, monkeypatch):
    read = Bucket.read

    def seeing_all(self, *rest):
        return read(self if self.mask is None else replace(self, mask=torch.ones_like(self.mask)), *rest)

    batch = to_batch(random_groups(model))
    assert faults(packed_is_padded(model, batch, 1.0)) == []
    monkeypatch.setattr(Bucket, "read", seeing_all)
    assert faults(packed_is_padded(model, batch, 1.0)) == ["packed = padded, log-probs", "packed = padded, gradient"]


def test_attention_without_a_gradient_is_found(model, monkeypatch):
    read = PackedReader.read
    detached = lambda self, query, key, value, scale: read(self, query, key, value.detach(), scale)  # noqa: E731
    monkeypatch.setattr(PackedReader, "read", detached)
    assert faults(packed_is_padded(model, to_batch(random_groups(model)), 1.0)) == ["packed = padded, gradient"]


@pytest.mark.slow("checks a whole setup")
def test_a_mean_over_each_micro_batch_is_found(model, monkeypatch):
    groups, loss = random_groups(model), Gradients.loss
    assert micro_batches_add_up(model, groups, CONFIG).ok

    def averaged(self, rows, *rest):
        value, stats = loss(self, rows, *rest)
        return value / len(rows), stats

    monkeypatch.setattr(Gradients, "loss", averaged)
    check = micro_batches_add_up(model, groups, CONFIG)
    # Each row's share is divided by 1 instead of 16: 16 times the gradient, which clipping would have hidden.
    assert check.value == pytest.approx(15.0, abs=1e-3)
    assert not check.ok


def test_no_gradient_proves_nothing(model):
    equal = [
        replace(group, rollouts=tuple(replace(rollout, grade=Grade(1.0)) for rollout in group.rollouts))
        for group in random_groups(model)
    ]
    check = micro_batches_add_up(model, equal, replace(CONFIG, algorithm=SAPO))
    assert not check.ok
    assert check.detail == "the gradient is 0 or not a number"


# Prompts, ends and masks


def problems(*prompts) -> list[Problem]:
    return [Problem(str(number), prompt, None) for number, prompt in enumerate(prompts)]


def test_prompts_that_cannot_be_encoded_are_found_and_end_the_check(model):
    assert prompts_have_tokens(TOKENIZER, problems("1+2=", "a")).detail == "2 prompts, the shortest has 1 tokens"
    check = prompts_have_tokens(TOKENIZER, problems("1+2=", ""))
    assert (check.value, check.ok) == (1.0, False)
    assert check.detail.startswith("1: prompt '' has no tokens")

    bare = tiny_tokenizer()
    bare.chat_template = None
    turn = ({"role": "user", "content": "hi"},)
    assert "no chat template" in prompts_have_tokens(bare, problems(turn)).detail


@pytest.mark.slow("checks a whole setup")
def test_nothing_is_sampled_from_prompts_without_tokens(tmp_path, model):
    rows = [{"prompt": [{"role": "user", "content": str(number)}], "answer": "1"} for number in range(40)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bare = tiny_tokenizer()
    bare.chat_template = None
    config = replace(CONFIG, task=File(str(tmp_path / "talk.jsonl")))
    checks = list(selfcheck(config, model, bare))
    assert faults(checks) == ["prompts without tokens"]
    assert len(checks) == 3
    assert faults(selfcheck(config, model, TOKENIZER)) == []


def test_prompts_that_the_tokenizer_or_the_template_loses_are_found():
    turn = ({"role": "user", "content": " 1+2= "},)
    assert prompts_decode_back(TOKENIZER, problems("1+2=", turn)).ok
    check = prompts_decode_back(TOKENIZER, problems("1+2=", "1×2="))
    assert (check.value, check.ok) == (1.0, False)
    assert check.detail == "'1×2=' is read as '1<unk>2='"
    mute = tiny_tokenizer()
    mute.chat_template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    assert not prompts_decode_back(mute, problems(turn)).ok


def test_an_end_that_is_missing_or_unsayable_is_found():
    model, tokenizer = tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64), tiny_tokenizer()
    assert end_of_sequence(model, tokenizer) == Check("end-of-sequence ids missing", 0.0, 0.0, "ids 1; padding 0")
    tokenizer.pad_token = tokenizer.eos_token
    check = end_of_sequence(model, tokenizer)
    assert check.ok
    assert "masks go by position" in check.detail
    model.generation_config.eos_token_id = [1, 10**6]
    assert end_of_sequence(model, tokenizer).value == 1.0
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert not end_of_sequence(model, tokenizer).ok


def said(tokens: tuple[int, ...], finish: Literal["stop", "length"] = "stop") -> Group:
    completion = Completion(tokens, (-1.0,) * len(tokens), "", finish)
    return Group(Problem("p", "p", None), (5,), (Rollout(completion, Grade(0.0)),))


def test_completions_that_end_wrongly_are_found():
    ends, sampling = frozenset({1}), SamplingOptions(max_tokens=3)
    right = [said((7, 1)), said((7, 8, 1)), said((7, 8, 9), "length")]
    assert completions_end(right, ends, sampling).value == 0
    wrong = [said((7, 8)), said((1, 7, 1)), said((7, 8), "length"), said((7, 8, 1), "length"), said(())]
    assert completions_end(right + wrong, ends, sampling).value == len(wrong)
    assert completions_end([said((7, 8))], ends, replace(sampling, stop=(".",))).ok


def test_a_turn_may_end_before_a_token_that_was_not_sampled():
    ends, sampling = frozenset({1}), SamplingOptions(max_tokens=6)

    def turns(*tokens: int, finish: Literal["stop", "length"] = "stop") -> Group:
        completion = Completion(tokens, (-1.0,) * len(tokens), "", finish, sampled=tuple(each != 5 for each in tokens))
        return Group(Problem("p", "p", None), (5,), (Rollout(completion, Grade(0.0)),))

    right = [turns(7, 1, 5, 8, 1), turns(7, 1, 5), turns(7, 5, 8, finish="length")]
    assert completions_end(right, ends, sampling).value == 0
    assert completions_end([turns(1, 7, 5, 8), turns(7, 5, 1, finish="length")], ends, sampling).value == 2
    assert mask_counts_tokens(right, to_batch(right)).ok
    assert mask_counts_tokens(right, replace(to_batch(right), mask=to_batch(right).tokens != 0)).value == 3


def test_a_mask_guessed_from_the_padding_token_is_found():
    groups = [said((7, 8, 1)), said((7, 1))]
    batch = to_batch(groups)
    assert mask_counts_tokens(groups, batch).ok
    guessed = replace(batch, mask=(batch.tokens != 0) & (batch.tokens != 1))
    check = mask_counts_tokens(groups, guessed)
    assert check.value == 2.0
    assert check.detail == "5 sampled tokens of 2 completions, 3 in the mask"
    shifted = replace(batch, mask=torch.tensor([[True, True, True], [False, True, True]]))  # right count, wrong place
    assert mask_counts_tokens(groups, shifted).value == 1.0


# The grader

ECHO = Echo()


@dataclass(frozen=True)
class Graded:
    """A grader that says the same to everything."""

    outcome: float = 0.0
    echo: Echo = ECHO
    answer: str | None = "abc"

    while_sampling = True

    def size(self, split: Split) -> int | None:
        return self.echo.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self.echo.problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(self.outcome) for _ in problems]

    def reference(self, problem: Problem) -> str | None:
        return self.answer


def test_a_grader_that_rejects_the_reference_is_found():
    assert references_are_right(Echo(), 0).value == 0
    for outcome in (0.0, 0.99, math.nan):
        check = references_are_right(Graded(outcome=outcome), 0)
        assert (check.value, check.ok) == (32.0, False)
    assert "'abc' is unscored" in check.detail
    assert references_are_right(Graded(echo=Echo(held_out=5)), 0).value == 5


def test_a_grader_that_accepts_silence_is_found():
    assert silence_is_wrong(Echo(), 0).ok
    assert silence_is_wrong(Graded(outcome=math.nan), 0).ok
    check = silence_is_wrong(Graded(outcome=1.0), 0)
    assert (check.value, check.ok) == (32.0, False)


def test_a_task_without_references_says_so():
    check = references_are_right(Graded(answer=None), 0)
    assert check.value is None
    assert "no reference answers" in check.detail


def test_without_a_held_out_set_the_grader_is_checked_on_training_problems(tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    task = File(str(tmp_path / "sums.jsonl"), held_out=0.0)
    assert references_are_right(task, 0).value == 0
