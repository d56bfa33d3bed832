"""Folders of adapters: what peft and transformers read in them, and what is refused."""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from proximo.models import load_model, load_tokenizer, tiny_model, tiny_tokenizer
from proximo.models.adapters.files import CONFIG, WEIGHTS, save_model
from proximo.models.adapters.lora import Lora, add_lora, has_adapter, import_peft
from proximo.models.adapters.starting import base_for, merging, whole_base
from proximo.models.loading import base_of, read_config
from proximo.models.reward_models import load_reward_model
from proximo.system.folders import complaints
from tests.learner.test_lora import stirred

PEFT_ASKS_BY_AN_OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""Up to 0.21.2, of a model of transformers 5.23."""

TOKENS = torch.tensor([[17, 12, 9, 22, 5]])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_model(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=24).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path) -> Path:
    """As a run saves it: without the base's weights."""
    model = load_model(str(base))
    add_lora(model, Lora(rank=2, alpha=6), base=base_for(str(base)), seed=0)
    stirred(model)
    folder = base.parent / "adapter"
    folder.mkdir()
    save_model(model, folder)
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation("sdpa")
    return model(input_ids=TOKENS).logits


@PEFT_ASKS_BY_AN_OLD_NAME
def test_peft_and_transformers_load_what_we_save(adapter: Path, base: Path):
    assert sorted(path.name for path in adapter.iterdir()) == [CONFIG, WEIGHTS]
    expected = logits(load_model(str(adapter), keep_adapter=True))
    assert (expected - logits(load_model(str(base)))).abs().max() > 1e-3
    for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert_close(logits(kind.from_pretrained(adapter, dtype=torch.float32)), expected, rtol=0, atol=1e-6)


@PEFT_ASKS_BY_AN_OLD_NAME
def test_we_load_what_peft_saves(base: Path, tmp_path: Path):
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=r".*\.(q_proj|up_proj)", lora_dropout=0.1)
    wrapped = get_peft_model(model, config).eval()
    stirred(wrapped)
    wrapped.save_pretrained(str(tmp_path / "peft"))
    assert_close(logits(load_model(str(tmp_path / "peft"))), logits(wrapped), rtol=0, atol=1e-6)
    # Its tokenizer and shape are those of the base model.
    assert load_tokenizer(str(tmp_path / "peft")).get_vocab() == tiny_tokenizer().get_vocab()
    assert read_config(str(tmp_path / "peft")).hidden_size == 16


def test_an_adapter_is_merged_unless_it_is_to_be_kept(adapter: Path, base: Path):
    merged, kept = load_model(str(adapter)), load_model(str(adapter), keep_adapter=True)
    assert (has_adapter(merged), has_adapter(kept)) == (False, True)
    assert dict(merged.named_parameters()).keys() == dict(load_model(str(base)).named_parameters()).keys()
    assert_close(logits(merged), logits(kept), rtol=0, atol=1e-6)
    assert base_of(str(adapter)) == str(base)


def test_a_small_change_is_lost_by_merging_in_half_precision_and_kept_beside(adapter: Path, base: Path):
    """A change below half a digit of the weights: merged weights are the base's, the kept adapter still acts."""
    tensors = load_file(adapter / WEIGHTS)
    save_file({name: each * (1e-6 if "lora_B" in name else 1) for name, each in tensors.items()}, adapter / WEIGHTS)
    merged = load_model(str(adapter), dtype=torch.bfloat16)
    plain = load_model(str(base), dtype=torch.bfloat16)
    changed = sum(int((a != b).sum()) for a, b in zip(merged.parameters(), plain.parameters(), strict=True))
    assert changed < 0.02 * sum(each.numel() for each in plain.parameters())
    kept = load_model(str(adapter), dtype=torch.bfloat16, keep_adapter=True)
    assert {each.dtype for name, each in kept.named_parameters() if "lora" in name} == {torch.float32}


def test_a_reward_model_begins_from_an_adapter(adapter: Path):
    model = load_reward_model(str(adapter), device="cpu")
    merged = load_model(str(adapter))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), merged.get_parameter(name))


def _edit(**changes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another method": (_edit(peft_type="IA3"), "peft_type 'IA3'; only LORA is read"),
    "DoRA": (_edit(use_dora=True), "use_dora True: only plain LoRA is read"),
    "more than A and B": (_edit(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\]"),
    "another start": (_edit(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    "an unknown field": (_edit(new_kind=3), "new_kind 3"),
    "no base": (_edit(base_model_name_or_path=None), "names no base model"),
    "a base that is gone": (_edit(base_model_name_or_path="/gone"), "is an adapter whose base model cannot be opened"),
    "code of its own": (_edit(auto_map={"AutoConfig": "evil.Evil"}), "auto_map: code of the model's authors"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "damaged": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 20), f"{WEIGHTS} is damaged"),
    "a tensor too few": (_tensors(lambda tensors: tensors.pop(FIRST)), f"differ in {FIRST}"),
    "a tensor of another shape": (
        _tensors(lambda tensors: tensors.update({FIRST: torch.zeros(3, 16)})),
        r"shape \(3, 16\), in the model \(2, 16\)",
    ),
    "not finite": (_tensors(lambda tensors: tensors[FIRST].fill_(torch.nan)), "NaN or infinity in"),
    "targets that are not there": (_edit(target_modules=["elsewhere"]), "the adapter does not fit its base model"),
}


@pytest.mark.slow("trains and reads adapters")
@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(damage, message, adapter: Path):
    damage(adapter)
    with pytest.raises(ValueError, match=message) as error:
        load_model(str(adapter))
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path):
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=24).save_pretrained(tmp_path / "wide")
    _edit(base_model_name_or_path=str(tmp_path / "wide"))(adapter)
    with pytest.raises(ValueError, match="the adapter is of another model"):
        load_model(str(adapter))


def test_an_adapter_of_an_adapter_is_refused(adapter: Path, tmp_path: Path):
    (tmp_path / "second").mkdir()
    for file in adapter.iterdir():
        (tmp_path / "second" / file.name).write_bytes(file.read_bytes())
    _edit(base_model_name_or_path=str(adapter))(tmp_path / "second")
    with pytest.raises(ValueError, match="is an adapter of an adapter"):
        load_model(str(tmp_path / "second"))


def test_an_adapter_under_a_new_one_is_merged_and_written_once(adapter: Path, base: Path, tmp_path: Path):
    """Whoever opens the new adapter finds its base; a resumed run has it as it was, whatever became of the first."""
    folder = tmp_path / "run" / "base"
    assert whole_base(str(base), folder, torch.float32) == str(base)
    assert not folder.exists()
    path = whole_base(str(adapter), folder, torch.float32)
    assert (path, base_of(path), complaints(folder)) == (str(folder), path, [])
    merged, written = load_model(str(adapter)).state_dict(), load_model(path).state_dict()
    assert all(torch.equal(merged[name], each) for name, each in written.items())
    assert load_tokenizer(path).get_vocab() == tiny_tokenizer().get_vocab()
    (adapter / WEIGHTS).unlink()
    assert whole_base(str(adapter), folder, torch.float32) == path


def test_what_becomes_of_an_adapter_is_said(adapter: Path, base: Path):
    assert not merging(str(base), Lora(), "run/base", torch.float32)
    assert "all weights are trained" in merging(str(adapter), None, "run/base", torch.float32)
    assert "written to run/base (0.0221 MB)" in merging(str(adapter), Lora(), "run/base", torch.float32)


def test_without_peft_the_extra_is_named(adapter: Path, base: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    load_model(str(base))
    for work in (lambda: load_model(str(adapter)), lambda: base_for(str(base))):
        with pytest.raises(ValueError, match=r"peft.*pip install 'proximo\[lora\]'"):
            work()


def test_peft_is_imported_without_advice_on_packages_that_are_not_used(tmp_path, monkeypatch, caplog):
    """bitsandbytes, which peft imports where it is installed, advises to install kernels, on some processors only."""
    advice = 'logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")'
    (tmp_path / "peft.py").write_text(f"import logging\n{advice}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert import_peft().__file__ == str(tmp_path / "peft.py")
    monkeypatch.delitem(sys.modules, "peft")
    assert not caplog.records
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.NOTSET
