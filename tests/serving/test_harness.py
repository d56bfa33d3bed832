"""The model for lm-evaluation-harness, with stand-ins for what it imports of that package: scores and completions."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from proximo.models import load_model, prompt_tokens
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.serving.logprobs import token_logprobs
from proximo.types import Request


class TemplateLM:
    """What the harness's class does for the methods that are tested here."""

    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *arguments: None)


def windows(tokens: list[int], prefix: int, longest: int, context: int):
    """Windows without overlap: the harness's own, for a context of one token."""
    for start in range(0, len(tokens), longest):
        yield ([prefix] if start == 0 else tokens[start - 1 : start]), tokens[start : start + longest]


@dataclass(frozen=True)
class Instance:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def harness(served, tmp_path_factory) -> Iterator[tuple[ModuleType, str]]:
    """The module, imported with stand-ins, and a model's folder."""
    folder = tmp_path_factory.mktemp("harness")
    for part in served:
        part.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, members in {
            "lm_eval": {},
            "lm_eval.api": {},
            "lm_eval.api.model": {"TemplateLM": TemplateLM},
            "lm_eval.api.registry": {"register_model": lambda name: lambda kind: kind},
            "lm_eval.utils": {"get_rolling_token_windows": windows, "make_disjoint_window": lambda pair: pair},
        }.items():
            module = ModuleType(name)
            vars(module).update(members)
            patch.setitem(sys.modules, name, module)
        yield import_module("proximo.serving.harness"), str(folder)
        del sys.modules["proximo.serving.harness"]


@pytest.fixture
def lm(harness) -> Any:
    module, folder = harness
    return module.ProximoLM(folder)


def test_continuations_are_scored(lm, harness, monkeypatch):
    requests = [(None, [5, 6], [7, 8]), (None, [5, 6], [9]), (None, [5], []), (None, [1, 2, 3], [4])]
    found = lm._loglikelihood_tokens(requests)
    for (_, before, tokens), (logprob, greedy) in zip(requests, found, strict=True):
        [scores] = token_logprobs(lm._model, [(before, tokens)], top=1)
        assert logprob == pytest.approx(sum(each.logprob or 0.0 for each in scores), abs=1e-5)
        assert greedy == all(each.top[0][0] == each.token for each in scores)
    monkeypatch.setattr(harness[0], "PASS_TOKENS", 3)  # one pass for each
    assert [each[0] for each in lm._loglikelihood_tokens(requests)] == pytest.approx(
        [each[0] for each in found], abs=1e-5
    )
    # Of a text that is too long the end counts.
    lm.max_length = 4
    [(cut, _)] = lm._loglikelihood_tokens([(None, [1, 2, 3, 5, 6], [7, 8])])
    assert cut == pytest.approx(found[0][0], abs=1e-5)


def test_whole_texts_are_scored_window_by_window(lm):
    lm.max_length = 4
    tokens = lm.tok_encode("12+7=", add_special_tokens=False)
    start = lm.prefix_token_id
    rows = [([start], tokens[:3]), (tokens[2:3], tokens[3:])]
    expected = sum(each.logprob or 0.0 for row in token_logprobs(lm._model, rows, 0) for each in row)
    assert lm.loglikelihood_rolling([Instance(("12+7=",))]) == pytest.approx([expected], abs=1e-4)


def test_completions_with_their_own_arguments(lm):
    greedy = {"until": [], "max_gen_toks": 6}
    [whole, other] = lm.generate_until([Instance(("12+7=", greedy)), Instance(("3", greedy))])
    request = Request(0, prompt_tokens(lm.tokenizer, "12+7="), 1)
    options = SamplingOptions(temperature=0.0, max_tokens=6)
    [[expected]] = local_sampler(load_model(lm._name), lm.tokenizer).sample([request], options, seed=0, step=-1)
    assert whole == expected.text
    stop = {"until": [other[2:4], lm.tokenizer.eos_token], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    found = lm.generate_until([Instance(("12+7=", greedy)), Instance(("3", stop))])
    assert found == [whole, other[: other.index(other[2:4])]]
    with pytest.raises(ValueError, match="generation_kwargs has num_beams"):
        lm.generate_until([Instance(("3", {"num_beams": 2}))])


def test_a_special_token_ends_a_completion(lm):
    end = lm.tokenizer.convert_ids_to_tokens(lm.prefix_token_id)
    assert lm._options({"until": end}).stop == (end,)
    assert lm.generate_until([Instance(("3", {"until": [end], "max_gen_toks": 3}))])
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]).endswith("assistant: ")
