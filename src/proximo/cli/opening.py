"""A model by name for a command: loaded, or refused with one clear error."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.cli.flags import refuse
from proximo.models import load_model, load_tokenizer, pick_device
from proximo.models.shipped import resolve


def open_model(name: str, device: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        path = resolve(name)
        return load_model(path, device=pick_device(device)), load_tokenizer(path)
    except ValueError as error:
        refuse(str(error))
