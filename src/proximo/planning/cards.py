"""Devices that a run is planned for: their memory, bandwidth and arithmetic."""

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import ClassVar

import torch

from proximo.learner.footprint import machine_bytes
from proximo.models import free_bytes
from proximo.planning.roofline import H200, DeviceLimits, machine_of
from proximo.system import machine

GIB = 2**30
H200_BANDWIDTH, H200_ARITHMETIC = 4.8e12, 989e12
"""An H200's datasheet."""
REACHED_BANDWIDTH, REACHED_ARITHMETIC = H200.bandwidth / H200_BANDWIDTH, H200.arithmetic / H200_ARITHMETIC
"""Shares of the datasheet that a large copy and a large matrix product reach: measured on one H200, and assumed of the
other cards."""


@dataclass(frozen=True)
class DeviceCard:
    """A device, with the numbers of its datasheet.

    Example: DeviceCard("A100-40", memory=39.4, bandwidth=1.555e12, arithmetic=312e12)
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("memory", "bandwidth", "arithmetic")
    """Numbers of a datasheet, in the order of the fields."""
    name: str
    memory: float
    """Memory that programs can use, in GiB: as torch reports it, which is less than the datasheet's GB."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    arithmetic: float
    """Dense operations per second: bfloat16 on a GPU, float32 on a CPU."""
    is_gpu: bool = True
    context: float = 0.6
    """GiB that the driver and loaded kernels take from that memory."""
    link: float = 32e9
    """Bytes per second in one direction between GPUs of a node: NVLink where there is one, else PCIe 4."""

    def __post_init__(self) -> None:
        for field in self.NUMBERS:
            if not getattr(self, field) > 0:
                raise ValueError(f"gpu.{field} is {getattr(self, field)}: give a positive number")

    @property
    def usable(self) -> int:
        """Bytes that tensors can take."""
        return int((self.memory - self.context) * GIB)

    @property
    def machine(self) -> DeviceLimits:
        """The limits that times are predicted from."""
        if not self.is_gpu:
            return DeviceLimits(self.name, self.bandwidth, self.arithmetic, 0.0, 4)
        bandwidth, arithmetic = self.bandwidth * REACHED_BANDWIDTH, self.arithmetic * REACHED_ARITHMETIC
        return DeviceLimits(self.name, bandwidth, arithmetic, H200.kernel_seconds, H200.number_bytes)


CARDS = (
    DeviceCard("B200", 178.3, 8.0e12, 2250e12, link=900e9),
    DeviceCard("H200", 139.8, H200_BANDWIDTH, H200_ARITHMETIC, link=450e9),
    DeviceCard("H100", 79.1, 3.35e12, 989e12, link=450e9),
    DeviceCard("H800", 79.1, 3.35e12, 989e12, link=200e9),
    DeviceCard("H20", 95.1, 4.0e12, 148e12, link=450e9),
    DeviceCard("H100-PCIe", 79.1, 2.0e12, 756e12),
    DeviceCard("A100-80", 79.1, 2.039e12, 312e12, link=300e9),
    DeviceCard("A100-40", 39.4, 1.555e12, 312e12, link=300e9),
    DeviceCard("L40S", 44.4, 0.864e12, 362e12),
    DeviceCard("RTX5090", 31.4, 1.792e12, 209.5e12),
    DeviceCard("RTX4090", 23.6, 1.008e12, 165.2e12),
    DeviceCard("RTX3090", 23.6, 0.936e12, 71e12),
    DeviceCard("L4", 22.0, 0.3e12, 121e12),
)
"""GPUs by name. Bandwidth and dense bfloat16 arithmetic (float32 sums, without sparsity) from NVIDIA's datasheets."""

HERE, CPU = "auto", "cpu"
"""Names of what is found on this machine: its GPU, or its CPU where it has none; and its CPU."""


def card(name: str) -> DeviceCard:
    """The card of this name; `auto` and `cpu` are this machine's own. ValueError lists the names."""
    cards = {known.name.lower(): known for known in CARDS}
    if name.lower() in (HERE, CPU):
        return this_machine(gpu=name.lower() == HERE and torch.cuda.is_available())
    if name.lower() not in cards:
        names = ", ".join([*(known.name for known in CARDS), CPU, HERE])
        raise ValueError(
            f"gpu is {name!r}: give one of {names}, or its numbers (--gpu.memory GiB --gpu.bandwidth BYTES/S "
            f"--gpu.arithmetic FLOP/S){_closest(name, list(cards))}"
        )
    return cards[name.lower()]


def _closest(name: str, known: list[str]) -> str:
    """The question whether a card was meant: one whose name the given one begins with, or else one that is like it."""
    name = name.lower()
    begun = sorted((each for each in known if name.startswith(each)), key=len)
    likely = begun[-1:] or get_close_matches(name, known, n=1)
    return "".join(f"; did you mean {each.name}?" for each in CARDS if each.name.lower() in likely)


def chosen_card(name: str | None, *numbers: float | None) -> DeviceCard:
    """A named card with the given ones of `DeviceCard.NUMBERS` replaced, or one that is known by its numbers alone."""
    given = {field: number for field, number in zip(DeviceCard.NUMBERS, numbers, strict=True) if number is not None}
    if name is None and len(given) == len(DeviceCard.NUMBERS):
        memory, bandwidth, arithmetic = given.values()
        return DeviceCard("custom", memory, bandwidth, arithmetic)
    if name is None and given:
        missing = ", ".join(f"gpu.{field}" for field in DeviceCard.NUMBERS if field not in given)
        raise ValueError(f"gpu has no name, and {missing} is missing: give the others too, or a name (--gpu A100-40)")
    return replace(card(name or HERE), **given)


NUMBERS = ("bandwidth", "arithmetic", "kernel_seconds")
"""Measured numbers among a device's limits."""


@cache
def _measured(device: str) -> DeviceLimits:
    """The speeds of a device of this machine, which stay what they are."""
    precision = "bfloat16" if device == "cuda" else "float32"
    name = torch.cuda.get_device_name(device) if device == "cuda" else device
    known = machine.remembered(f"limits of {name}", NUMBERS, lambda: asdict(machine_of(device)))
    return DeviceLimits(name, **known, number_bytes=getattr(torch, precision).itemsize)


def this_machine(*, gpu: bool) -> DeviceCard:
    """The device that is here; its memory is what is free now, its speeds are measured once."""
    limits = _measured("cuda" if gpu else "cpu")
    memory = free_bytes(torch.device("cuda")) if gpu else machine_bytes()
    if not gpu:
        return DeviceCard("cpu", memory / GIB, limits.bandwidth, limits.arithmetic, is_gpu=False, context=0.3)
    nominal = limits.bandwidth / REACHED_BANDWIDTH, limits.arithmetic / REACHED_ARITHMETIC
    return DeviceCard(limits.name, memory / GIB, *nominal, context=0.0)
