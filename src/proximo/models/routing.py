"""Experts that each token goes to, recorded and replayed by hooks on the routers: no model code is patched.

Only the choice of experts is kept. Replayed, their weights are computed anew from the live logits, so that the
router still learns. What "weights" means differs from family to family; here it is Qwen3-MoE's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from proximo.models.model_types import Qwen3MoeTopKRouter
from proximo.models.packing.layout import Places
from proximo.types.tensor_types import Bool, Float, Int

UNKNOWN = -1
"""Stands for an expert that was not recorded; the router then chooses."""


@dataclass(frozen=True)
class Routes:
    """The K experts of each of L layers that tokens went to when they were consumed, int16; -1 is unknown."""

    prompts: tuple[Tensor, ...]
    """[tokens, L, K] for each prompt; an empty tuple: unknown."""
    rows: Int[Tensor, "B T L K"]
    """Aligned with completion tokens. A completion's last token is never consumed, so it is unknown."""

    def at(self, places: Places, positions: int) -> Int[Tensor, "N L K"]:
        """Route of each position of a pass."""
        flat = self.rows.new_full((positions, *self.rows.shape[2:]), UNKNOWN)
        flat[places.completion_tokens] = self.rows[places.consumed]
        if self.prompts:
            flat[places.prompt_tokens] = torch.cat([self.prompts[number] for number in places.prompts.tolist()])
        return flat


def routes_of(flat: Int[Tensor, "N L K"], places: Places, prompt_lengths: list[int]) -> Routes:
    """Routes that a pass recorded, aligned with tokens; prompts that no row of it belongs to are unknown."""
    rows = flat.new_full((*places.consumed.shape, *flat.shape[1:]), UNKNOWN)
    rows[places.consumed] = flat[places.completion_tokens]
    prompts = [flat.new_full((length, *flat.shape[1:]), UNKNOWN) for length in prompt_lengths]
    numbers = places.prompts.tolist()
    stretches = flat[places.prompt_tokens].split([prompt_lengths[number] for number in numbers])
    for number, stretch in zip(numbers, stretches, strict=True):
        prompts[number] = stretch
    return Routes(tuple(prompts), rows)


def routers(model: nn.Module) -> list[Qwen3MoeTopKRouter]:
    """Routers in the order of layers; none in a dense model."""
    modules = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    kind = _router()
    known = [module for module in modules if isinstance(module, kind)]
    if len(known) < len(modules):
        kinds = ", ".join(sorted({type(module).__name__ for module in modules} - {kind.__name__}))
        raise ValueError(f"the model routes by {kinds}: only Qwen3-MoE's routers can be read and replayed")
    return known


def router_layers(model: nn.Module) -> list[int]:
    """Numbers of the layers that have a router, counted over all layers of the model."""
    known = set(map(id, routers(model)))
    names = [name for name, module in model.named_modules() if id(module) in known]
    return [next(int(part) for part in name.split(".") if part.isdecimal()) for name in names]


def is_mixture(model: nn.Module) -> bool:
    """True if the model has routers that can be read."""
    return any(isinstance(module, _router()) for module in model.modules())


@cache
def _router() -> type[Qwen3MoeTopKRouter]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    return modeling_qwen3_moe.Qwen3MoeTopKRouter


def needed_routers(model: nn.Module, what: str) -> list[Qwen3MoeTopKRouter]:
    """The routers, where `what` is no use without any."""
    modules = routers(model)
    if not modules:
        raise ValueError(f"{what}, but {type(model).__name__} has no experts to choose from: leave it out")
    return modules


class Recorder:
    """Routers' choices of each layer in one pass. Checkpointed layers run twice; their first run counts."""

    def __init__(self, layers: int, *, keeps_logits: bool) -> None:
        self._chosen: list[Int[Tensor, "N K"] | None] = [None] * layers
        self._logits: list[Float[Tensor, "N X"] | None] = [None] * layers
        self._keeps_logits = keeps_logits

    def hear(self, layer: int, logits: Float[Tensor, "N X"], chosen: Int[Tensor, "N K"]) -> None:
        if self._chosen[layer] is None:
            self._chosen[layer] = chosen.detach().to(torch.int16)
            self._logits[layer] = logits if self._keeps_logits else None

    @property
    def chosen(self) -> Int[Tensor, "N L K"]:
        """The experts that were used: replayed ones where there was a replay."""
        return torch.stack([chosen for chosen in self._chosen if chosen is not None], dim=1)

    @property
    def logits(self) -> Float[Tensor, "N L X"]:
        """Live, with their gradient."""
        return torch.stack([logits for logits in self._logits if logits is not None], dim=1)


@contextmanager
def recording(model: nn.Module, *, keeps_logits: bool = False) -> Iterator[Recorder]:
    """Listen to the routers of one pass."""
    modules = needed_routers(model, "routes are to be recorded")
    recorder = Recorder(len(modules), keeps_logits=keeps_logits)

    def listener(layer: int):
        def listen(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            recorder.hear(layer, output[0], output[2])

        return listen

    with _hooked(modules, [listener(layer) for layer in range(len(modules))]):
        yield recorder


@dataclass(frozen=True)
class Agreement:
    """Agreement of replayed choices with those that the routers would have made: sums over positions."""

    positions: Int[Tensor, ""]
    """Number of positions with a known route."""
    equal: Float[Tensor, " L"]
    """Sum of each one's share of equal experts, by layer."""
    changed: Int[Tensor, ""]
    """Number of positions whose experts differ in some layer."""

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.positions + other.positions, self.equal + other.equal, self.changed + other.changed)

    @property
    def overlap(self) -> Float[Tensor, " L"]:
        """The mean share of equal experts in each layer; 1 where nothing was replayed."""
        return self.equal / self.positions if self.positions else torch.ones_like(self.equal)


class Replay:
    """Compares what is replayed with what the routers would have chosen, layer by layer, once each."""

    def __init__(self, indices: Int[Tensor, "N L K"]) -> None:
        self._indices = indices
        self._known: Bool[Tensor, " N"] = (indices != UNKNOWN).flatten(1).all(dim=1)
        self._equal: list[Int[Tensor, " N"] | None] = [None] * indices.shape[1]

    def choose(self, layer: int, native: Int[Tensor, "N K"]) -> Int[Tensor, "N K"]:
        wanted = self._indices[:, layer].long()
        assert len(wanted) == len(native), "routes of another pass"
        if self._equal[layer] is None:
            self._equal[layer] = (native[:, :, None] == wanted[:, None, :]).sum(dim=(1, 2))
        return torch.where(self._known[:, None], wanted, native)

    def agreement(self, places: Int[Tensor, " M"]) -> Agreement:
        """Agreement at some positions, after the pass."""
        places = places.to(self._known.device)
        known, experts = self._known[places], self._indices.shape[2]
        equal = torch.stack([layer[places] for layer in self._equal if layer is not None], dim=1)[known]
        return Agreement(known.sum(), (equal / experts).sum(dim=0), (equal < experts).any(dim=1).sum())


@contextmanager
def replaying(model: nn.Module, indices: Int[Tensor, "N L K"]) -> Iterator[Replay]:
    """Send each position of one pass to the experts given; one that is -1 goes where its router says.

    Where layers are checkpointed, this stays open until the backward pass is over: it runs them again.
    """
    modules = needed_routers(model, "routes are to be replayed")
    if indices.shape[1:] != (len(modules), modules[0].top_k):
        raise ValueError(
            f"routes are of {indices.shape[1]} layers and {indices.shape[2]} experts a token, the model has "
            f"{len(modules)} and {modules[0].top_k}: replay only what a model of the same shape recorded"
        )
    replay = Replay(indices)

    def player(layer: int):
        def play(router: Qwen3MoeTopKRouter, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _, native = output
            chosen = replay.choose(layer, native)
            return logits, gate_weights(logits, chosen, renormalise=router.norm_topk_prob), chosen

        return play

    with _hooked(modules, [player(layer) for layer in range(len(modules))]):
        yield replay


def gate_weights(
    logits: Float[Tensor, "N X"], chosen: Int[Tensor, "N K"], *, renormalise: bool
) -> Float[Tensor, "N K"]:
    """Weights that Qwen3-MoE gives experts, for any choice of them: to the last bit its own for its own."""
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, chosen)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


@contextmanager
def _hooked(modules: list[Qwen3MoeTopKRouter], hooks: list[Any]) -> Iterator[None]:
    handles = [router.register_forward_hook(hook) for router, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
