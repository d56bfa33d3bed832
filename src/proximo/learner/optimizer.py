"""AdamW around a model's own parameters, exact also where those are in half precision.

bfloat16 has 8 binary digits: a step of a thousandth of a weight is rounded away, and so is a micro-batch's gradient
that is added to a large sum. Such a parameter has a float32 master, which takes the gradients and the steps; the
parameter itself is written in place after each step, so that others that hold its memory see the new values.

AdamW's moments may take less memory of the device, in 8 bits or on the host. Between steps a parameter's two moments
are then stored in another form. For its step they are made float32 on the device again, one parameter at a time, and
torch's own AdamW does the rest: on the host they are exact, and in 8 bits what is stored is all that differs.

float16 has few exponents: what is smaller than 6·10⁻⁸ becomes 0, what is larger than 65,504 infinite. So a loss of a
model that computes in it is multiplied before its backward pass, and its gradient divided again, in float32. Factors
are powers of two, which rounds nothing, and each update begins with the largest: nothing is remembered.
"""

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from proximo.learner.options import BLOCK, LEAST_QUANTIZED, Moments
from proximo.system.phases import phase

HALVES = (torch.bfloat16, torch.float16)
POLICY, VALUE = 0, 1
"""A learner's two groups of parameters."""
OWNER = "_proximo_optimizer"
"""Attribute of a parameter that names the optimizer of its gradients."""
MASTER = "master"
LOSS_SCALES = (2.0**13, 2.0**6, 1.0)
"""Factors of a loss whose gradients pass through float16: the next one where a gradient overflowed. Gradients of 10⁻¹¹
still count with the first, and it overflows at 8."""


def _all_finite(norms: Sequence[float]) -> bool:
    return all(map(math.isfinite, norms))


class Optimizer:
    """Groups of parameters, each with its own learning rate; float32 and wider ones are stepped as they are.

    A half-precision parameter has no `grad` after a backward pass: its master has.

    Example:
        optimizer = Optimizer([list(model.parameters())], learning_rate=1e-5)
        loss.backward()
        norm = optimizer.clip(0, 1.0)
        optimizer.step()
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        moments: Moments = "float32",
        computes_in: torch.dtype | None = None,
    ) -> None:
        """`computes_in`: data type of the passes, None for that of the parameters."""
        self._scales = LOSS_SCALES if torch.float16 in (computes_in, *_dtypes(groups)) else (1.0,)
        self._scale = self._scales[0]
        for parameter in (parameter for group in groups for parameter in group if parameter.dtype in HALVES):
            _claim(parameter, self)
        self._masters = {
            parameter: nn.Parameter(parameter.detach().float())
            for group in groups
            for parameter in group
            if parameter.dtype in HALVES
        }
        self._parameters = [parameter for group in groups for parameter in group]
        self._groups = [[self._masters.get(parameter, parameter) for parameter in group] for group in groups]
        self._adam = torch.optim.AdamW(
            [{"params": group} for group in self._groups],
            lr=learning_rate,
            weight_decay=weight_decay,
            betas=betas,
            eps=epsilon,
            fused=True,  # on a CPU, too: a third of the time for a tiny model
        )
        self._stored = None if moments == "float32" else StoredMoments(moments, self._adam)
        """The moments, if they are not torch's own."""
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_collect, master))
            for parameter, master in self._masters.items()
        ]
        self._finalizer = weakref.finalize(self, _remove, handles)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups in torch's form."""
        return self._adam.param_groups

    def set_rates(self, *rates: float) -> None:
        """The learning rate of each group."""
        for group, rate in zip(self._adam.param_groups, rates, strict=True):
            group["lr"] = rate

    def held(self, group: int) -> list[nn.Parameter]:
        """Tensors that a group's gradients and steps are of: the parameters, or their masters."""
        return self._groups[group]

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._masters:  # where a backward pass failed before its gradient was taken over
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss; `overflowed` has to be asked before it is read."""
        (loss if self._scale == 1 else loss * self._scale).backward()

    @torch.no_grad()
    def overflowed(self, whole: Callable[[Tensor], Tensor] = torch.detach) -> bool:
        """True if a gradient was too large for float16: to be computed again, where its loss gets a smaller factor.
        False if it is ready to be applied. `whole` gathers a norm that several processes have a share of."""
        scale, self._scale = self._scale, self._scales[0]
        if scale == 1:
            return False
        if not _all_finite([float(whole(norm)) for norm in self.norms()]):
            self._scale = self._scales[self._scales.index(scale) + 1]
            return True
        for gradient in (each.grad for group in self._groups for each in group):
            if gradient is not None:
                gradient /= scale
        return False

    def zero_missing_gradients(self, group: int) -> None:
        """A gradient of 0, which is not no gradient: moments decay, and weights by weight decay."""
        for parameter in self._groups[group]:
            parameter.grad = torch.zeros_like(parameter)

    def clip(self, group: int, max_norm: float) -> Tensor:
        """Clip a group's gradients to a maximum norm; returns the norm before."""
        return nn.utils.clip_grad_norm_(self._groups[group], max_norm)

    def apply(self, max_norm: float, accepts: Callable[[list[float]], bool] = _all_finite) -> list[float]:
        """Clip each group apart, step, and say how large the gradients were before.

        Where such norms are not accepted, nothing is changed, gradients included.
        """
        with phase("gradient norm"):
            norms = self.norms()
            values = [float(norm) for norm in norms]
        if accepts(values):
            with phase("weights"):
                self.step_clipped(max_norm, norms)
        return values

    def norms(self) -> list[Tensor]:
        """Norm of each group's gradient."""
        gradients = [[each.grad for each in group if each.grad is not None] for group in self._groups]
        return [nn.utils.get_total_norm(each) for each in gradients]

    def step_clipped(self, max_norm: float, norms: Sequence[Tensor]) -> None:
        """Step with gradients that are clipped to a maximum norm; `norms` are those before."""
        for group, norm in zip(self._groups, norms, strict=True):
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        (self._stored or self._adam).step()
        self._write()

    @property
    def pending_bytes(self) -> int:
        """Bytes of gradients and moments that are not there yet."""
        held = [parameter for group in self._groups for parameter in group]
        gradients = sum(each.numel() * each.itemsize for each in held if each.grad is None)
        if self._stored is not None:
            return gradients + self._stored.pending_bytes(held)
        return gradients + sum(2 * each.numel() * each.itemsize for each in held if each not in self._adam.state)

    @property
    def is_open(self) -> bool:
        """True if it takes gradients."""
        finalizer = getattr(self, "_finalizer", None)
        return finalizer is not None and finalizer.alive

    def close(self) -> None:
        """Remove the hooks, so that gradients stay with the parameters."""
        self._finalizer()

    def state_dict(self) -> dict[str, Any]:
        """State that the next step depends on, besides parameters in full precision."""
        adam = self._adam.state_dict()
        if self._stored is not None:
            adam["state"] = self._stored.state()
        return {"adam": adam, "masters": [master.detach() for master in self._masters.values()]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load that of an optimizer over the same parameters; those in half precision become what their masters say."""
        masters: list[Tensor] = state["masters"]
        shapes = [tuple(master.shape) for master in masters], [tuple(master.shape) for master in self._masters.values()]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the optimizer's state has {len(masters)} masters of half-precision weights, the model "
                f"{len(self._masters)}, or of other shapes: load it with the model and the dtype that wrote it"
            )
        adam = copy.deepcopy(state["adam"])  # torch would share the moments
        if self._stored is not None:
            self._stored.load(adam.pop("state"))
            adam["state"] = {}
        self._adam.load_state_dict(adam)
        for master, known in zip(self._masters.values(), masters, strict=True):
            master.copy_(known)
        self._write()

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The same as `state_dict` for a file of tensors, by the parameters' names, which are given in their order;
        rates and the like are the config's."""
        moments = self.state_dict()["adam"]["state"]
        by_name = {f"{names[number]}.{kind}": value for number, each in moments.items() for kind, value in each.items()}
        named = dict(zip(names, self._parameters, strict=True))
        masters = {name: self._masters[each] for name, each in named.items() if each in self._masters}
        return by_name | {f"{name}.{MASTER}": master.detach() for name, master in masters.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Load what `tensors` gave; ValueError, with what differs, where it was of other parameters."""
        places = {name: index for index, name in enumerate(names)}
        masters, moments = dict[int, Tensor](), dict[int, dict[str, Tensor]]()
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition(".")
            index = places.get(name)
            shape = None if index is None else shape_of(kind, self._parameters[index])
            # Without dimensions: how many steps were taken.
            if index is None or (tensor.ndim and tuple(tensor.shape) != shape):
                raise ValueError(f"the optimizer's {key} has the shape {tuple(tensor.shape)}, the model's {shape}")
            if kind == MASTER:
                masters[index] = tensor
            else:
                moments.setdefault(index, {})[kind] = tensor
        adam = {"state": moments, "param_groups": self._adam.state_dict()["param_groups"]}
        self.load_state_dict({"adam": adam, "masters": [masters[number] for number in sorted(masters)]})

    def _write(self) -> None:
        """Write the masters into the parameters, where they are."""
        if self._masters:
            copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
            copy_all(list(self._masters), list(self._masters.values()))


def _dtypes(groups: Sequence[Sequence[nn.Parameter]]) -> set[torch.dtype]:
    return {parameter.dtype for group in groups for parameter in group}


def _claim(parameter: nn.Parameter, owner: Optimizer) -> None:
    """A gradient goes to one master: a second optimizer would get none, and silently train nothing."""
    known = getattr(parameter, OWNER, None)
    other = known and known()
    if other is not None and other is not owner and other.is_open:
        raise ValueError(
            "a half-precision parameter has an optimizer already, which takes its gradients: close() that one first, "
            "or train a copy of the model"
        )
    setattr(parameter, OWNER, weakref.ref(owner))


@torch.no_grad()
def _collect(master: nn.Parameter, parameter: Tensor) -> None:
    """Take over a gradient as soon as it is whole, so that at most one is there in half precision."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


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
    """Storage in host memory: pinned where the parameter is on a GPU, so that copies do not wait for each other."""

    def store(self, name: str, moment: Tensor, into: dict[str, Tensor]) -> None:
        if name not in into:
            into[name] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
        into[name].copy_(moment, non_blocking=True)

    def restore(self, name: str, held: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
        return held[name].to(parameter.device, non_blocking=True)


class InBlocks:
    """Storage in 8 bits, by blocks of 256 with a scale each: a mean gradient by the fourth root of its share of the
    block's largest, a mean square, with twice as many decades and no sign, by the eighth. Steps are finer near 0."""

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
        """Hold moments for the parameters of an optimizer, whose own moments are left empty."""
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
