"""A policy as samplers see it, and passes over its model that leave no trace in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from proximo.models.model_types import PreTrainedModel
from proximo.models.scoring import score
from proximo.types.tensor_types import Float, Int


class SampledPolicy(Protocol):
    """The policy under training, as far as samplers may ask: the module itself, or its weights by name."""

    @property
    def model(self) -> PreTrainedModel:
        """The module that is trained, with its adapter if it has one; samplers of this process decode with it."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and current value of every weight, one at a time, as a plain model of the same class has them: an
        adapter is added to the weights it belongs to, and tied weights come once. For engines that keep a copy."""
        ...

    @property
    def device(self) -> torch.device:
        """Device on which the policy is trained. Where it is in shards, `model` may be a copy in the host's memory."""
        ...

    def logprobs(
        self, prompts: Sequence[Sequence[int]], tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> Float[Tensor, "B T"]:
        """Log-probs of one completion after each prompt, to compare an engine's with."""
        ...


class WholeModel:
    """Base of each `SampledPolicy` whose model is whole in this process."""

    model: PreTrainedModel

    @property
    def device(self) -> torch.device:
        return self.model.device

    def logprobs(
        self, prompts: Sequence[Sequence[int]], tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> Float[Tensor, "B T"]:
        with evaluating(self.model):
            return logprobs_of(self.model, prompts, tokens, lengths)


@contextmanager
def evaluating(model: PreTrainedModel, *, in_shards: bool = False) -> Iterator[None]:
    """No dropout and no gradients inside; the learner finds its model as it left it."""
    training = [module for module in model.modules() if module.training]  # often none, and then nothing is set
    for module in training:
        module.training = False
    try:
        # What is gathered from shards must be of use to a training pass, too.
        with torch.no_grad() if in_shards else torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def logprobs_of(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """Log-probs of one completion after each prompt."""
    return score(model, prompts=prompts, tokens=tokens, lengths=lengths, group=torch.arange(len(prompts))).logprobs
