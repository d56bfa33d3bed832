"""Prompts that a run could not use, found before a model is loaded."""

from jinja2 import TemplateError
from transformers import AutoConfig, PreTrainedTokenizerBase

from proximo.models import prompt_tokens
from proximo.tasks import File
from proximo.training.config import RunConfig
from proximo.types import Problem


def check_prompts(config: RunConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Of a file, every prompt: too long for the model at `path`, or refused by the chat template. All are named at
    once with their rows, or left out where the task says so; what was left out is returned."""
    if not isinstance(config.task, File):
        return []
    try:
        positions = AutoConfig.from_pretrained(path, trust_remote_code=False).max_position_embeddings
    except OSError as error:
        raise ValueError(f"model is {config.model!r}: neither a folder nor a hub id within reach") from error
    room = positions - config.sampling.max_tokens

    def complaint(problem: Problem) -> str | None:
        try:
            length = len(prompt_tokens(tokenizer, problem.prompt))
        except (ValueError, TemplateError) as error:
            return str(error)
        if length > room:
            most = config.sampling.max_tokens
            return f"the prompt has {length} tokens; with sampling.max_tokens {most} there is room for {room}"
        return None

    return config.task.check(complaint)
