"""AdamW's moments in less memory of the device: in 8 bits, or on the host.

Between steps a parameter's two moments are stored in another form. For its step they are made float32 on the device
again, one parameter at a time, and torch's own AdamW does the rest: on the host they are exact, and in 8 bits what is
stored is all that differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from proximo.learner.schedule import BLOCK, LEAST_QUANTIZED, Moments

MEAN, SQUARES = NAMES = ("exp_avg", "exp_avg_sq")
"""Torch's names of the two moments: the mean gradient, and the mean of its squares."""
SCALES = "_scales"
"""Ending of the names of their blocks' scales."""


class Storage(Protocol):
    """A form of a parameter's moment between steps."""

    def store(self, name: str, moment: Tensor, into: dict[str, Tensor]) -> None: ...

    def restore(self, name: str, held: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
        """The moment in the parameter's dtype, on its device; it may be written into."""
        ...


class OnHost:
    """In the host's memory: pinned where the parameter is on a GPU, so that copies do not wait for each other."""

    def store(self, name: str, moment: Tensor, into: dict[str, Tensor]) -> None:
        if name not in into:
            into[name] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
        into[name].copy_(moment, non_blocking=True)

    def restore(self, name: str, held: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
        return held[name].to(parameter.device, non_blocking=True)


class InBlocks:
    """In 8 bits, by blocks of 256 with a scale each: a mean gradient by the fourth root of its share of the block's
    largest, a mean square, which has twice as many decades and no sign, by the eighth. Steps are finer near 0."""

    def store(self, name: str, moment: Tensor, into: dict[str, Tensor]) -> None:
        if not _is_quantized(moment):
            into[name] = moment
            return
        blocks = _in_blocks(moment)
        scales = blocks.abs().amax(1)
        shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        if name == SQUARES:
            codes = (255 * shares.sqrt_().sqrt_().sqrt_()).round_()
            # A mean square that were rounded to 0 would make the next step huge.
            codes = codes.clamp_(min=1).where(shares > 0, 0).to(torch.uint8)
        else:
            codes = torch.copysign(127 * shares.abs().sqrt_().sqrt_(), shares).round_().to(torch.int8)
        into.update({name: codes.flatten()[: moment.numel()].view_as(moment), f"{name}{SCALES}": scales})

    def restore(self, name: str, held: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
        if not _is_quantized(parameter):
            return held[name]
        roots = _in_blocks(held[name]).float()
        if name == SQUARES:
            shares = roots.div_(255).square_().square_().square_()
        else:
            roots.div_(127)
            shares = roots.abs().mul_(roots).mul_(roots.square_())
        return shares.mul_(held[f"{name}{SCALES}"][:, None]).flatten()[: parameter.numel()].view_as(parameter)


def _is_quantized(parameter: Tensor) -> bool:
    """Small ones are not worth it, and biases and norms are among them."""
    return parameter.dtype == torch.float32 and parameter.numel() >= LEAST_QUANTIZED


def _in_blocks(tensor: Tensor) -> Tensor:
    """Rows of 256, the last one filled up with zeros."""
    return pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)


class StoredMoments:
    """The moments of an optimizer's parameters in a form of storage."""

    def __init__(self, kind: Moments, optimizer: torch.optim.Optimizer) -> None:
        """Of the parameters of an optimizer, whose own moments are left empty."""
        self.kind: Moments = kind
        self._storage: Storage = OnHost() if kind == "cpu" else InBlocks()
        self._optimizer = optimizer
        self._held: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        if self.kind == "cpu" and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # what is on the host is whole before anything reads it

    def _step(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        held = self._held.setdefault(parameter, {})
        if held:
            moments = [self._storage.restore(name, held, parameter) for name in NAMES]
        else:
            moments = [torch.zeros_like(parameter) for _ in NAMES]
            held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        assert parameter.grad is not None
        beta1, beta2 = group["betas"]
        adamw(
            [parameter],
            [parameter.grad],
            [moments[0]],
            [moments[1]],
            [],
            [held["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moment in zip(NAMES, moments, strict=True):
            self._storage.store(name, moment, held)

    def pending_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of the device that the first step will take for good."""
        if self.kind == "cpu":
            return 0
        sizes = {each: 1 + 4 / BLOCK if _is_quantized(each) else each.itemsize for each in parameters}
        return int(sum(2 * each.numel() * size for each, size in sizes.items() if each not in self._held))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    # State, in the form of torch's: by the parameters' numbers

    def state(self) -> dict[int, dict[str, Tensor]]:
        return {number: dict(self._held[each]) for number, each in enumerate(self._parameters) if each in self._held}

    def load(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        parameters, self._held = self._parameters, {}
        for number, stored in state.items():
            parameter = parameters[number]
            if _is_quantized(parameter) and (self.kind == "8bit") != (f"{MEAN}{SCALES}" in stored):
                raise ValueError(
                    f"adam_moments is {self.kind!r}, and the checkpoint's moments are in another form: resume with "
                    "the setting that wrote them"
                )
            self._held[parameter] = {name: self._placed(name, each, parameter) for name, each in stored.items()}

    def _placed(self, name: str, stored: Tensor, parameter: nn.Parameter) -> Tensor:
        if self.kind == "cpu" and name in NAMES:
            return stored.cpu().clone().pin_memory() if parameter.is_cuda else stored.clone()
        return stored.to(parameter.device, copy=True)


def shape_of(kind: str, parameter: Tensor) -> tuple[int, ...]:
    """The shape of what is stored of a parameter under a name."""
    return (-(-parameter.numel() // BLOCK),) if kind.endswith(SCALES) else tuple(parameter.shape)
