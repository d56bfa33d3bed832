from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from proximo.serving.engine import ServingEngine
    from proximo.serving.reading import RequestReader


@pytest.fixture(scope="session")
def served() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A small model with random weights, whose completions are long: it seldom ends by itself."""
    from proximo.models import tiny_model, tiny_tokenizer

    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64), tiny_tokenizer()


@pytest.fixture(scope="session")
def engine(served) -> "Iterator[ServingEngine]":
    """Shared by tests that leave it idle. Slices are short, so that completions have several."""
    from proximo.serving.engine import ServingEngine

    made = ServingEngine(*served, slots=4, slice_tokens=3)
    yield made
    made.close()


@pytest.fixture(scope="session")
def reader() -> "Iterator[RequestReader]":
    """Of requests to a model `m`. Its chat template never ends for a conversation that begins with LOOP."""
    from proximo.models import tiny_tokenizer
    from proximo.serving.reading import RequestReader
    from proximo.serving.requests import Asking

    tokenizer = tiny_tokenizer()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    hostile = "{% if messages[0]['content'] == 'LOOP' %}" + endless + "{% endif %}"
    tokenizer.chat_template = hostile + str(tokenizer.chat_template)
    made = RequestReader(Asking(tokenizer, context=4096, model="m", max_tokens=6), seconds=0.5)
    made.start()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def ordinary_precision() -> Iterator[None]:
    import torch

    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)
