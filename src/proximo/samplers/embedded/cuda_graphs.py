"""Decode steps as CUDA graphs: hundreds of small kernels, launched by one call. Inside, each layer is compiled."""

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from proximo.models.compiling import compiles_layers, forward, keep_variants
from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import LayerReader, LayerRun, decoder_layers, hidden_states
from proximo.samplers.embedded.fused import is_heard, is_plain
from proximo.samplers.embedded.merged_projections import joined_layers, joined_states, run_joined
from proximo.samplers.rng import draw

Result = TypeVar("Result")
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows for which a step is captured; fewer run in the next larger one, whose last rows compute nothing of use."""


MAX_KINDS = 64
"""Captured steps that are kept; each has memory of its own."""


def size_for(rows: int, slots: int) -> int:
    return min(next((size for size in SIZES if size >= rows), slots), slots)


class CapturedSteps:
    """Captured steps by what makes them differ."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._results: dict[Hashable, Any] = {}
        """What each returns; its memory is written again by each replay."""
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, kind: Hashable, step: Callable[[], Result]) -> Result:
        """Do the step. The first one of its kind runs as it is, which compiles and chooses its kernels. What it returns
        holds until the next step."""
        if kind not in self._seen:
            result = step()
            self._seen.add(kind)
            return result
        if kind not in self._graphs:
            if len(self._graphs) >= MAX_KINDS:  # a temperature that never stays the same
                self._graphs.clear()
                self._results.clear()
            graph = torch.cuda.CUDAGraph()
            # Only this thread's work is captured; graders may be busy beside it.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._results[kind] = step()
            self._graphs[kind] = graph
        self._graphs[kind].replay()
        return self._results[kind]


def compiled_states(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    """A decode step's hidden states by compiled layers, one compilation for all; None where nothing is compiled."""
    if not compiles_layers(model):
        return None
    layers = decoder_layers(model)
    if not all(is_plain(layer) for layer in layers) or is_heard(model):
        return partial(hidden_states, model, run=_compiled_layer())
    return partial(joined_states, model, joined_layers(layers), _compiled_joined())


@cache
def compiled_draw() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Fewer passes over logits that are as wide as the vocabulary."""
    keep_variants()
    return torch.compile(draw, dynamic=True)


@cache
def _compiled_layer() -> LayerRun:
    keep_variants()
    return torch.compile(_layer, dynamic=True, fullgraph=True)


@cache
def _compiled_joined() -> Callable[..., tuple[Tensor, Tensor]]:
    keep_variants()
    return torch.compile(run_joined, dynamic=True, fullgraph=True)


def _layer(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], reader: LayerReader) -> Tensor:
    """A function of its own: torch keeps what it compiled by function, and training passes have theirs."""
    return forward(layer, hidden, angles, reader)
