import pytest
import torch
from hypothesis import settings

pytest_plugins = ["tests.browser"]
# One thread: the tensors are tiny, and parallel test processes would fight for the cores.
torch.set_num_threads(1)
# Exactness is judged in float64; tests of float32 and bf16 say so.
torch.set_default_dtype(torch.float64)
# No deadline: a busy machine is not a bug. Examples are the same in every run, so a red test stays red.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def machine_as_it_stands(monkeypatch):
    """Commands neither measure the machine nor change its threads for the tests behind them."""
    from proximo import machine

    monkeypatch.setattr(machine, "machine_for", lambda parameters: machine.Machine.current())
