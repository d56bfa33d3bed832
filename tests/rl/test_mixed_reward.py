"""Reward models score what transformers scores, and their scores enter the reward as the mix says."""

import json
import logging
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from proximo.algorithms import DAPO, GRPO, VAPO
from proximo.models import load_model, prompt_tokens, tiny_model, tiny_tokenizer
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.models.tiny import EOS as EOS_TEXT
from proximo.models.tiny import PAD, SYMBOLS, UNKNOWN
from proximo.rewards import ExactMatch, PythonFunction
from proximo.rl.config import EvaluationOptions
from proximo.rl.evaluate import evaluate
from proximo.rl.mixed_reward import MixedReward, ScoringModel, same_tokens, with_reward_models
from proximo.rl.progress import gain, measure, share
from proximo.rl.reward_config import RewardMix, RewardModel, WeightedRule, check_rewards
from proximo.runs.records import Evaluation
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Echo, File, Task
from proximo.types import Completion, Problem, Turn
from tests.models.test_scoring import SHAPE, Rows, exact, ragged

EOS = 1
JUDGES = {
    "llama": (LlamaForSequenceClassification, LlamaConfig(**SHAPE)),
    "qwen3": (Qwen3ForSequenceClassification, Qwen3Config(**SHAPE, head_dim=8)),
    "gemma2": (Gemma2ForSequenceClassification, Gemma2Config(**SHAPE, head_dim=4, sliding_window=4)),
}


def judge(family: str, dtype: torch.dtype, pad: int = 0) -> PreTrainedModel:
    kind, config = deepcopy(JUDGES[family])  # a config is its model's own
    config.num_labels, config.pad_token_id = 1, pad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = exact(kind._from_config(config, dtype=torch.float64).eval())
    return model.to(dtype=dtype)  # pyright: ignore[reportCallIssue]


def ended() -> Rows:
    """Ragged rows of which some end with eos, one is nothing but eos, and one prompt ends with eos itself."""
    rows = ragged()
    for row in (0, 2, 6):
        rows.tokens[row, rows.lengths[row] - 1] = EOS
    rows.tokens[5, 1] = EOS
    rows.prompts[0][-2:] = [EOS, EOS]
    rows.tokens[4, :2] = EOS
    return rows


def own_scores(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """What transformers says of each whole sequence, alone."""
    scores = []
    for row, length in enumerate(rows.lengths.tolist()):
        sequence = torch.tensor([rows.prompts[int(rows.group[row])] + rows.tokens[row, :length].tolist()])
        scores.append(model(input_ids=sequence, attention_mask=torch.ones_like(sequence)).logits[0, 0])
    return torch.stack(scores)


def scores_of(model: PreTrainedModel, rows: Rows, **options) -> torch.Tensor:
    return completion_scores(
        model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group, **options
    )


CASES = [(family, torch.float32, 1e-5) for family in JUDGES]
CASES += [(family, torch.float64, 1e-9) for family in ("llama", "qwen3")]  # Gemma's own attention is float32 inside


@torch.no_grad()
@pytest.mark.parametrize("pad", [0, EOS])
@pytest.mark.parametrize(("family", "dtype", "tolerance"), CASES)
@pytest.mark.filterwarnings("ignore::proximo.models.PaddedFallback")
def test_scores_are_transformers_own(family, dtype, tolerance, pad):
    model, rows = judge(family, dtype, pad), ended()
    expected = own_scores(model, rows)
    for layout in ("packed", "padded"):
        found = scores_of(model, rows, layout=layout)
        assert found.dtype == dtype
        assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_where_padding_is_the_end_of_sequence_it_is_not_read():
    model, rows = judge("llama", torch.float64, pad=EOS), ended()
    without = Rows(rows.prompts, rows.tokens, rows.lengths - torch.tensor([1, 0, 1, 0, 0, 0, 1]), rows.group)
    assert_close(scores_of(model, rows), scores_of(model, without), rtol=0, atol=0)
    model.config.pad_token_id = 0
    assert (scores_of(model, rows) - scores_of(model, without)).abs()[[0, 2, 6]].min() > 1e-3


def test_packed_gradients_are_padded_gradients():
    model, rows = judge("qwen3", torch.float64), ended()
    weights = torch.linspace(-1, 1, len(rows.lengths))
    packed, padded = (
        torch.autograd.grad((scores_of(model, rows, layout=layout) * weights).sum(), list(model.parameters()))
        for layout in ("packed", "padded")
    )
    for found, expected in zip(packed, padded, strict=True):
        assert_close(found, expected, rtol=1e-9, atol=1e-9)


# Folders


def save_policy(folder: Path, **options) -> Path:
    tiny_model(hidden=32, layers=1, intermediate=48, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_causal_model_gets_a_fresh_head_that_repeats(tmp_path, caplog):
    folder = save_policy(tmp_path / "policy")
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        first, again, other = (load_reward_model(str(folder), seed=seed) for seed in (0, 0, 1))
    assert not caplog.records
    assert_close(torch.get_rng_state(), before)
    weight = first.get_parameter("score.weight")
    assert weight.shape == (1, 32)
    assert_close(weight, again.get_parameter("score.weight"), rtol=0, atol=0)
    assert not weight.equal(other.get_parameter("score.weight"))
    assert first.config.pad_token_id == 0
    wide = save_policy(tmp_path / "wide")
    tiny_model(hidden=1024, layers=1, heads=4, intermediate=8).save_pretrained(wide)
    spread = load_reward_model(str(wide)).get_parameter("score.weight").detach().std()
    assert_close(float(spread), 1025**-0.5, rtol=0.1, atol=0)
    body, policy = first.base_model.state_dict(), load_model(str(folder)).base_model.state_dict()
    assert all(policy[name].equal(tensor) for name, tensor in body.items())


def test_a_reward_model_keeps_its_head(tmp_path):
    folder = save_policy(tmp_path / "policy")
    model = load_reward_model(str(folder), seed=5)
    model.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    again = load_reward_model(str(tmp_path / "judge"), seed=6, fresh_head=False)
    assert_close(again.get_parameter("score.weight"), model.get_parameter("score.weight"), rtol=0, atol=0)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    tokens = torch.tensor([[7, 8, 9]])
    assert_close(plain(tokens).logits, again(tokens).logits, rtol=0, atol=0)


def test_without_a_pad_token_it_is_the_end_of_sequence(tmp_path):
    model, tokenizer = tiny_model(hidden=32, layers=1, intermediate=48), tiny_tokenizer()
    model.config.pad_token_id = None
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_reward_model(str(tmp_path)).config.pad_token_id == EOS


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere.*there is no folder of this name"):
        load_reward_model(str(tmp_path / "nowhere"))
    policy = save_policy(tmp_path / "policy")
    with pytest.raises(ValueError, match="no score head, so its scores would be random.*proximo reward-model"):
        load_reward_model(str(policy), fresh_head=False)
    labels = load_reward_model(str(policy))
    labels.config.num_labels = 3
    labels.set_submodule("score", nn.Linear(32, 3, bias=False, dtype=torch.float32))
    labels.save_pretrained(tmp_path / "labels")
    with pytest.raises(ValueError, match="a classifier of 3 labels; a reward model has 1"):
        load_reward_model(str(tmp_path / "labels"))
    weights = policy / "model.safetensors"
    weights.rename(policy / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: convert to safetensors"):
        load_reward_model(str(policy))


# The mix


def completion(text: str, finish: Literal["stop", "length"] = "stop", tokenizer=None) -> Completion:
    tokenizer = tokenizer or tiny_tokenizer()
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False)) + (EOS,) * (finish == "stop")
    return Completion(tokens, (0.0,) * len(tokens), text, finish)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A reward model with a random head that has the policy's tokenizer."""
    folder = save_policy(tmp_path_factory.mktemp("judge"))
    load_reward_model(str(folder), seed=1).save_pretrained(folder)
    return folder


def plain_score(folder: Path, prompt: list[int], tokens: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([prompt + tokens])).logits[0, 0])


LENGTH = WeightedRule(PythonFunction("tests.rewards.hostile_rewards:longer_is_better"), weight=-0.1)
A, B = Echo().problem(0, "train", 0), Echo().problem(1, "train", 0)


def test_the_parts_are_weighted_and_add_up(folder):
    mix = RewardMix(task=2.0, models=(RewardModel(str(folder), weight=0.5),), rules=(LENGTH,))
    task = with_reward_models(Echo(), mix, tiny_tokenizer())
    assert isinstance(task, Task)
    assert not task.while_sampling  # the model shares the sampler's device, and reads many rows best
    right, wrong, cut = completion(A.answer), completion("no"), completion("7", "length")
    grades = task.grade([A, B, A], [right, wrong, cut])
    for grade, problem, said, outcome in zip(grades, [A, B, A], [right, wrong, cut], [1.0, 0.0, 0.0], strict=True):
        score = plain_score(folder, list(prompt_tokens(tiny_tokenizer(), problem.prompt)), list(said.tokens))
        assert grade.outcome == outcome
        assert grade.parts == {
            "task": 2 * outcome,
            "reward_model": pytest.approx(score / 2, abs=1e-5),
            "longer_is_better": pytest.approx(-0.1 * len(said.text)),
        }
        assert grade.reward == pytest.approx(2 * outcome + score / 2 - 0.1 * len(said.text), abs=1e-5)
    assert task.problem(3, "train", 0) == Echo().problem(3, "train", 0)
    assert task.size("train") == Echo().size("train")
    assert task.reference(A) == A.answer


def test_the_default_mix_is_the_task_itself():
    task = Echo()
    assert with_reward_models(task, RewardMix(), tiny_tokenizer()) is task


def test_a_verdict_of_weight_0_is_watched_and_not_rewarded(folder):
    task = with_reward_models(Echo(), RewardMix(task=0.0, models=(RewardModel(str(folder)),)), tiny_tokenizer())
    right, wrong = task.grade([A, A], [completion(A.answer), completion("no")])
    assert (right.outcome, wrong.outcome) == (1.0, 0.0)
    assert right.parts.keys() == {"reward_model"}
    assert right.reward == right.parts["reward_model"]


def prompts_only(tmp_path, prompts=("12+7=", "one")) -> File:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return File(str(path), reward=None, held_out=0.0)


def test_prompts_alone_have_the_reward_as_their_outcome(folder, tmp_path):
    file = prompts_only(tmp_path)
    problem = file.problem(0, "train", 0)
    assert file.reference(problem) is None
    assert math.isnan(file.grade([problem], [completion("a")])[0].outcome)
    mix = RewardMix(task=0.0, models=(RewardModel(str(folder)),), rules=(LENGTH,))
    (grade,) = with_reward_models(file, mix, tiny_tokenizer()).grade([problem], [completion("a")])
    assert grade.outcome == grade.reward == grade.verdict == sum(grade.parts.values())
    assert grade.parts["longer_is_better"] == pytest.approx(-0.1)


def test_a_score_that_is_no_number_is_unscored():
    def broken(_, completions):
        return lambda: [math.inf, math.nan, 2.0][: len(completions)]

    grades = MixedReward(Echo(), 1.0, {"broken": (0.5, broken)}).grade([A] * 3, [completion("a")] * 3)
    assert [math.isnan(grade.reward) for grade in grades] == [True, True, False]
    assert math.isnan(grades[0].verdict)
    assert grades[2].reward == 1.0


def test_parts_have_readable_names():
    models = tuple(RewardModel(path) for path in ("runs/kind", "runs/brief/checkpoints/step-000100", "kind"))
    rules = (LENGTH, LENGTH, WeightedRule(ExactMatch()))
    assert RewardMix(models=models, rules=rules).names == [
        *("kind", "brief", "kind_2"),
        *("longer_is_better", "longer_is_better_2", "exact_match"),
    ]
    assert RewardMix(models=(RewardModel("runs/kind"),)).names == ["reward_model"]


def test_mixes_that_mean_nothing_are_refused(tmp_path):
    for make, complaint in (
        (lambda: RewardMix(task=0.0), "nothing else is rewarded"),
        (lambda: RewardMix(task=math.nan), "rewards.task is nan"),
        (lambda: RewardModel("x", weight=0.0), "weight is 0.0"),
        (lambda: RewardModel("x", token_budget=0), "token_budget is 0"),
        (lambda: WeightedRule(ExactMatch(), weight=math.inf), "weight is inf"),
        (lambda: with_reward_models(
            prompts_only(tmp_path), RewardMix(0.0, rules=(WeightedRule(ExactMatch()),)), tiny_tokenizer()),
         "ExactMatch, which needs an answer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=complaint):
            make()


def test_runs_that_would_train_on_what_is_not_rewarded_are_refused(tmp_path):
    learned, file = RewardMix(task=0.0, models=(RewardModel("x"),)), prompts_only(tmp_path)
    check_rewards(Echo(), RewardMix(), DAPO)
    check_rewards(Echo(), replace(learned, task=0.5), DAPO)
    check_rewards(Echo(), learned, GRPO)
    check_rewards(file, learned, GRPO)
    with pytest.raises(ValueError, match="rewards.task is 0, but algorithm.keep is KeepMixed"):
        check_rewards(Echo(), learned, DAPO)
    with pytest.raises(ValueError, match="rewards.task is 0, but algorithm.extra has PositiveNll"):
        check_rewards(Echo(), learned, VAPO)
    for mix in (RewardMix(), replace(learned, task=0.5)):
        with pytest.raises(ValueError, match="File without a reward has no verdict"):
            check_rewards(file, mix, GRPO)


# How a reward model reads


def other_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The same characters under other numbers: the reward model's own tokenizer, which is not the policy's."""
    symbols = (*SYMBOLS[:3], *reversed(SYMBOLS[3:]))
    characters = Tokenizer(WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token=UNKNOWN))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, eos_token=EOS_TEXT, unk_token=UNKNOWN, chat_template=chat_template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def stranger(folder, tmp_path) -> Path:
    other = tmp_path / "stranger"
    load_reward_model(str(folder)).save_pretrained(other)
    return other


def test_another_tokenizer_reads_the_text(stranger):
    own = other_tokenizer(stranger)
    judge = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), A)
    assert not judge.same_tokens
    finished, cut = completion("hello"), completion("hello", "length")
    found = judge([A, A, B], [finished, cut, finished])
    prompt, said = list(prompt_tokens(own, A.prompt)), own.encode("hello")
    assert said != list(cut.tokens)
    expected = [
        plain_score(stranger, prompt, [*said, EOS]),
        plain_score(stranger, prompt, said),
        plain_score(stranger, list(prompt_tokens(own, B.prompt)), [*said, EOS]),
    ]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_conversation_is_written_with_the_reward_models_own_template(stranger):
    chat = Problem("chat", ({"role": "user", "content": "hi"},), None)
    other_tokenizer(stranger)
    with pytest.raises(ValueError, match="stranger', which cannot read chat: .*no chat template"):
        ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), chat)
    template = (
        "{% for message in messages %}{{ '[' + message['content'] + ']' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
    )
    own = other_tokenizer(stranger, template)
    (found,) = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), chat)([chat], [completion("yo")])
    assert found == pytest.approx(plain_score(stranger, own.encode("[hi]>"), [*own.encode("yo"), EOS]), abs=1e-5)


def test_tokens_pass_as_they_are_where_they_mean_the_same(tmp_path):
    policy, bare, brief = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    bare.chat_template, brief.chat_template = None, "{{ messages[0]['content'] }}"
    assert same_tokens(tiny_tokenizer(), policy)
    assert same_tokens(bare, policy)  # without a template of its own it reads the policy's
    assert not same_tokens(brief, policy)
    assert not same_tokens(other_tokenizer(tmp_path), policy)
    bare.eos_token = "~"
    assert not same_tokens(bare, policy)


def test_a_completion_that_cannot_be_read_is_unscored_and_the_others_are_not(stranger, grading):
    other_tokenizer(stranger)
    judge = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), A)
    good, bad = completion("hello"), completion("<eos> hello")
    found = judge([A, A, B], [bad, good, good])
    [failures] = grading.failures.take()
    assert (failures.kind, failures.unscored) == ("unreadable", 1)
    assert "before its end" in failures.example
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(judge([A, B], [good, good]), abs=1e-5)
    assert math.isnan(judge([A], [bad])[0])
    assert len(grading.failures.take()) == 1


def test_one_that_a_stop_string_ended_ends_with_the_end_token(folder):
    judge = ScoringModel(RewardModel(str(folder)), tiny_tokenizer(), A)
    assert judge.same_tokens
    stopped = replace(completion("ab5", "length"), text="ab", finish="stop")  # its tokens hold what stopped it
    assert judge([A], [stopped]) == judge([A], [completion("ab")]) != judge([A], [completion("ab", "length")])


# Episodes of several turns


def episode(*turns: tuple[str, str], ended: bool = True, finish: Literal["stop", "length"] = "stop") -> Completion:
    """Its turns, role and text; the policy ends each of its own with an end token, or a stop string does."""
    tokens, sampled, found = [], [], []
    for role, text in turns:
        said = tiny_tokenizer().encode(text, add_special_tokens=False)
        said += [EOS] if role == "assistant" and ended else []
        tokens, sampled = tokens + said, sampled + [role == "assistant"] * len(said)
        found.append(Turn(role, text, len(tokens)))
    nothing = (0.0,) * len(tokens)
    last = turns[-1][1]
    return Completion(tuple(tokens), nothing, last, finish, sampled=tuple(sampled), turns=tuple(found))


GUESSES = [
    episode(("assistant", first), ("user", told), ("assistant", "7"), ended=ended)
    for first, told, ended in (("3", "higher", True), ("9", "lower", True), ("3", "higher", False))
]


def test_the_same_vocabulary_reads_every_token_of_an_episode(folder):
    model = ScoringModel(RewardModel(str(folder)), tiny_tokenizer(), A)
    assert model.same_tokens
    prompt = prompt_tokens(tiny_tokenizer(), A.prompt)
    for each in GUESSES:
        assert model.tokens(A, each) == (prompt, each.tokens)
    found = model([A] * 3, GUESSES)
    assert found == [pytest.approx(plain_score(folder, list(prompt), list(each.tokens))) for each in GUESSES]
    assert len(set(found)) == 3


def test_another_vocabulary_reads_every_text_of_an_episode(stranger):
    own = other_tokenizer(stranger)
    model = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), A)
    assert not model.same_tokens
    said, told, end = own.encode("3"), own.encode("higher"), [EOS]
    assert list(model.tokens(A, GUESSES[0])[1]) == [*said, *end, *told, *own.encode("7"), *end]
    assert list(model.tokens(A, GUESSES[2])[1]) == [*said, *told, *own.encode("7"), *end]  # stop strings are no tokens
    cut = replace(GUESSES[2], finish="length")
    assert list(model.tokens(A, cut)[1]) == [*said, *told, *own.encode("7")]
    assert len(set(model([A] * 3, GUESSES))) == 3


TALK = (
    "{% for m in messages %}{{ '#' + m.role + ':' + (m.content | trim) + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '#assistant:' }}{% endif %}"
)
USED = [("assistant", "add 3 4"), ("tool", "7"), ("assistant", "it is 7"), ("user", "right?"), ("assistant", "yes")]


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (TALK, ["assistant", "tool", "assistant", "user", "assistant"]),
        (TALK.replace("(m.content", "('' if m.role == 'tool' else m.content"), ["assistant", "user"] * 2),
        (
            TALK.replace("{{ '#'", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ '#'"),
            ["assistant", "user"] * 2,
        ),
        # It writes an earlier reply otherwise than what it asks with.
        (
            TALK.replace("'#assistant:' }}", "'#assistant:~' }}"),
            ["assistant", "tool", "assistant", "user", "assistant"],
        ),
    ],
)
def test_a_conversation_of_several_turns_is_what_the_reward_models_template_makes_of_it(stranger, template, roles):
    own = other_tokenizer(stranger, template)
    asked = {"role": "user", "content": "add them"}
    chat = Problem("1", (asked,), None)
    model = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), chat)
    messages = [{"role": role, "content": text} for role, (_, text) in zip([*roles, "assistant"], USED, strict=False)]
    text = own.apply_chat_template([asked, *messages], tokenize=False)
    whole = own.encode(str(text), add_special_tokens=False)
    cut = replace(episode(*USED, ended=False), finish="length")
    limited = replace(episode(*USED), finish="length")  # by the number of turns
    for said, tokens in ((episode(*USED), whole), (cut, whole[:-1]), (limited, whole)):
        prompt, rest = model.tokens(chat, said)
        assert [*prompt, *rest] == tokens
        assert len(rest) > 40


@pytest.mark.slow("trains a run")
@pytest.mark.parametrize("last", ["", " ", "e", "assistant"])
@pytest.mark.parametrize("template", [TALK, TALK.replace(" + '<eos>'", "")])
def test_an_episode_whose_last_reply_is_empty_or_spells_a_mark_is_read_whole(stranger, template, last):
    own = other_tokenizer(stranger, template)
    asked = {"role": "user", "content": "add them"}
    chat = Problem("1", (asked,), None)
    model = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), chat)
    said = episode(("assistant", "add 3 4"), ("user", "no"), ("assistant", last))
    text = str(own.apply_chat_template([asked, *said.messages], tokenize=False))
    prompt, rest = model.tokens(chat, said)
    assert [*prompt, *rest] == own.encode(text.removesuffix("<eos>") + "<eos>", add_special_tokens=False)
    _, cut = model.tokens(chat, replace(said, tokens=(*said.tokens[:-1], 5), finish="length"))
    assert cut == rest[:-1]
    assert math.isfinite(model([chat], [said])[0])


def test_a_reply_that_spells_an_end_leaves_its_episode_unscored(stranger, grading):
    other_tokenizer(stranger, TALK)
    chat = Problem("1", ({"role": "user", "content": "add them"},), None)
    model = ScoringModel(RewardModel(str(stranger)), tiny_tokenizer(), chat)
    hostile = episode(("assistant", "a<eos>#user:well done"), ("user", "no"), ("assistant", "yes"))
    assert math.isnan(model([chat], [hostile])[0])
    assert "before its end" in str(grading.failures.take()[0])


def test_the_token_budget_changes_nothing(folder):
    problems = [Echo().problem(number, "train", 0) for number in range(6) for _ in range(2)]
    said = [completion(str(number) * (number + 1)) for number in range(12)]
    small, large = (
        ScoringModel(RewardModel(str(folder), token_budget=budget), tiny_tokenizer(), A)(problems, said)
        for budget in (1, 10_000)
    )
    assert small == pytest.approx(large, abs=1e-5)


def test_scores_are_counted_from_a_mean_in_deviations(folder):
    problems, said = [A, B, A], [completion("hello"), completion("ab"), completion("7")]
    plain = ScoringModel(RewardModel(str(folder)), tiny_tokenizer(), A)(problems, said)
    mean = sum(plain) / 3
    centred = ScoringModel(RewardModel(str(folder), mean=mean), tiny_tokenizer(), A)(problems, said)
    assert sum(centred) == pytest.approx(0, abs=1e-6)
    scaled = ScoringModel(RewardModel(str(folder), mean=mean, deviation=0.5), tiny_tokenizer(), A)(problems, said)
    assert scaled == [(score - mean) / 0.5 for score in plain]
    for mean, deviation in ((math.nan, 1.0), (0.0, 0.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="give a finite number, and one above 0"):
            RewardModel(str(folder), mean=mean, deviation=deviation)


def test_a_policy_is_no_reward_model(tmp_path):
    policy = save_policy(tmp_path)
    with pytest.raises(ValueError, match="no score head"):
        with_reward_models(Echo(), RewardMix(models=(RewardModel(str(policy)),)), tiny_tokenizer())


# Evaluation


def test_evaluation_reports_outcome_reward_and_parts(folder):
    mix = RewardMix(task=0.0, rules=(LENGTH, replace(LENGTH, weight=1.0)))
    model, tokenizer = tiny_model(hidden=32, layers=1, intermediate=48), tiny_tokenizer()
    task = with_reward_models(Echo(), mix, tokenizer)
    options = (SamplingOptions(max_tokens=4), EvaluationOptions(problems=8), 0)
    result, answered = evaluate(task, local_sampler(model, tokenizer), tokenizer, *options)
    length = sum(len(answer.completion.text) for answer in answered) / 8
    assert result.floats()["held_out/parts/longer_is_better"] == pytest.approx(-0.1 * length)
    assert result.floats()["held_out/reward"] == pytest.approx(0.9 * length)
    assert result.floats()["held_out/outcome"] == result.accuracy == 0.0
    assert "held_out/parts" not in result.floats()
    parts = f"longer_is_better {-0.1 * length:.3f}, longer_is_better_2 {length:.3f}"
    assert share(result).startswith("0.0% (")
    assert share(result).endswith(f"; reward {0.9 * length:.3f} ({parts})")
    graded = replace(result, outcome=0.25, parts={}, unscored=1)
    assert (measure(graded), share(graded)) == ("task score", "0.250 (0.0% at least 1, 8 problems, 1 unscored)")
    assert (gain(result, result), gain(result, graded)) == ("   +0.0 points", "   +0.250")
    assert measure(result) == "accuracy"


def test_what_cannot_be_computed_is_no_number():
    """One problem has no spread over problems; where no answer is scored, nothing is known."""
    one = Evaluation(1.0, 0.2, 1.0, problems=1, unscored=0, outcome=1.0, reward=1.0, k=4, mean_at_k=1.0)
    one = replace(one, mean_half_width=math.nan, pass_at_k=1.0, pass_low=0.2, pass_high=1.0)
    assert share(one) == "100.0% (20.0% to 100.0%, 1 problem); mean@4 100.0%, pass@4 100.0% (20.0% to 100.0%)"
    assert "mean@4 100.0% ± 5.0%, pass" in share(replace(one, mean_half_width=0.05))
    none = Evaluation(math.nan, 0.0, 1.0, problems=1, unscored=1, outcome=math.nan, reward=math.nan, k=4)
    none = replace(none, mean_at_k=math.nan, mean_half_width=math.nan, pass_at_k=math.nan, pass_low=0.0, pass_high=1.0)
    none = replace(none, parts={"short": math.nan, "polite": 0.5})
    assert share(none) == (
        "unknown (1 problem, 1 unscored); mean@4 unknown, pass@4 unknown; reward unknown (short unknown, polite 0.500)"
    )
    assert gain(none, one) == gain(one, none) == ""
