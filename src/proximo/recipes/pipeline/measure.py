"""Measure every policy on the same held-out prompts: learned reward, true reward, and KL from the start."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from proximo.models import load_model, load_tokenizer, pick_device, pick_dtype, problem_tokens, score_rows
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.recipes.pipeline.config import SFT, PipelineConfig
from proximo.recipes.pipeline.result import Fooled, Measured
from proximo.rl.build import MAX_SLOTS
from proximo.rl.mixed_reward import with_reward_models
from proximo.samplers.embedded import local_sampler
from proximo.supervised.encoding import Encoded, EncodedRows, completion_tokens, to_rows
from proximo.types import Completion, Grade, Problem, Request
from proximo.types.tensor_types import Float

TOKEN_BUDGET = 16384
"""Tokens per forward pass; affects memory, not results."""


class Measuring:
    """The held-out prompts, both rewards and the fine-tuned model, ready to measure any policy."""

    def __init__(self, config: PipelineConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.tokenizer, self.reference = self._open(SFT)
        self.task = with_reward_models(config.task, config.rewards(folder), self.tokenizer)
        size = min(config.held_out.problems, config.task.held_out)
        self.problems = [config.task.problem(index, "held_out", config.seed) for index in range(size)]
        self.right = self.task.grade(self.problems, [self._right(problem) for problem in self.problems])

    def __call__(self, name: str) -> Measured:
        """Measure the policy in a folder of the pipeline, with the same random numbers for each."""
        samples = self.config.held_out.samples
        tokenizer, model = self._open(name)
        requests = [
            Request(number, problem_tokens(tokenizer, problem), samples) for number, problem in enumerate(self.problems)
        ]
        sampler = local_sampler(model, tokenizer, slots=MAX_SLOTS)
        # Step −1 belongs to no training step.
        answers = sampler.sample(requests, self.config.sampling, seed=self.config.seed, step=-1)
        completions = [completion for siblings in answers for completion in siblings]
        grades = self.task.grade([problem for problem in self.problems for _ in range(samples)], completions)
        fooled = self._fooled(completions, grades)
        learned, learned_half_width = _mean([grade.reward for grade in grades], samples)
        true, true_half_width = _mean([grade.outcome for grade in grades], samples)
        kl, kl_half_width = _mean(self._kl(model, requests, answers), samples)
        return Measured(
            learned=learned,
            learned_half_width=learned_half_width,
            true=true,
            true_half_width=true_half_width,
            sorted_share=sum(grade.outcome == 1 for grade in grades) / len(grades),
            fooled_share=len(fooled) / len(grades),
            kl=kl,
            kl_half_width=kl_half_width,
            example=max(fooled, key=lambda each: each.learned - each.answer_learned, default=None),
        )

    def _open(self, name: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        path = resolve(str(self.folder / name))
        device = pick_device(self.config.device)
        return load_tokenizer(path), load_model(path, device=device, dtype=pick_dtype("auto", device))

    def _right(self, problem: Problem) -> Completion:
        text = str(problem.answer)
        return Completion(completion_tokens(self.tokenizer, problem.prompt, text), (), text, "stop")

    def _fooled(self, completions: Sequence[Completion], grades: Sequence[Grade]) -> list[Fooled]:
        samples = self.config.held_out.samples
        examples = []
        for row, (completion, grade) in enumerate(zip(completions, grades, strict=True)):
            problem, right = self.problems[row // samples], self.right[row // samples]
            if grade.reward > right.reward and grade.outcome < right.outcome:
                text, answer = completion.text, str(problem.answer)
                examples.append(Fooled(str(problem.prompt), text, grade.reward, grade.outcome, answer, right.reward))
        return examples

    @torch.no_grad()
    def _kl(
        self, model: PreTrainedModel, requests: Sequence[Request], answers: Sequence[tuple[Completion, ...]]
    ) -> list[float]:
        """log π − log π_reference of each completion: k1, summed over its tokens."""
        rows = to_rows(
            [
                Encoded(str(request.key), request.prompt_tokens, tuple(each.tokens for each in siblings))
                for request, siblings in zip(requests, answers, strict=True)
            ]
        )
        kl = torch.zeros(len(rows.lengths), dtype=torch.float64)
        for part in rows.parts(TOKEN_BUDGET):
            kl[part] = (self._logprobs(model, rows.at(part)) - self._logprobs(self.reference, rows.at(part))).to(kl)
        return kl.tolist()

    def _logprobs(self, model: PreTrainedModel, rows: EncodedRows) -> Float[Tensor, " B"]:
        scores = score_rows(model, rows, temperature=self.config.sampling.temperature)
        return scores.logprobs.double().sum(dim=1)


def _mean(values: Sequence[float], samples: int) -> tuple[float, float]:
    """The mean, and half of its 95 % interval over prompts, since completions of a prompt are not independent."""
    means = [statistics.fmean(values[start : start + samples]) for start in range(0, len(values), samples)]
    return statistics.fmean(means), 1.96 * statistics.stdev(means) / math.sqrt(len(means))
