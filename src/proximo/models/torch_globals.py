"""State of torch, once in a process: its random generators, the default dtype, the functions that fill new weights.

Dropout and new layers draw from torch's own generators and cannot be given others, and transformers changes the rest
while it builds a model. So whatever uses or changes them does so inside `guarded`, one thread at a time, and leaves
them as they were. Sampling and reinforcement learning use none of them.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_IN_USE = threading.RLock()


@contextmanager
def guarded(device: torch.device | None = None) -> Iterator[None]:
    """Hold torch's global state; afterwards the generators of the CPU and of this device are as they were."""
    with _IN_USE, torch.random.fork_rng(_gpus(device)):
        yield


class OwnDraws:
    """A run's own random numbers for what draws from torch's generators, such as dropout.

    Example:
        draws = OwnDraws(seed=0, device=model.device)
        with draws.active():
            loss(model.train()).backward()
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        with guarded(device):
            torch.default_generator.manual_seed(seed)
            if _gpus(device):
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            self._states = self._current()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Torch's generators go on from where this run left them; other threads wait."""
        with guarded(self._device):
            self._apply()
            try:
                yield
            finally:
                self._states = self._current()

    def state(self) -> dict[str, Tensor]:
        """State that a resumed run needs to draw the same numbers."""
        return self._states

    def load(self, states: Mapping[str, Tensor]) -> None:
        self._states = {**self._states, **states}

    def _current(self) -> dict[str, Tensor]:
        states = {"torch": torch.get_rng_state()}
        for each in _gpus(self._device):
            states["cuda"] = torch.cuda.get_rng_state(each)
        return states

    def _apply(self) -> None:
        torch.set_rng_state(self._states["torch"])
        for each in _gpus(self._device):
            torch.cuda.set_rng_state(self._states["cuda"], each)


def _gpus(device: torch.device | None) -> list[torch.device]:
    return [device] if device is not None and device.type == "cuda" else []
