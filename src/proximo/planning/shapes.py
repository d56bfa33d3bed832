"""Models by their shape: parameter counts and sizes from a config, exact and without weights.

Parameters are counted on the model that transformers builds on the `meta` device, which holds names and shapes only:
so the count is exact for every architecture that transformers knows, in a tenth of a second for 8 B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Qwen3MoeConfig

from proximo.models import supports_packing
from proximo.models.loading import read_config, skeleton
from proximo.models.model_types import PreTrainedConfig, PreTrainedModel
from proximo.models.packing.attention import head_width
from proximo.models.shipped import resolve
from proximo.planning.published_shapes import PUBLISHED, QWEN_FAMILY

SHAPES: Mapping[str, PreTrainedConfig] = {
    **{shape.name.removeprefix(QWEN_FAMILY): shape.config() for shape in PUBLISHED},
    "30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        head_dim=128,  # pyright: ignore[reportCallIssue]
    ),
}
"""Configs of models that have a name: the benchmark's published shapes, and the mixture Qwen/Qwen3-30B-A3B."""

SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
"""Sizes that a config has to say for a plan; Mamba and RWKV have no attention."""


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Sizes and parameter counts of a decoder."""

    name: str
    model: PreTrainedModel
    """The model on the `meta` device."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config()

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        """`parameters`, `matrices` and `body`: counting takes long enough to do it once."""
        chosen, matrices = getattr(self.config, "num_experts_per_tok", None) or 1, _matrices(self.model)
        body = (matrix.numel() * chosen // len(matrix) if matrix.ndim == 3 else matrix.numel() for matrix in matrices)
        return (
            sum(parameter.numel() for parameter in self.model.parameters()),
            sum(matrix.numel() for matrix in matrices),
            sum(body),
        )

    @property
    def parameters(self) -> int:
        """All weights; tied ones are counted once."""
        return self._counts[0]

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def is_packed(self) -> bool:
        """True if the fast path runs it: packed passes and the embedded sampler, which this plan is about."""
        return supports_packing(self.model)

    @property
    def matrices(self) -> int:
        """Weights of the layers' matrices, all experts included."""
        return self._counts[1]

    @property
    def body(self) -> int:
        """Weights of the layers' matrices that a token is multiplied with: of a mixture its chosen experts'."""
        return self._counts[2]

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def query_width(self) -> int:
        return self.config.num_attention_heads * head_width(self.config)

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values in all layers, at `width` bytes per number."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return 2 * self.layers * heads * head_width(self.config) * width


def _matrices(model: PreTrainedModel) -> list[Any]:
    """Matrices of the layers, of two dimensions, or three where experts are stacked."""
    return [
        parameter
        for name, parameter in model.base_model.named_parameters()
        if name.startswith("layers.") and parameter.ndim > 1
    ]


def read_shape(name: str) -> ModelShape:
    """The shape of a named size, a config.json, a model's folder or a hub id, of which only texts are fetched."""
    shape = ModelShape(name, skeleton(name, _config(name)))
    if missing := [size for size in SIZES if not isinstance(getattr(shape.config, size, None), int)]:
        raise ValueError(
            f"model is {name!r}, a {shape.config.model_type} model, whose config has no {' and no '.join(missing)}: "
            "only decoders with attention can be planned"
        )
    return shape


def _config(name: str) -> PreTrainedConfig:
    named = {known.lower(): config for known, config in SHAPES.items()}
    short = name.lower().removeprefix(QWEN_FAMILY.lower())
    if short in named:
        return named[short]
    if Path(name).is_file() and Path(name).match("config.json"):
        return read_config(str(Path(name).parent))
    try:
        return read_config(resolve(name))
    except ValueError as error:
        if Path(name).exists():
            raise
        raise ValueError(f"{error}; or give a shape by name: {', '.join(SHAPES)}") from error
