"""A LoRA policy: the model's own weights are frozen, and an adapter is trained.

Optimizer state exists for the adapter alone. The reference is the same model with the adapter off, so there is no
second copy of the weights; checkpoints hold the adapter, as peft reads it, and name the base model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from proximo.learner.options import LearnerOptions
from proximo.learner.passes import Passes
from proximo.learner.policy import PlainPolicy
from proximo.models.adapters.files import read_adapter, save_model
from proximo.models.adapters.lora import Lora, adapter_off, add_lora, merged_weights
from proximo.models.model_types import PreTrainedModel
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float


class LoraPolicy(PlainPolicy):
    """An adapter is trained; the reference is the base model, or the adapter as it was at the last reset.

    Example: Learner(LoraPolicy(model, Lora(rank=8), base="runs/sft", seed=0), GRPO, options, temperature=1.0, seed=0)
    """

    def __init__(self, model: PreTrainedModel, lora: Lora, *, base: str, seed: int) -> None:
        """Adds the adapter to `model`, which was loaded from `base`; the first A is drawn with `seed`."""
        add_lora(model, lora, base=base, seed=seed)
        super().__init__(model)
        self._needs_reference = False
        self._reset_to: dict[str, Tensor] = {}
        """The adapter at the last reset of the reference, by parameter name."""

    def set_up(self, options: LearnerOptions, *, needs_reference: bool, copied: object = None) -> None:
        self._needs_reference = needs_reference

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model)

    @property
    def has_reference(self) -> bool:
        return self._needs_reference

    def reference_logprobs(self, passes: Passes, batch: Batch) -> Float[Tensor, "B T"]:
        with self._as_at_reset() if self.reference_was_reset else adapter_off(self.model):
            return passes.without_gradient(self.model, batch).logprobs

    def reset_reference(self) -> None:
        if self.has_reference:
            self._reset_to = {name: each.detach().clone() for name, each in self.parameters().items()}
            self.reference_was_reset = True

    @contextmanager
    def _as_at_reset(self) -> Iterator[None]:
        """The parameters hold the adapter of the last reset, and afterwards their own numbers again."""
        kept = [(each.detach(), each.detach().clone()) for each in self.parameters().values()]
        try:
            for name, parameter in self.parameters().items():
                parameter.detach().copy_(self._reset_to[name])
            yield
        finally:
            for parameter, numbers in kept:
                parameter.copy_(numbers)

    def save(self, folder: Path) -> None:
        save_model(self.model, folder)

    def _load_weights(self, folder: Path) -> None:
        read_adapter(self.model, folder)

    def reference_tensors(self) -> dict[str, Tensor]:
        if not self._reset_to:  # about to be filled from a checkpoint
            self._reset_to = {name: torch.empty_like(each) for name, each in self.parameters().items()}
        return self._reset_to
