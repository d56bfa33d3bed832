"""What every engine must do. A kind of engine passes by a subclass whose module has a fixture `bench`."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models import load_model, load_tokenizer, score
from proximo.models.sampled import logprobs_of
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import end_tokens
from proximo.samplers.engines.engine import Draw, Engine, EngineLost, Generated
from proximo.samplers.engines.probe import LogprobProbe
from proximo.samplers.engines.sync import WeightSync
from proximo.samplers.sampler import SamplingOptions

FREE = SamplingOptions(temperature=1.0, max_tokens=12)
HOT = SamplingOptions(temperature=2.0, max_tokens=12)
"""So hot that two draws hardly ever agree."""


def nudge(model: PreTrainedModel, seed: int, size: float = 0.1, only: str = "") -> None:
    """Other weights, near the old ones."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random, dtype=torch.float32).to(weight)
            if only in name:
                weight.add_(noise * size * (weight.std() if weight.numel() > 1 else 1))


class SmallPolicy:
    """The shipped model in float32, as a fleet sees a policy."""

    def __init__(self) -> None:
        path = resolve("tiny-arithmetic")
        self.model: PreTrainedModel = load_model(path, dtype=torch.float32).requires_grad_(False)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each.detach()) for name, each in self.model.named_parameters())

    @property
    def device(self) -> torch.device:
        return self.model.device

    def logprobs(self, prompts: Sequence[Sequence[int]], tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return logprobs_of(self.model, prompts, tokens, lengths)


@dataclass
class Bench:
    """An engine that has started and joined, and the policy whose weights it gets."""

    engine: Engine
    sync: WeightSync
    policy: SmallPolicy
    deadline: float
    version: int = 0

    def push(self) -> None:
        """The policy's weights, as a fleet pushes them."""
        self.version += 1
        self.engine.pause("abort", self.deadline)
        assert self.sync.push([self.engine], self.policy.weights, self.version, self.deadline) == {}
        self.engine.resume(self.deadline)

    def prompt(self, text: str = "12+7=") -> tuple[int, ...]:
        return tuple(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    def gaps(self, prompt: tuple[int, ...], found: Generated, temperature: float = 1.0) -> torch.Tensor:
        """Differences to the policy's log-probs of the same tokens."""
        tokens = torch.tensor([found.tokens])
        scores = score(
            self.policy.model,
            prompts=[prompt],
            tokens=tokens,
            lengths=torch.tensor([tokens.shape[1]]),
            group=torch.tensor([0]),
            temperature=temperature,
        )
        return (scores.logprobs[0].double() - torch.tensor(found.logprobs, dtype=torch.float64)).abs()


class EngineConformance:
    """In this order: the last test ends the engine."""

    def test_a_completion_has_a_log_prob_for_each_token_and_says_how_it_ended(self, bench: Bench):
        bench.push()
        ends = end_tokens(bench.policy.model, bench.policy.tokenizer)
        found = [bench.engine.generate(bench.prompt(), FREE, Draw(0, 0, 0, sample)) for sample in range(4)]
        for each in found:
            assert 1 <= len(each.tokens) <= FREE.max_tokens
            assert len(each.logprobs) == len(each.tokens)
            assert each.finish == ("stop" if each.tokens[-1] in ends else "length")
            assert not ends & set(each.tokens[:-1])
        cut = bench.engine.generate(bench.prompt(), replace(HOT, max_tokens=1), Draw(0, 0, 0, 0))
        assert len(cut.tokens) == 1

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_those_of_the_policy_at_the_temperature(self, bench: Bench, temperature):
        bench.push()
        prompt, options = bench.prompt("88-19="), replace(FREE, temperature=temperature)
        found = [bench.engine.generate(prompt, options, Draw(1, 2, 3, sample)) for sample in range(4)]
        gaps = torch.cat([bench.gaps(prompt, each, temperature) for each in found])
        assert gaps.mean() <= 1e-5
        assert gaps.max() <= 1e-3

    def test_equal_draws_are_equal_alone_and_among_others(self, bench: Bench):
        bench.push()
        alone = bench.engine.generate(bench.prompt(), HOT, Draw(5, 6, 7, 0))
        with ThreadPoolExecutor(4) as pool:
            several = list(pool.map(lambda n: bench.engine.generate(bench.prompt(), HOT, Draw(5, 6, 7, n)), range(4)))
        assert several[0].tokens == alone.tokens
        assert several[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert len({each.tokens for each in several}) > 1

    @pytest.mark.parametrize("other", [{"seed": 9}, {"step": 9}, {"key": 9}, {"sample": 9}])
    def test_every_part_of_a_draw_counts(self, bench: Bench, other):
        draw = Draw(1, 2, 3, 4)
        found = [bench.engine.generate(bench.prompt(), HOT, each).tokens for each in (draw, replace(draw, **other))]
        assert found[0] != found[1]

    def test_a_completion_is_continued_behind_a_prefix(self, bench: Bench):
        bench.push()
        prefix = bench.prompt("1+")
        found = bench.engine.generate(bench.prompt(), HOT, Draw(1, 2, 3, 4, len(prefix)), prefix)
        assert len(found.tokens) <= HOT.max_tokens - len(prefix)
        assert found.tokens[: len(prefix)] != prefix
        assert bench.gaps(bench.prompt() + prefix, found, HOT.temperature).mean() <= 1e-5
        assert {(each.start, each.end) for each in found.spans} == {(0, len(found.tokens))}

    def test_a_stop_string_ends_a_completion_and_its_tokens_stay(self, bench: Bench):
        def read(tokens) -> str:
            return str(bench.policy.tokenizer.decode(list(tokens), skip_special_tokens=True))

        long = bench.engine.generate(bench.prompt(), HOT, Draw(0, 0, 1, 0))
        stop = next(text for token in long.tokens if (text := read([token])).strip())
        found = bench.engine.generate(bench.prompt(), replace(HOT, stop=(stop,)), Draw(0, 0, 1, 0))
        assert found.finish == "stop"
        assert stop in read(found.tokens)
        assert long.tokens[: len(found.tokens)] == found.tokens

    def test_pushed_weights_are_the_ones_that_sample(self, bench: Bench):
        probe = LogprobProbe(bench.policy.model, 24)
        bench.push()
        before = probe.compare(bench.policy, probe.ask(bench.engine, 0))
        nudge(bench.policy.model, seed=bench.version)
        stale = probe.compare(bench.policy, probe.ask(bench.engine, 0))
        bench.push()
        found = probe.ask(bench.engine, 1)
        after = probe.compare(bench.policy, found)
        assert probe.passes(before), before
        assert not probe.passes(stale), stale
        assert probe.passes(after), after
        assert bench.engine.version() == bench.version
        assert {each.version for each in found} == {bench.version}
        for each in found:
            assert [(span.start, span.end) for span in each.spans] == [(0, len(each.tokens))]

    def test_nothing_is_sampled_during_a_pause_that_keeps_requests(self, bench: Bench):
        bench.push()
        bench.engine.pause("keep", bench.deadline)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(bench.engine.generate, bench.prompt(), FREE, Draw(0, 0, 0, 0))
            nudge(bench.policy.model, seed=100)
            bench.version += 1
            assert bench.sync.push([bench.engine], bench.policy.weights, bench.version, bench.deadline) == {}
            assert not asked.done()
            bench.engine.resume(bench.deadline)
            found = asked.result()
        assert found.version == bench.version
        assert bench.gaps(bench.prompt(), found).mean() <= 1e-5

    def test_an_interrupted_completion_is_continued_behind_what_it_has(self, bench: Bench):
        bench.push()
        prompt, options = bench.prompt(), replace(HOT, max_tokens=200)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(bench.engine.generate, prompt, options, Draw(0, 0, 2, n)) for n in range(4)]
            bench.engine.pause("abort", bench.deadline)
            bench.engine.resume(bench.deadline)
            found = [each.result() for each in asked]
        for sample, each in enumerate(found):
            whole = each
            if each.finish == "abort":
                draw = Draw(0, 0, 2, sample, len(each.tokens))
                whole = each.continued(bench.engine.generate(prompt, options, draw, each.tokens))
            assert whole.finish in ("stop", "length")
            assert len(whole.tokens) == len(whole.logprobs) == len(whole.versions) <= options.max_tokens
            assert set(whole.versions) == {bench.version}
            assert bench.gaps(prompt, whole, HOT.temperature).mean() <= 1e-5

    def test_it_says_that_it_lives_by_generating(self, bench: Bench):
        health = bench.engine.alive(bench.deadline)
        assert (health.alive, health.reason) == (True, "")

    def test_half_an_update_is_reported_and_a_stopped_engine_answers_nothing(self, bench: Bench):
        bench.push()
        bench.engine.pause("abort", bench.deadline)
        named = list(bench.policy.weights())
        with TemporaryDirectory() as folder:
            half = {name: weight.clone() for name, weight in named[: len(named) // 2]}
            half[named[-2][0]] = torch.zeros(3, 3)
            save_file(half, Path(folder) / "model.safetensors")
            bench.engine.begin_update(bench.deadline)
            with pytest.raises(EngineLost):
                bench.engine.update({"path": folder}, bench.deadline)
        bench.engine.stop()
        assert not bench.engine.alive(bench.deadline).alive
        with pytest.raises(EngineLost):
            bench.engine.generate(bench.prompt(), FREE, Draw(0, 0, 0, 0))
        bench.engine.stop()  # once more is harmless
