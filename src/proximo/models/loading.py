"""Models and tokenizers from Hugging Face folders: safetensors only, no code from elsewhere.

Every folder is opened here, after a look at what it holds, and nowhere else.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proximo.models.adapters.files import base_name, is_adapter, load_adapter, quantize_as, scores
from proximo.models.adapters.lora import merge
from proximo.models.adapters.quantized import Quantization, quantize
from proximo.models.context_length import hold_frequencies
from proximo.models.devices import placed, with_precision
from proximo.models.model_types import AutoClass, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.packing.attention import registered
from proximo.models.packing.support import supports_packing, warn_of_fallback
from proximo.models.progress_bars import bars_for_terminals
from proximo.models.safe_files import dtypes, has_new_scales, inspect, largest, refuse_file
from proximo.models.tokens.templates import check_template
from proximo.models.torch_globals import guarded
from proximo.system.machine import settle_half_products

TEXTS: tuple[str, ...] = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configs and tokenizers; of a model on the hub nothing else but safetensors is fetched."""
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files that say which tokens there are; one of them is there."""
INCOMPLETE = "the folder is incomplete; save model and tokenizer into it with save_pretrained"
HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by the names that safetensors has for them."""
MORE = 4
"""Times as many weights as the files hold may a config be of: tied ones are in files once, or twice."""
CLASSIFIES = "ForSequenceClassification"
"""End of the names of transformers' classes with a head that scores."""
UNREACHABLE = "neither a folder nor a model that the hub or its local cache has; check the name, or download it first"
FOLDERS = ("/", "./", "../", "~", "runs/")
"""Beginnings of paths that no model on the hub has."""


def load_model(
    path: str,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: str = "cpu",
    keep_adapter: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """A causal language model in eval mode, from a folder or a hub id; an adapter's gives its base model with
    the adapter merged into the weights. `keep_adapter` keeps it separate, which is exact in half precision too.
    `quantization` is of the linear layers' weights, for a new adapter; an adapter's folder names its own.
    `dtype` None: as the files hold the weights; on a CPU those that transformers need not convert stay in the files,
    mapped, and take no memory.

    Example: model = load_model("runs/first/checkpoints/step-000100")
    """
    import transformers

    if has_score(read_config(str(opened(path, weights=True)))):
        raise ValueError(f"path {path!r} holds a reward model, which scores and cannot speak: give a causal model")
    model, absent = load_weights(
        path, transformers.AutoModelForCausalLM, dtype=dtype, device=device, keep_adapter=keep_adapter
    )
    if absent:
        raise ValueError(f"path {path!r}: the weights lack {_listed(absent)}; save the model again, whole")
    if quantization is not None:
        quantize(model, quantization, device)
    if supports_packing(model):
        model.set_attn_implementation(registered())
    else:
        warn_of_fallback(type(model).__name__)
    return placed(model, device).eval()


def read_config(path: str) -> PreTrainedConfig:
    """Config of a model, without its weights; of an adapter, the config of its base model."""
    folder = opened(path, weights=False)
    if is_adapter(folder):
        config = read_config(base_of(str(folder)))
        return _scoring(config) if scores(folder) else config
    if not (folder / "config.json").is_file():
        raise ValueError(f"path {path!r}: there is no config.json; {INCOMPLETE}")
    try:
        config = copy.deepcopy(_parsed(folder, (folder / "config.json").read_bytes()))
    except Exception as error:  # a config of another kind fails wherever its first odd value is read
        raise ValueError(f"path {path!r}: transformers cannot read its config.json; {_first_line(error)}") from error
    config._attn_implementation = None  # for a flash attention that is not installed, transformers would fetch one
    return config


def _scoring(config: PreTrainedConfig) -> PreTrainedConfig:
    """Config of a reward model whose head lies with its adapter."""
    config.architectures, config.num_labels = [f"{type(config).__name__.removesuffix('Config')}{CLASSIFIES}"], 1
    return config


@lru_cache(maxsize=8)
def _parsed(folder: Path, text: bytes) -> PreTrainedConfig:
    """Kept for the same text: a run asks for its model's config several times, and transformers checks every field."""
    import transformers

    return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_weights(
    path: str,
    kind: type[AutoClass],
    *,
    dtype: torch.dtype | None,
    config: PreTrainedConfig | None = None,
    unused: tuple[str, ...] = (),
    device: str = "cpu",
    keep_adapter: bool = False,
) -> tuple[PreTrainedModel, set[str]]:
    """A model, and the names of its weights that the files lack; `unused` ones they may hold in vain. The model
    is on the CPU, but for layers that are quantised on `device`.

    Weights that are not finite, of another shape or of another model are refused.
    """
    import transformers

    folder = opened(path, weights=True)
    if is_adapter(folder):
        dtype = dtype or torch.float32  # to merge in
        model, absent = load_weights(base_of(str(folder)), kind, dtype=dtype, config=config, unused=unused)
        quantize_as(model, folder, device)
        absent -= load_adapter(model, folder)
        if not keep_adapter:
            merge(model)
        return model, absent
    dtype = dtype or _dtype_of_files(folder)
    if dtype.itemsize == 2:
        with guarded():
            settle_half_products()
    try:
        config = config or read_config(str(folder))
        _check_size(folder, kind, config)
        with guarded(), _quiet(), bars_for_terminals():
            loaded: Any = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except Exception as error:  # no class for this config, a config that contradicts itself
        raise ValueError(f"path {path!r}: transformers cannot load the model; {_first_line(error)}") from error
    model, report = loaded
    assert isinstance(model, transformers.PreTrainedModel)
    _refuse_other_weights(model, path, report["mismatched_keys"], set(report["unexpected_keys"]) - set(unused))
    _refuse_non_finite(model, path, set(report["missing_keys"]))
    hold_frequencies(model)
    return model, set(report["missing_keys"])


def _refuse_other_weights(model: PreTrainedModel, path: str, mismatched: set[Any], surplus: set[str]) -> None:
    """Refuse weights of other shapes than the config says, and those that the model does not have."""
    if mismatched:
        name, held, wanted = min(mismatched)
        raise ValueError(
            f"path {path!r}: {name} has shape {list(held)} in the weights, and {list(wanted)} by config.json; "
            "one of the two is of another model"
        )
    if surplus:
        raise ValueError(
            f"path {path!r}: the weights hold {_listed(surplus)}, which {type(model).__name__} does not have; "
            "config.json or the weights are of another model"
        )


def _check_size(folder: Path, kind: type[AutoClass], config: PreTrainedConfig) -> None:
    """Refuse a config of far more weights than the files hold: all of them would be made, and then compared."""
    with guarded(), torch.device("meta"):
        counted = sum(each.numel() for each in kind.from_config(copy.deepcopy(config)).parameters())
    if counted > MORE * (held := largest(folder)) + (1 << 20):
        raise ValueError(f"config.json is of a model with {counted:,} weights, and the files hold {held:,}")


def skeleton(path: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """The model without its weights, for counting parameters; of a `config` that is given, `path` is only its name."""
    import transformers

    config = read_config(path) if config is None else config
    try:
        with guarded(), torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(f"path {path!r}: transformers cannot build the model; {_first_line(error)}") from error


def base_of(path: str) -> str:
    """Path of a model's weights: its own, or of an adapter its base model's, which has to be a whole one."""
    folder = opened(path, weights=False)
    if not is_adapter(folder):
        return path
    base = base_name(folder)
    try:
        if not is_adapter(opened(base, weights=False)):
            return base
    except ValueError as error:
        raise ValueError(f"path {path!r} is an adapter whose base model cannot be opened: {error}") from error
    raise ValueError(f"path {path!r} is an adapter of an adapter, {base!r}: merge that one first (proximo merge)")


def is_new(path: str) -> bool:
    """True if nothing has trained a model's weights yet, nor those of an adapter's base; only a few of them are read.
    What is not on this machine yet is on the hub because somebody trained it."""
    folder = opened(base_of(path), weights=False)
    try:
        inspect(folder, weights=True)
    except ValueError:  # there are none, or the run will name what is wrong with them
        return False
    return has_new_scales(folder)


def _dtype_of_files(folder: Path) -> torch.dtype:
    """The dtype of all weights of a model's folder; float32 where they differ, or are wider or narrower than that."""
    [dtype, *others] = dtypes(folder) or {""}
    return torch.float32 if others else HALVES.get(dtype, torch.float32)


def opened(path: str, *, weights: bool) -> Path:
    """The folder of a model, fetched where it is on the hub, when nothing in it is refused."""
    from huggingface_hub import snapshot_download

    refuse_file(path)
    folder = Path(path)
    if not path or "\0" in path or not folder.is_dir():
        wanted = [*TEXTS, "*.safetensors"] if weights else list(TEXTS)
        try:
            # Not what lies deeper: other formats of the same weights.
            folder = Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"path {path!r}: {_unreachable(path)}") from error
    inspect(folder, weights=weights)
    return folder


def _unreachable(path: str) -> str:
    """Reason why there is no such model; of what can only be a folder it is not the hub's."""
    is_folder = path.startswith(FOLDERS) or (path.count("/") > 1 and "://" not in path)
    return "there is no folder of this name" if is_folder else UNREACHABLE


def _refuse_non_finite(model: PreTrainedModel, path: str, absent: set[str]) -> None:
    """A sum is not finite where an element is not, and cheap; where it is not, one looks."""
    named = [(name, tensor) for name, tensor in model.state_dict().items() if name not in absent]
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in named])
    bad = {named[index][0] for index in (~sums.isfinite()).nonzero()[:, 0].tolist()}
    bad = {name for name, tensor in named if name in bad and not tensor.isfinite().all()}
    if bad:
        raise ValueError(f"path {path!r}: NaN or infinity in {_listed(bad)}; fetch the model again, or an older one")


def _listed(names: set[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + more


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of weights that are new or unused: we report what matters of it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy for inference only."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy for inference only, with the model's own weights, until either of the two gets others."""
    return _copy_around(model, Tensor.detach)


def converted_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A copy for inference only, on another device or in another dtype, with one weight at a time on the way there."""
    copied = _copy_around(model, lambda each: each.detach().to(device=device, dtype=dtype, copy=True))
    copied.to(device=device)  # pyright: ignore[reportCallIssue]  # the buffers
    return with_precision(copied, dtype)


def _copy_around(model: PreTrainedModel, weight: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A frozen copy of everything but the parameters, which hold what `weight` makes of the model's."""
    made = {id(each): nn.Parameter(weight(each), requires_grad=False) for each in model.parameters()}
    return copy.deepcopy(model, made).requires_grad_(False).eval()


def has_score(config: PreTrainedConfig) -> bool:
    """True if this is a reward model or classifier, and not a causal language model."""
    named = config.architectures if isinstance(config.architectures, list) else ()
    return any(isinstance(name, str) and name.endswith(CLASSIFIES) for name in named)


def _check_reading(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer that fails with any text: its parts may ask for tokens that it does not have."""
    try:
        tokenizer.decode(tokenizer.encode("1 + 2 = 3"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(f"path {path!r}: its tokenizer cannot read a text, {reason}; {INCOMPLETE}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id."""
    import transformers

    folder = opened(path, weights=False)
    config = read_config(str(folder)) if (folder / "config.json").is_file() or is_adapter(folder) else None
    if not any(any(folder.glob(name)) for name in VOCABULARIES):  # transformers would make up an empty one
        if is_adapter(folder):
            return load_tokenizer(base_of(path))
        raise ValueError(f"path {path!r}: there is no tokenizer; {INCOMPLETE}")
    try:
        given = None if is_adapter(folder) else config  # where it is given, transformers does not read it again
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=given, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, depending on which file is missing or odd
        raise ValueError(f"path {path!r}: no tokenizer can be read there; {INCOMPLETE}") from error
    _check_reading(tokenizer, path)
    check_template(tokenizer, path)
    rows = getattr(config and config.get_text_config(), "vocab_size", len(tokenizer))
    if type(rows) is not int:
        raise ValueError(f"path {path!r}: config.json has {str(rows)[:100]!r} for vocab_size: give a number")
    if len(tokenizer) > rows:  # or its last tokens would be an index error far from here
        raise ValueError(
            f"path {path!r}: the tokenizer has {len(tokenizer)} tokens, the model {rows}; they are not of one model, "
            "or model.resize_token_embeddings was forgotten"
        )
    return tokenizer
