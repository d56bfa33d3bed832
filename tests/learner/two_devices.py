"""A second device that is not there: tensors that are said to live on a GPU, and an error where two places meet.

It follows torch's own rule. Operations take tensors of one device; a single number on the CPU may join any of them,
indices on the CPU may pick from anywhere, and a copy may go from one to the other. What makes the host wait is counted.
"""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"}
COUNTS = ("nonzero", "masked_select", "unique", "_unique2", "bincount", "repeat_interleave")
"""Operations whose result has a size that only the device knows."""
INDEXED = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


class Mixed(Exception):
    """Tensors of two devices in one operation."""


class TwoDevices:
    """Example: with TwoDevices() as devices: devices.move(model); model(tokens.to(model.device))"""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.checks = True
        self._there: dict[int, StorageWeakRef] = {}
        self._free: dict[int, StorageWeakRef] = {}
        self._modes = (_Calls(self), _Operations(self))

    def __enter__(self) -> "TwoDevices":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def move(self, model: torch.nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            self.mark(tensor, True)

    def is_there(self, tensor: Tensor) -> bool:
        # No other storage gets this address while a weak reference to the first is kept.
        return tensor.untyped_storage()._cdata in self._there

    def mark(self, tensor: Tensor, there: bool) -> Tensor:
        storage = tensor.untyped_storage()
        if there:
            self._there[storage._cdata] = StorageWeakRef(storage)
        else:
            self._there.pop(storage._cdata, None)
        return tensor

    def made_in_backward(self, tensor: Tensor) -> None:
        """Made from nothing by torch's own backward formula, on the device of a gradient that it does not tell us."""
        storage = tensor.untyped_storage()
        self._free[storage._cdata] = StorageWeakRef(storage)

    def is_free(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._free

    def wait(self, tensor: Any, what: str) -> None:
        if isinstance(tensor, Tensor) and self.is_there(tensor):
            self.waits.append(what)


def _device_of(value: Any) -> torch.device | None:
    return torch.device(value) if isinstance(value, str | torch.device) else None


def _tensors(*values: Any) -> list[Tensor]:
    """Every one in an operation's arguments. torch's pytree took most of the time of the tests that use this device."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


class _Calls(TorchFunctionMode):
    """What asks for a device by name."""

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, devices = dict(kwargs or {}), self.devices
        name = getattr(function, "__name__", "")
        if function == Tensor.device.__get__:
            return GPU if devices.is_there(args[0]) else function(*args)
        if name in WAITS:
            devices.wait(args[0], name)
        if name == "pin_memory":
            return args[0]
        if name in ("to", "cpu"):
            return self._moved(args, kwargs, name)
        if name == "one_hot":  # made of pieces that are all of the input's device, though they do not say so
            there, self.devices.checks = devices.is_there(args[0]), False
            result = devices.mark(function(*args, **kwargs), there)
            self.devices.checks = True
            return result
        wanted = _device_of(kwargs.get("device"))
        if wanted is None:
            return function(*args, **kwargs)
        result = function(*args, **{**kwargs, "device": "cpu"})
        return devices.mark(result, wanted.type == "cuda") if isinstance(result, Tensor) else result

    def _moved(self, args, kwargs, name: str):
        tensor, rest = args[0], list(args[1:])
        there = self.devices.is_there(tensor)
        target: bool | None = False if name == "cpu" else None
        dtype = kwargs.get("dtype")
        for value in (*rest, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, Tensor):
                target, dtype = self.devices.is_there(value), value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif (device := _device_of(value)) is not None:
                target = device.type == "cuda"
        if dtype is not None and dtype != tensor.dtype:
            tensor = Tensor.to(tensor, dtype)
        if target is None or target == there:
            return tensor
        if there:
            self.devices.wait(args[0], name)
        return self.devices.mark(tensor.clone(), target)


class _Operations(TorchDispatchMode):
    """What is computed, in backward passes too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it takes as long as the operations

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._overloadpacket.__name__
        tensors = _tensors(args, kwargs)
        before = [leaf.untyped_storage()._cdata for leaf in tensors]
        places = {each in self.devices._there for each in before}
        there = True in places
        if there:
            if name in INDEXED or False in places:
                self._check(name, args, kwargs)
            if name in COUNTS:
                self.devices.waits.append(name)
        result = function(*args, **kwargs)
        if name == "copy_":
            return result
        for leaf in _tensors(result):
            if leaf.untyped_storage()._cdata not in before:
                self.devices.mark(leaf, there)
                if not tensors and torch._C._current_graph_task_id() != -1:
                    self.devices.made_in_backward(leaf)
        return result

    def _check(self, name: str, args, kwargs) -> None:
        if name in ("copy_", "_to_copy") or not self.devices.checks:
            return
        parts: Any = (args, kwargs)
        if name in INDEXED:
            chosen, indices, others = args[0], args[1], args[2:]
            known = _tensors(indices)
            if any(map(self.devices.is_there, known)) and not self.devices.is_there(chosen):
                raise Mixed(f"{name}: indices of the device pick from the CPU")
            if self.devices.is_there(chosen) and any(each.dtype == torch.bool for each in known):
                self.devices.waits.append(f"{name} by a mask")
            parts = (chosen, others)
        tensors = [leaf for leaf in _tensors(parts) if not self.devices.is_free(leaf)]
        places = {self.devices.is_there(tensor) for tensor in tensors if tensor.ndim or self.devices.is_there(tensor)}
        if len(places) > 1:
            shapes = [(tuple(tensor.shape), self.devices.is_there(tensor)) for tensor in tensors]
            raise Mixed(f"{name}: tensors of two devices, {shapes}")
