"""The base model of a new adapter."""

from pathlib import Path

from proximo.models.adapters.lora import Lora, import_peft
from proximo.models.adapters.targets import target_layers
from proximo.models.loading import base_of, skeleton


def base_for(path: str) -> str:
    """Name of the model of this folder or hub id in a new adapter's files: a full path, so that peft finds it from
    anywhere, or the hub id. ValueError where there is no peft, or where the model is an adapter itself."""
    import_peft()
    if base_of(path) != path:
        raise ValueError(
            f"path {path!r} is an adapter, and adapter adds another to it: merge the first into a whole model "
            f"(proximo merge {path} DIR), and start from that"
        )
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def check_adapter(path: str, lora: Lora) -> None:
    """ValueError where the model of this folder or hub id cannot have this adapter; its weights are not looked at."""
    base_for(path)
    target_layers(skeleton(path), lora.targets)
