"""The whole copy of a sharded model: what samplers decode with, engines are sent, and checkpoints hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from proximo.distributed.rank_group import Crew
from proximo.distributed.sharding import refill
from proximo.models.adapters.files import save_model
from proximo.models.adapters.lora import merged_weights
from proximo.models.loading import converted_copy
from proximo.models.model_types import PreTrainedModel

CopyPlace = Literal["every rank", "rank 0", "host"]
"""Place of a copy: on the device of every rank, which samples with it, on that of rank 0, or in the memory of rank 0's
host."""


class WholeCopy:
    """Copy of a model on each rank, if that rank has one. Rank 0 asks for it.

    A model that is too large for one device can be sent and saved from a copy in the host's memory.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, crew: Crew, where: CopyPlace) -> None:
        """`model` is whole still, and in shards when the copy is filled again."""
        device = crew.mesh.device
        target = torch.device("cpu") if where == "host" else device
        self._crew, self._sharded = crew, model
        is_kept = where == "every rank" or crew.mesh.rank == 0
        self.kept = converted_copy(model, dtype, target) if is_kept else None
        if self.kept is not None and device.type == "cuda" and target.type == "cpu":
            for each in self.kept.parameters():
                each.data = each.data.pin_memory()  # a GPU copies into other memory more slowly
        self.is_old = False
        """True if the shards have changed since it was filled."""
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
