from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from proximo.serving.engine import Engine


@pytest.fixture(scope="session")
def served() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A small model with random weights, whose completions are long: it seldom ends by itself."""
    from proximo.models import tiny_model, tiny_tokenizer

    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64), tiny_tokenizer()


@pytest.fixture(scope="session")
def engine(served) -> "Iterator[Engine]":
    """Shared by tests that leave it idle. Slices are short, so that completions have several."""
    from proximo.serving.engine import Engine

    made = Engine(*served, slots=4, slice_tokens=3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def ordinary_precision() -> Iterator[None]:
    import torch

    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)
