"""The whole copy of a sharded model: what samplers decode with, engines are sent, and checkpoints hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from proximo.distributed.following import Crew
from proximo.distributed.sharding import refill
from proximo.models.adapters.files import save_model
from proximo.models.adapters.lora import merged_weights
from proximo.models.loading import converted_copy
from proximo.models.model_types import PreTrainedModel

CopyPlace = Literal["every rank", "rank 0", "host"]
"""Where a copy is: on the device of every rank, which samples with it, on that of rank 0, or in the memory of rank 0's
host."""


class WholeCopy:
    """On each rank: the copy of a model, if this rank has one. Rank 0 asks for it.

    A model that is too large for one device can be sent and saved from a copy in the host's memory.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, crew: Crew, where: CopyPlace) -> None:
        """`model` is whole still, and in shards when the copy is filled again."""
        device = crew.mesh.device
        place = torch.device("cpu") if where == "host" else device
        self._crew, self._sharded = crew, model
        is_kept = where == "every rank" or crew.mesh.rank == 0
        self.kept = converted_copy(model, dtype, place) if is_kept else None
        if self.kept is not None and device.type == "cuda" and place.type == "cpu":
            _pin(self.kept)
        self.is_old = False
        """Whether the shards have changed since it was filled."""
        crew.add(refill=self._refill_here)

    @property
    def model(self) -> PreTrainedModel:
        assert self.kept is not None, "only rank 0 has one"
        return self.kept

    def refresh(self) -> None:
        """Bring it up to date on every rank, if the shards have changed."""
        if self.is_old:
            self._crew.tell("refill")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.refresh()
        return merged_weights(self.model)

    def save(self, folder: Path) -> None:
        self.refresh()
        save_model(self.model, folder)

    def _refill_here(self) -> None:
        refill(self.kept, self._sharded)
        self.is_old = False


def _pin(model: PreTrainedModel) -> None:
    """Pin the memory of a model on the host where it is: a GPU copies into other memory several times as slowly, and
    torch's own pinned memory comes in powers of two. Where the system allows no more, it stays as it is."""
    runtime: Any = torch.cuda.cudart()
    for each in model.parameters():
        runtime.cudaHostRegister(each.data_ptr(), each.nbytes, 0)
