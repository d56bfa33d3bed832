"""Supervised fine-tuning on a task's own reference answers: the warm start of reinforcement learning."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.maths.extras import supervised_loss
from proximo.maths.weights import TokenMean
from proximo.models import micro_batches, prompt_tokens, score
from proximo.tasks import Task


@dataclass(frozen=True)
class SftOptions:
    steps: int = 200
    examples: int = 128
    """In one optimizer step."""
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    token_budget: int = 16384
    """Tokens in one forward pass: memory only, it cannot change the result."""

    def __post_init__(self) -> None:
        if min(self.steps, self.examples, self.token_budget) < 1 or self.learning_rate <= 0 or self.warmup_steps < 0:
            raise ValueError(f"sft: {self} has a value out of range; all but warmup_steps are positive")


def fine_tune(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, options: SftOptions, seed: int
) -> Iterator[float]:
    """Train on new problems at every step; yields the loss, a token mean over the whole step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(options.steps):
        decay = 1 - step / options.steps
        warmup = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * warmup * decay
        indices = range(step * options.examples, (step + 1) * options.examples)
        yield _step(model, tokenizer, task, indices, options, seed, optimizer)


def _step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    indices: range,
    options: SftOptions,
    seed: int,
    optimizer: torch.optim.Optimizer,
) -> float:
    problems = [task.problem(index, "train", seed) for index in indices]
    prompts = [prompt_tokens(tokenizer, problem.prompt) for problem in problems]
    answers = [_answer_tokens(task, problem, tokenizer) for problem in problems]
    lengths = torch.tensor([len(answer) for answer in answers])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    tokens = torch.zeros_like(mask, dtype=torch.long)
    tokens[mask] = torch.tensor([token for answer in answers for token in answer])
    group = torch.arange(len(problems))
    weights = TokenMean()(mask, group)

    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    parts = micro_batches([len(p) for p in prompts], lengths.tolist(), group.tolist(), options.token_budget)
    for part in map(torch.tensor, parts):
        scores = score(model, prompts=prompts, tokens=tokens[part], lengths=lengths[part], group=group[part])
        loss = (supervised_loss(scores.logprobs) * weights[part].to(scores.logprobs)).sum()
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def _answer_tokens(task: Task, problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = task.reference(problem)
    if text is None:
        raise ValueError(f"task {task} has no reference answer for {problem.id}: supervised fine-tuning needs one")
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    return [*tokenizer.encode(text, add_special_tokens=False), end]
