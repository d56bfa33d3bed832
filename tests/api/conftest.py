import pytest
import torch


@pytest.fixture(autouse=True)
def ordinary_precision():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)
