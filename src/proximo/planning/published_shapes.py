"""Published and given shapes of decoders, models of them with random weights, and a tokenizer whose end token cannot be
sampled."""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from proximo.models.model_types import PreTrainedConfig
from proximo.models.torch_globals import guarded

POSITIONS = 2**17
"""Maximum tokens of a prompt with its completion in a benchmark, whatever the published model's is."""
PAD_ID = 0


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a decoder's cost."""

    name: str
    family: type[LlamaConfig] | type[Qwen2Config] | type[Qwen3Config]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool = True
    """True if head and embedding are the same weights."""
    positions: int = POSITIONS
    """Maximum tokens of a prompt with its completion of the published model."""

    @property
    def body(self) -> int:
        """Weights of the matrix products in the layers."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_width
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.hidden * self.vocabulary

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values in all layers, at `width` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_width * width

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The config of a model of this shape."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
        }
        return self.family(**sizes | changes)

    def model(self, *, attention: str, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
        """A model with random weights: the same for the same seed and device; the global random state is unchanged."""
        config = self.config(
            max_position_embeddings=POSITIONS, pad_token_id=PAD_ID, bos_token_id=None, eos_token_id=None
        )
        target = torch.device(device)
        with guarded(target), target:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        assert isinstance(model, PreTrainedModel)
        model.generation_config = GenerationConfig(pad_token_id=PAD_ID)
        return model.to(device).eval()  # pyright: ignore[reportArgumentType]

    def tokenizer(self, *, ends: bool = False) -> PreTrainedTokenizerFast:
        """Token i is the word `ti`. The end token lies beyond the vocabulary: no completion ends before its limit. With
        `ends` it is the padding token, as `load_tokenizer` requires: one completion in thousands ends earlier."""
        words = {f"t{number}": number for number in range(1, self.vocabulary)} | {"<pad>": PAD_ID}
        end = "<pad>" if ends else "<end>"
        words.setdefault(end, self.vocabulary)
        tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))
        tokens.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokens, pad_token="<pad>", eos_token=end, clean_up_tokenization_spaces=False
        )


QWEN_FAMILY = "Qwen3-"
TINY = Shape("tiny", Qwen3Config, 4, 128, 384, 4, 2, 32, 1024)
SMOLLM_135M = Shape("SmolLM2-135M", LlamaConfig, 30, 576, 1536, 9, 3, 64, 49152, positions=8192)
QWEN_600M = Shape("Qwen3-0.6B", Qwen3Config, 28, 1024, 3072, 16, 8, 128, 151936, positions=40960)
QWEN_1700M = Shape("Qwen3-1.7B", Qwen3Config, 28, 2048, 6144, 16, 8, 128, 151936, positions=40960)
QWEN_4B = Shape("Qwen3-4B", Qwen3Config, 36, 2560, 9728, 32, 8, 128, 151936, positions=40960)
QWEN_8B = Shape("Qwen3-8B", Qwen3Config, 36, 4096, 12288, 32, 8, 128, 151936, tied=False, positions=40960)
QWEN_14B = Shape("Qwen3-14B", Qwen3Config, 40, 5120, 17408, 40, 8, 128, 151936, tied=False, positions=40960)
LLAMA_1B = Shape("Llama-1B", LlamaConfig, 16, 2048, 8192, 32, 8, 64, 128256)
LLAMA_3B = Shape("Llama-3B", LlamaConfig, 28, 3072, 8192, 24, 8, 128, 128256)
LLAMA_8B = Shape("Llama-8B", LlamaConfig, 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
QWEN25 = (
    Shape("Qwen2.5-0.5B", Qwen2Config, 24, 896, 4864, 14, 2, 64, 151936, positions=32768),
    Shape("Qwen2.5-1.5B", Qwen2Config, 28, 1536, 8960, 12, 2, 128, 151936, positions=32768),
    Shape("Qwen2.5-3B", Qwen2Config, 36, 2048, 11008, 16, 2, 128, 151936, positions=32768),
    Shape("Qwen2.5-7B", Qwen2Config, 28, 3584, 18944, 28, 4, 128, 152064, tied=False, positions=32768),
)
PUBLISHED = (SMOLLM_135M, QWEN_600M, QWEN_1700M, QWEN_4B, QWEN_8B, QWEN_14B, LLAMA_1B, LLAMA_3B, LLAMA_8B, *QWEN25)
"""Shapes from the config.json of the published models: HuggingFaceTB/SmolLM2-135M; Qwen/Qwen3-0.6B, -1.7B, -4B, -8B and
-14B; meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B; the Instruct models of Qwen/Qwen2.5-0.5B, -1.5B, -3B and
-7B."""
SHAPES = (TINY, *PUBLISHED)

SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_width", "vocabulary")
WRITTEN = "LAYERSxHIDDENxINTERMEDIATExHEADSxKV_HEADSxHEAD_WIDTHxVOCABULARY"


def shape_of(text: str) -> Shape:
    """A shape by its name (Qwen3's also without "Qwen3-"), or of the sizes written out, which is of Qwen3's family with
    a tied head.

    Example: shape_of("qwen3-0.6b"), shape_of("28x1024x3072x16x8x128x151936")
    """
    for shape in SHAPES:
        if text.lower() in (shape.name.lower(), shape.name.lower().removeprefix(QWEN_FAMILY.lower())):
            return shape
    numbers = text.lower().split("x")
    if len(numbers) != len(SIZES) or not all(number.isdecimal() for number in numbers):
        names = ", ".join(shape.name for shape in SHAPES)
        raise ValueError(f"shape is {text!r}: give one of {names}, or the sizes as {WRITTEN}")
    sizes = dict(zip(SIZES, map(int, numbers), strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"shape has {name} {size}: give at least 1")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"shape has {sizes['heads']} heads and {sizes['kv_heads']} kv_heads: give a divisor of heads")
    if sizes["head_width"] % 2:
        raise ValueError(f"shape has head_width {sizes['head_width']}: give an even number, positions rotate halves")
    if sizes["vocabulary"] < 2:
        raise ValueError("shape has vocabulary 1: give at least 2, token 0 is padding")
    return Shape(text.lower(), Qwen3Config, **sizes)
