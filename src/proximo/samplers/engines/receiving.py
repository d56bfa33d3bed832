"""The engines' end of the transports `folder` and `gloo`, as vLLM 0.32 asks for it; runs in vLLM's workers."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from proximo.samplers.engines.buckets import Layout, connect_store, gloo_group, receive
from proximo.samplers.engines.plugin import finish_reload


class _Receiver(WeightTransferEngine):
    """Weights in the checkpoint's names and shapes, loaded layer by layer."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # a CPU has nothing to wait for, and the base class would fail
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        pass


@dataclass
class FolderInit(WeightTransferInitInfo):
    pass


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    path: str


class FolderReceiver(_Receiver):
    init_info_cls, update_info_cls = FolderInit, FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        pass

    def receive_weights(self, update_info: FolderUpdate) -> None:
        files = sorted(Path(update_info.path).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no weights in {update_info.path}, seen from {os.uname().nodename}")
        self.model.load_weights(pair for path in files for pair in stored(path))


def stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@dataclass
class GlooInit(WeightTransferInitInfo):
    address: str
    port: int
    first_rank: int
    size: int
    deadline: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooReceiver(_Receiver):
    init_info_cls, update_info_cls = GlooInit, GlooUpdate

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._store = connect_store(init_info.address, init_info.port, init_info.size, init_info.deadline)
        self._group = gloo_group(self._store, rank, init_info.size, init_info.deadline)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        layout = Layout(update_info.names, update_info.dtypes, update_info.shapes)
        self.model.load_weights(receive(self._group, layout))
