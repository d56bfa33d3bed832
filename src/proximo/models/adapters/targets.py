"""The layers that get an adapter, by their full names.

peft compares ends of names, and in many mixtures it reads `gate_proj` as the name of all experts, wherever it stands.
So the layers are chosen here, among the model's own modules, and peft is told which they are.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from proximo.models.adapters.quantized import QuantizedLinear
from proximo.models.model_types import PreTrainedModel

EXPERTS = re.compile(r"(?!.*shared).*experts?")
"""Part of the names of experts that are modules; experts that are shared by all tokens are ordinary layers."""
ROUTERS = re.compile(r"gate|.*expert_gate|.*router.*|indexer")
"""Part of the names of what chooses experts, or weighs them, and of what chooses the tokens that sparse attention
reads: a choice has no gradient, so an adapter there would stay as it began."""
SCORE = "score"
"""Name of a reward model's head, which has no adapter: it is trained as a whole."""
READ_AS_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of names that peft takes for those of routers and experts, in the families that it knows as mixtures."""
WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\[|\.(?:dtype|device|shape|data)\b)")
"""Pattern for the text of a class: one of its layers whose weight it computes with."""


def target_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Full names of the linear layers that get an adapter; the model may be a skeleton without weights.

    Without `targets` these are all of them but the output head, experts and routers. A target is the end of a full
    name; it means experts or routers where nothing else is called so.
    """
    heads = (model.get_output_embeddings(), dict(model.named_children()).get(SCORE))
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and not any(each is head for head in heads)
    }
    problems = _problems(model, layers)
    if not targets:
        if chosen := [name for name in layers if name not in problems and not _is_expert_or_router(name)]:
            return chosen
        kind = type(model).__name__
        raise ValueError(f"adapter: {kind} has no linear layers but its head, experts and routers: train it whole")
    chosen = {name for target in targets for name in _called(target, list(layers), problems)}
    return [name for name in layers if name in chosen]


def _called(target: str, layers: list[str], problems: dict[str, str]) -> list[str]:
    """The layers that one of the user's names means."""
    called = [name for name in layers if f".{name}".endswith(f".{target}")]
    if not called:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in layers if name not in problems}))
        raise ValueError(
            f"adapter.targets has {target!r}, which no linear layer is called (experts in one tensor are none): "
            f"there are {there}"
        )
    usual = [name for name in called if not _is_expert_or_router(name)] or called
    if problem := next((problems[name] for name in usual if name in problems), None):
        raise ValueError(f"adapter.targets has {target!r}: {problem}; leave it out")
    return usual


def _is_expert_or_router(name: str) -> bool:
    return any(EXPERTS.fullmatch(part) or ROUTERS.fullmatch(part) for part in name.split("."))


def _problems(model: PreTrainedModel, layers: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Reasons, by name of a layer, why an adapter on it would not add B A x to what the model computes."""
    holders = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in layers}
    read = {holder: _weights_read(holder) for holder in set(holders.values())}
    problems = dict[str, str]()
    for name, layer in layers.items():
        child, holder = name.rpartition(".")[2], holders[name]
        if child in read[holder]:
            problems[name] = f"{holder.__name__} reads the weight of {child} and does not call it: no adapter would act"
        elif not _is_linear(layer):
            problems[name] = f"{name} is a {type(layer).__name__}, which computes something else than a linear layer"
    return problems


def _weights_read(holder: type[nn.Module]) -> set[str]:
    """Names of the layers with whose weights a class computes itself, as Mamba's mixers do for their kernels."""
    methods = [
        method
        for kind in holder.__mro__[: holder.__mro__.index(nn.Module)]
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and "init" not in name  # that runs once
    ]
    return {name for method in methods for name in WEIGHT_READ.findall(_text(method))}


def _text(method: Callable[..., object]) -> str:
    try:
        return inspect.getsource(method)
    except OSError:  # of a class that no file holds
        return ""


def _is_linear(layer: nn.Linear) -> bool:
    """True if it computes x Wᵀ + b, as an adapter and merging take for granted: tried, of classes that change it."""
    if type(layer).forward in (nn.Linear.forward, QuantizedLinear.forward):
        return True
    row, weight = torch.tensor([[23.0, 29.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    bias = None if layer.bias is None else torch.tensor([13.0, 17.0, 19.0])
    try:
        output = functional_call(layer, {"weight": weight} | ({} if bias is None else {"bias": bias}), row)
    except Exception:  # it wants rows of another form
        return False
    return isinstance(output, Tensor) and torch.equal(output, linear(row, weight, bias))


def short_names(model: PreTrainedModel, layers: Sequence[str]) -> list[str]:
    """Ends of names that mean exactly these layers, as peft compares them: last parts where every module that is
    called so is among them, else full names."""
    chosen = set(layers)
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in chosen}
    return sorted({name if (last := name.rpartition(".")[2]) in others else last for name in layers})


def names_for_peft(model: PreTrainedModel, layers: Sequence[str]) -> dict[str, list[str] | None]:
    """The fields of an adapter's config by which peft finds exactly these layers, with the same names of tensors.

    In mixtures a layer that is called as experts were is named by its weight: its own name would mean all experts.
    """
    has_experts = any(EXPERTS.fullmatch(name.rpartition(".")[2]) for name, _ in model.named_modules())
    misread = [name for name in layers if has_experts and name.rpartition(".")[2] in READ_AS_EXPERTS]
    modules = short_names(model, sorted(set(layers) - set(misread)))
    return {"target_modules": modules, "target_parameters": [f"{name}.weight" for name in misread] or None}
