"""Prompts that a run could not use, found before a model is loaded."""

from transformers import PreTrainedTokenizerBase

from proximo.models import prompt_tokens
from proximo.models.loading import read_config
from proximo.tasks import Code, File
from proximo.training.config import RunConfig
from proximo.types import Problem


def check_prompts(config: RunConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Of a file, every prompt: too long for the model at `path`, or refused by the chat template. All are named at
    once with their rows, or left out where the task says so; what was left out is returned."""
    if not isinstance(config.task, File | Code):
        return []
    positions = read_config(path).max_position_embeddings
    room = positions - config.sampling.max_tokens

    def complaint(problem: Problem) -> str | None:
        try:
            length = len(prompt_tokens(tokenizer, problem.prompt))
        except ValueError as error:
            return str(error)
        if length > room:
            most = config.sampling.max_tokens
            return f"the prompt has {length} tokens; with sampling.max_tokens {most} there is room for {room}"
        return None

    return config.task.check(complaint)
