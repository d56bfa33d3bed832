"""A model smaller than the shipped one, for tests of how runs are kept: what it has learned does not matter there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    """A folder that holds a model of two narrow layers under the shipped one's name. It gives the right sum of two
    digits now and then: groups have mixed rewards."""
    from proximo.data import DataFile
    from proximo.models import tiny_model, tiny_tokenizer
    from proximo.runs.checkpoints import CHECKPOINTS, saved
    from proximo.supervised.schedule import FitOptions
    from proximo.supervised.sft import SftConfig, sft

    root = tmp_path_factory.mktemp("small")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64).save_pretrained(root / "new")
    tiny_tokenizer().save_pretrained(root / "new")
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(10) for b in range(10)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, fit = DataFile(str(root / "sums.jsonl"), held_out=0.1), FitOptions(epochs=24.0, batch=25, learning_rate=1e-2)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    sft(SftConfig(data, model=str(root / "new"), fit=fit, device="cpu"), root / "run", lambda line: None)
    torch.set_default_dtype(usual)
    (root / "shipped").mkdir()
    [trained] = saved(root / "run" / CHECKPOINTS)
    trained.rename(root / "shipped" / "tiny-arithmetic")
    return root / "shipped"


@pytest.fixture(scope="module")
def small_shipped_model(small_model: Path) -> Iterator[None]:
    """In the tests of a file, `tiny-arithmetic` is the small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proximo.models.shipped.FOLDER", small_model)
        yield
