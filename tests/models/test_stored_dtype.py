"""Models as their files hold them, and copies in another dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proximo.models import load_model, tiny_model, with_precision
from proximo.models.loading import converted_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_loaded_as_its_files_hold_it_and_not_as_its_config_says(tmp_path: Path, dtype: torch.dtype):
    with_precision(tiny_model(seed=1), dtype).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace(str(dtype).removeprefix("torch."), "float32"))
    found = load_model(str(tmp_path), dtype=None)
    assert {each.dtype for each in found.parameters()} == {dtype}
    wide = load_model(str(tmp_path))
    for ours, theirs in zip(found.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs)


def test_a_model_of_several_dtypes_is_loaded_in_the_widest(tmp_path: Path):
    tiny_model(seed=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    norm = next(name for name in held if "norm" in name)
    save_file({name: each if name == norm else each.bfloat16() for name, each in held.items()}, file, {"format": "pt"})
    found = load_model(str(tmp_path), dtype=None)
    assert {each.dtype for each in found.parameters()} == {torch.float32}
    assert torch.equal(dict(found.named_parameters())[norm], held[norm])


def test_a_copy_in_another_dtype_is_rounded_tied_and_frozen():
    model = tiny_model(seed=2)
    assert model.config.tie_word_embeddings
    copied = converted_copy(model, torch.bfloat16, torch.device("cpu"))
    assert copied.get_input_embeddings().weight is copied.get_output_embeddings().weight  # pyright: ignore
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert ours.requires_grad
        assert not theirs.requires_grad
        assert ours.dtype == torch.float32
        assert torch.equal(theirs, ours.bfloat16()), name
    for ours, theirs in zip(model.buffers(), copied.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        same = converted_copy(model, torch.float32, torch.device("cpu"))
        next(same.parameters()).add_(1.0)
    assert not torch.equal(next(same.parameters()), next(model.parameters()))
