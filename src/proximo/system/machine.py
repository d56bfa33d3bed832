"""The fastest way to multiply matrices on this machine, measured once and cached, so that equal runs give equal bits.

A processor's feature list is not enough: a library may be slower than none, half precision may run without hardware
support, and small products lose more at thread barriers than they gain. Training on a CPU stays in float32 even if
bfloat16 were faster; its speed is only measured to be reported.
"""

import json
import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

MAX_THREADS = 1 << 12
"""Maximum threads of a record: no machine has so many, and one with more is damaged."""
SMALL_MODEL = 20_000_000
"""Parameter count below which a step is many small products, above which few large ones."""

SMALL = ((16, 128, 384), (64, 128, 384))
LARGE = ((32, 576, 1536), (512, 576, 1536))
"""Rows, width and inner width of the measured MLPs. A small model's step is as much overhead as arithmetic: it gains
from more threads no more than products with few rows do."""
CAUTIOUS = (16, 576, 576)
"""Shape measured first for half precision, which without hardware support can be hundreds of times slower."""

WITHOUT = 1.2
"""Required speed-up to switch oneDNN off, so that a busy moment does not decide."""
DOUBLED = 1.5
"""Required speed-up to double the threads; otherwise they are left to other programs."""
FEW_ROWS = range(8, 65)
"""Numbers of rows with which MKL is faster with a large weight on the left: with 8 to 32 rows 1.2 to 2 times, and with
a second thread, which it has no use for otherwise, 2 to 3 times. With 2 or 3 it would take twice as long."""
SECONDS = 0.06
"""Seconds per measurement, of which there are at most a few dozen."""

METHOD = "layers, few rows turned"
"""Method of measuring, as part of the cache's key: readings of another method are not used."""

Shape = tuple[int, int, int]
Clock = Callable[[], float]
Product = Callable[[Tensor, Tensor], Tensor]
"""(inputs [R, I], weight [O, I]) to outputs [R, O]."""


THREADS = torch.get_num_threads()
"""Torch's initial setting, recorded before a choice is applied."""


@dataclass(frozen=True)
class Machine:
    """Threads and libraries a run computes with. Another choice rounds differently, so a resumed run keeps its own."""

    threads: int
    onednn: bool
    """True to use oneDNN for products; some processors are faster without."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}: give at least 1")

    @classmethod
    def current(cls) -> "Machine":
        """Torch's current settings."""
        return cls(torch.get_num_threads(), bool(torch.backends.mkldnn.enabled))

    def apply(self) -> None:
        """Apply to everything that this process computes from now on. Only commands call this: a run started from
        Python uses the threads it finds, and two runs in two threads share them."""
        torch.set_num_threads(self.threads)
        torch.backends.mkldnn.set_flags(self.onednn)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Machine":
        if not 0 < (threads := int(record["threads"])) <= MAX_THREADS:
            raise ValueError(f"machine has {threads} threads")
        return cls(threads=threads, onednn=bool(record["onednn"]))


@dataclass(frozen=True)
class Readings:
    """Measurements: the choice for small and for large models, and the speed of large products."""

    small: Machine
    large: Machine
    speeds: Mapping[str, float]
    """GFLOP/s by dtype."""

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Readings":
        speeds = {str(name): float(speed) for name, speed in record["speeds"].items()}
        return cls(Machine.from_dict(record["small"]), Machine.from_dict(record["large"]), speeds)


@torch.no_grad()
def side_by_side(inputs: Tensor, *weights: Tensor) -> Tensor:
    """Outputs [R, O] of inputs [R, I] and large weights [O, I] of a layer on a CPU, one beside the other."""
    if len(inputs) not in FEW_ROWS or not torch.backends.mkl.is_available():
        products = [linear(inputs, weight) for weight in weights]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)
    turned, sizes = inputs.T.contiguous(), [len(weight) for weight in weights]
    outputs = torch.empty(sum(sizes), len(inputs), dtype=inputs.dtype)
    for weight, rows in zip(weights, outputs.split(sizes), strict=True):
        torch.mm(weight, turned, out=rows)
    return outputs.T.contiguous()


def machine_for(parameters: int | None) -> Machine:
    """The choice for a model with this many parameters; None (unknown) counts as large.

    If OMP_NUM_THREADS is set, it decides the threads.
    """
    measured = readings()
    chosen = measured.small if parameters is not None and parameters < SMALL_MODEL else measured.large
    if chosen.onednn and loses_onednn():
        chosen = replace(chosen, onednn=False)
    by_hand = os.environ.get("OMP_NUM_THREADS")
    return Machine(torch.get_num_threads(), chosen.onednn) if by_hand else chosen


def beside_gpu() -> Machine:
    """The choice if a GPU computes: the host's work is small, and waking threads would take longer than the work, while
    the GPU waits."""
    now = Machine.current()
    return now if os.environ.get("OMP_NUM_THREADS") else replace(now, threads=1)


def readings(clock: Clock = time.perf_counter) -> Readings:
    """Measurements from the user's cache, or made now; the same for every run with this processor and torch version."""
    file, key = cache_file(), _key()
    known = _stored(file)
    if key in known:
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # a malformed entry
            return Readings.from_dict(known[key])
    measured = measure(clock)
    _store(file, {**known, key: asdict(measured)})
    return measured


def remembered(what: str, names: Sequence[str], measured: Callable[[], Mapping[str, Any]]) -> dict[str, float]:
    """Other numbers of this machine, by `names`, from the user's cache, or measured now."""
    file, key = cache_file(), f"{what}, {_key()}"
    known = _stored(file)
    with suppress(KeyError, TypeError, ValueError):  # not there, or malformed
        return {name: float(known[key][name]) for name in names}
    values = measured()
    numbers = {name: float(values[name]) for name in names}
    _store(file, {**known, key: numbers})
    return numbers


def measure(clock: Clock = time.perf_counter) -> Readings:
    """Measure, in about a second; torch's settings are restored."""
    before = Machine.current()
    try:
        small = _fastest(SMALL, THREADS, clock, linear)
        large = _fastest(LARGE, THREADS, clock, side_by_side)
        large.apply()
        single = _speed(LARGE[1], torch.float32, clock)
        with warnings.catch_warnings():
            # Without instructions for them, torch warns of products of bfloat16 and switches oneDNN off.
            warnings.simplefilter("ignore")
            half = _speed(CAUTIOUS, torch.bfloat16, clock)
            if 10 * half > single:
                half = _speed(LARGE[1], torch.bfloat16, clock)
    finally:
        before.apply()
    return Readings(small, large, {"float32": single, "bfloat16": half})


def settle_half_products() -> None:
    """Trigger torch's warning about products of bfloat16 matrices now, where it is caught.

    On a CPU without instructions for them torch takes another path to the same numbers and warns, once in a process,
    with a page of stack frames: that must not reach a user, or become an error in the middle of a pass.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        linear(torch.ones(1, 32, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))


def loses_onednn() -> bool:
    """Tell whether torch switches oneDNN off at the first product of bfloat16 matrices, as on CPUs without instructions
    for them. That holds for the whole process: a model in bfloat16 would change the last digits of every float32 run
    after it and next to it, so such a machine is better off without from the start."""
    before = Machine.current()
    replace(before, onednn=True).apply()
    settle_half_products()
    lost = not Machine.current().onednn
    before.apply()
    return lost


def _fastest(shapes: Sequence[Shape], max_threads: int, clock: Clock, product: Product) -> Machine:
    """The fastest choice: start with one thread and oneDNN, and change step by step as long as it pays."""

    def seconds(machine: Machine) -> list[float]:
        machine.apply()
        return [_seconds(shape, torch.float32, clock, product) for shape in shapes]

    chosen, other = Machine(1, True), Machine(1, False)
    best, without = seconds(chosen), seconds(other)
    if _gain(best, without) > WITHOUT:
        chosen, best = other, without
    while chosen.threads < max_threads:
        more = replace(chosen, threads=min(2 * chosen.threads, max_threads))
        times = seconds(more)
        if _gain(best, times) <= DOUBLED:
            break
        chosen, best = more, times
    return chosen


def _gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Speed-up, on average over the shapes: products of few rows count as much as those of many, since a step's
    sampling takes as long as its training."""
    return math.exp(sum(math.log(old / new) for old, new in zip(before, after, strict=True)) / len(before))


def _speed(shape: Shape, dtype: torch.dtype, clock: Clock) -> float:
    rows, width, inner = shape
    return 6e-9 * rows * width * inner / _seconds(shape, dtype, clock, linear)


@torch.no_grad()
def _seconds(shape: Shape, dtype: torch.dtype, clock: Clock, product: Product) -> float:
    """Shortest time of one MLP among as many as fit in a measurement, since other programs slow down only some."""
    rows, width, inner = shape
    # As layers have them, with weights of [outputs, inputs]: libraries are fast or slow by how a matrix lies.
    hidden, gate, up, down = (
        torch.ones(size, dtype=dtype) for size in ((rows, width), (inner, width), (inner, width), (width, inner))
    )

    def mlp() -> Tensor:
        return product(silu(product(hidden, gate)) * product(hidden, up), down)

    mlp()  # warm-up
    shortest, start = float("inf"), clock()
    end = start
    while end - start < SECONDS:
        begin = clock()
        mlp()
        end = clock()
        shortest = min(shortest, end - begin)
    return shortest


# The cache


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proximo" / "machine.json"


def _key() -> str:
    """Cache key with everything the measurements depend on, since home folders are shared between machines."""
    return f"{_processor()}, {THREADS} threads, torch {torch.__version__}, {METHOD}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _stored(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):  # not there, not readable, not JSON: it is only a cache
        return {}
    return known if isinstance(known, dict) else {}


def _store(file: Path, known: Mapping[str, Any]) -> None:
    """Write the cache atomically; if that fails, the next run measures again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix="machine.", delete=False) as partial:
            partial.write(json.dumps(known, indent=2) + "\n")
        os.replace(partial.name, file)
