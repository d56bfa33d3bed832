"""LoRA adapters that are pushed as adapters: engines keep the base model, and A and B travel alone."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from proximo.models.adapters.files import save_model
from proximo.models.adapters.lora import NAME, adapter_parameters, has_adapter
from proximo.models.adapters.quantized import quantized_layers
from proximo.models.model_types import PreTrainedModel
from proximo.samplers.engines.engine import Engine
from proximo.samplers.engines.sync import Weights, in_parallel


class TakesAdapters(Protocol):
    """An engine that can load adapters while it runs."""

    def check_adapters(self, deadline: float) -> None: ...

    def load_adapter(self, folder: str, version: int, deadline: float) -> None: ...


class AdapterFolder:
    """Writes the adapter to a folder that every engine can read, as peft stores it. Each push has a folder of its own:
    engines may read it again later, so that the last one stays until the next push."""

    def __init__(self, root: Path, model: PreTrainedModel) -> None:
        self._root, self._model = root, model
        self._last: Path | None = None

    def join(self, engine: Engine, deadline: float) -> None:
        cast(TakesAdapters, engine).check_adapters(deadline)

    def push(self, engines: Sequence[Engine], weights: Weights, version: int, deadline: float) -> dict[str, str]:
        folder = Path(tempfile.mkdtemp(prefix=f"adapter-{version}-", dir=self._root))
        save_model(self._model, folder)
        failed = in_parallel(
            engines, lambda engine: cast(TakesAdapters, engine).load_adapter(str(folder), version, deadline)
        )
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = folder
        return failed

    def leave(self, engine: Engine) -> None:
        pass


def pushed_rank(model: PreTrainedModel) -> int:
    """Rank of the adapter that is pushed; ValueError where there is none, or it cannot be pushed by itself."""
    if not has_adapter(model):
        raise ValueError(
            'sampler.sync is "adapter", but no adapter is trained: set adapter.type = "Lora", or use "folder" or "gloo"'
        )
    if quantized_layers(model):
        raise ValueError(
            'sampler.sync is "adapter" and adapter.quantize_base is set: engines would sample with a base that is not '
            'quantised; use "folder" or "gloo", which push merged weights, or leave quantize_base out'
        )
    config: Any = model.peft_config[NAME]
    return int(config.r)


def base_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every weight under the adapter."""
    adapters = {id(parameter) for parameter in adapter_parameters(model).values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapters:
            yield name.replace(".base_layer.", "."), parameter.detach()
