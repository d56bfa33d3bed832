"""What a run will need, before anything is loaded."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proximo.models.shipped import resolve
from proximo.training.config import RunConfig


def batch_arithmetic(config: RunConfig) -> list[str]:
    """Prompts, completions, updates and tokens of a step and of the run."""
    training = config.training
    completions = training.groups * training.group_size
    tokens = completions * config.sampling.max_tokens
    return [
        f"a step: {training.groups} prompts × {training.group_size} completions = {completions} completions, "
        f"at most {tokens} tokens sampled",
        f"{training.updates} optimizer updates a step, {completions // training.minibatches} completions each",
        f"{config.steps} steps: {config.steps * training.updates} updates, {config.steps * completions} completions, "
        f"at most {config.steps * tokens} tokens",
    ]


def memory(config: RunConfig) -> str:
    """Weights, gradients and optimizer in float32; activations come on top, bounded by training.token_budget."""
    try:
        shape = AutoConfig.from_pretrained(resolve(config.model), trust_remote_code=False)
    except OSError:
        return f"memory: unknown, {config.model!r} is neither a folder nor a hub id within reach"
    except ValueError as error:
        return f"memory: unknown, {error}"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # float32: the weights, their gradients and AdamW's two moments; a reference is one more set of weights.
    copies = 4 + config.algorithm.needs_reference
    return (
        f"memory: {parameters / 1e6:.1f} M parameters × 4 bytes × {copies} (weights, gradients, two moments"
        f"{', reference' if config.algorithm.needs_reference else ''}) = {parameters * 4 * copies / 1e9:.2f} GB, "
        f"and the activations of {config.training.token_budget} tokens at most"
    )
