"""Bytes that weights take while they are trained, and the memory that a machine has for them."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from proximo.learner.optimizer import HALVES
from proximo.learner.options import Moments, moment_bytes


def machine_bytes() -> int:
    """The memory of this machine, or of the container if that has less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # absent, or `max`: no limit
            sizes.append(int(Path(limit).read_text()))
    return min(sizes)


def moments_on(moments: Moments, *, is_gpu: bool) -> Moments:
    """Moments as they count for a device: a CPU's memory is the host's."""
    return "float32" if moments == "cpu" and not is_gpu else moments


def parameter_bytes(dtype: torch.dtype, *, trained: bool, moments: Moments = "float32") -> float:
    """Bytes per parameter: the weight and, if trained, its float32 gradient, two moments and, in half precision, a
    master weight."""
    wide = max(dtype.itemsize, 4)
    masters = wide if dtype in HALVES else 0
    return dtype.itemsize + (trained and wide + masters + moment_bytes(moments, wide))
