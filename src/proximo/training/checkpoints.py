"""A checkpoint is a Hugging Face folder; it exists only when it is complete."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save(folder: Path, step: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write checkpoints/step-N beside its final name, then rename it."""
    target = folder / "checkpoints" / f"step-{step:06d}"
    temporary = target.with_name(target.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target
