"""Reading prompts, each once, and the passes through the model that reading and decoding have in common."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.models.logprobs import project
from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import ModelReader
from proximo.models.routing import recording
from proximo.samplers.embedded.cache import PrefillReader
from proximo.samplers.embedded.fused import MAX_COPIED, is_exact
from proximo.system.machine import side_by_side
from proximo.system.phases import phase
from proximo.types.tensor_types import Float, Int

PREFILL_TOKENS = 8192
"""Prompts are read in batches of about this many tokens, padding included: enough to keep a device busy."""

Prompt = tuple[int, ...]


class ModelPasses:
    """A model's passes with its head, its experts written down where that is asked for."""

    def __init__(self, model: PreTrainedModel, record_routes: bool) -> None:
        self.model, self._record_routes = model, record_routes
        head = model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        # The models of the fast path have none, and the learner's log-probs know of none.
        assert head.bias is None
        self._head = head.weight
        self._is_large = head.weight.numel() > MAX_COPIED and is_exact(head.weight)

    @property
    def device(self) -> torch.device:
        return self._head.device

    @property
    def on_gpu(self) -> bool:
        return self._head.is_cuda

    def run(
        self,
        states: Callable[..., Tensor],
        tokens: Int[Tensor, "R S"],
        positions: Int[Tensor, "R S"],
        reader: ModelReader,
    ) -> tuple[Float[Tensor, "R S E"], Int[Tensor, "R S L K"] | None]:
        """Hidden states and, where they are recorded, the experts that each token went to."""
        if not self._record_routes:
            return states(tokens, positions, reader), None
        with recording(self.model) as recorder:
            hidden = states(tokens, positions, reader)
        return hidden, recorder.chosen.cpu().unflatten(0, tuple(tokens.shape))

    def logits(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        if self._is_large:
            return side_by_side(states, self._head)
        # The learner's own product: the same float32 logits, whatever the model's precision.
        return project(states, self._head.T)


@dataclass(frozen=True)
class Prefix:
    """A prompt that has been read."""

    memory: Float[Tensor, "N 2 K S D"]
    logits: Float[Tensor, " V"]
    """Logits of the first token after it."""
    routes: Int[Tensor, "S L C"] | None
    """The C experts of each of L layers that its tokens went to, where that is recorded."""


class Prefills:
    """Reads prompts, and remembers those of which samples still wait."""

    def __init__(self, passes: ModelPasses, states: Callable[..., Tensor]) -> None:
        self._passes, self._states = passes, states
        self._kept: dict[Prompt, Prefix] = {}

    def keep(self, prompt: Prompt, prefix: Prefix | None) -> None:
        """Keep it for samples that still wait; None where none do. A copy: a part of a batch would hold all of it."""
        if prefix is None:
            self._kept.pop(prompt, None)
        elif prompt not in self._kept:
            self._kept[prompt] = replace(prefix, memory=prefix.memory.clone())

    def read(self, prompts: Collection[Prompt]) -> Iterator[tuple[Prompt, Prefix]]:
        """Each of them, those that are known first."""
        known = [prompt for prompt in prompts if prompt in self._kept]
        for prompt in known:
            yield prompt, self._kept[prompt]
        for batch in _batches(set(prompts) - set(known)):
            yield from self._read(batch)

    def _read(self, batch: list[Prompt]) -> Iterator[tuple[Prompt, Prefix]]:
        lengths = torch.tensor([len(prompt) for prompt in batch])
        tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(tokens, batch, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(self._passes.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        reader = PrefillReader()
        with phase("prefill"):
            states, routes = self._passes.run(self._states, tokens, positions, reader)
            logits = self._passes.logits(states[torch.arange(len(batch)), lengths - 1])
        memory = reader.memory
        for row, prompt in enumerate(batch):
            known = None if routes is None else routes[row, : len(prompt)]
            yield prompt, Prefix(memory[:, :, row, :, : len(prompt)], logits[row], known)


def _batches(prompts: set[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of similar length together, padded to at most about `PREFILL_TOKENS`."""
    batch: list[Prompt] = []
    # The prompt itself breaks ties: a set has no order, and equal calls must batch alike.
    for prompt in sorted(prompts, key=lambda prompt: (len(prompt), prompt)):
        if batch and (len(batch) + 1) * len(prompt) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
