"""Models by their shape: parameter counts and sizes from a config, exact and without weights.

Parameters are counted on the model that transformers builds on the `meta` device, which holds names and shapes only:
so the count is exact for every architecture that transformers knows, in a tenth of a second for 8 B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from proximo.models import supports_packing
from proximo.models.loading import read_config, skeleton
from proximo.models.packing.attention import head_width
from proximo.models.shipped import resolve


def _qwen3(layers: int, hidden: int, inner: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def _llama3(layers: int, hidden: int, inner: int, heads: int, *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


SHAPES: Mapping[str, PreTrainedConfig] = {
    "0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "8B": _qwen3(36, 4096, 12288, 32, tied=False),
    "14B": _qwen3(40, 5120, 17408, 40, tied=False),
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
    "llama-1B": _llama3(16, 2048, 8192, 32, tied=True),
    "llama-3B": _llama3(28, 3072, 8192, 24, tied=True),
    "llama-8B": _llama3(32, 4096, 14336, 32, tied=False),
}
"""Shapes that have a name, from the config.json of the published models: Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B and
-30B-A3B; meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B."""


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
    def parameters(self) -> int:
        """All weights; tied ones are counted once."""
        return sum(each.numel() for each in self.model.parameters())

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
        """Whether the fast path runs it: packed passes and the embedded sampler, which this plan is about."""
        return supports_packing(self.model)

    @cached_property
    def matrices(self) -> int:
        """Weights of the layers' matrices, all experts included."""
        return sum(each.numel() for each in _matrices(self.model))

    @property
    def body(self) -> int:
        """Weights of the layers' matrices that a token is multiplied with: of a mixture its chosen experts'."""
        chosen = getattr(self.config, "num_experts_per_tok", None) or 1
        return sum(
            each.numel() * chosen // len(each) if each.ndim == 3 else each.numel() for each in _matrices(self.model)
        )

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
    """Two dimensions, or three where experts are stacked."""
    return [each for name, each in model.base_model.named_parameters() if name.startswith("layers.") and each.ndim > 1]


def read_shape(name: str) -> ModelShape:
    """The shape of a named size, a config.json, a model's folder or a hub id, of which only texts are fetched."""
    return ModelShape(name, skeleton(name, _config(name)))


def _config(name: str) -> PreTrainedConfig:
    named = {known.lower(): config for known, config in SHAPES.items()}
    if name.lower() in named:
        return named[name.lower()]
    if Path(name).is_file() and Path(name).match("config.json"):
        return read_config(str(Path(name).parent))
    try:
        return read_config(resolve(name))
    except ValueError as error:
        if Path(name).exists():
            raise
        raise ValueError(f"{error}; or give a shape by name: {', '.join(SHAPES)}") from error
