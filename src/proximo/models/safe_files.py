"""Files of a model's folder, looked at before any library opens it: nothing in it may ask for code to be run."""

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from proximo.models.tokens.growing import growing
from proximo.system.opening import blob_of, open_file, read_file, without_links

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Opening one may run whatever its author wrote into it."""
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
CODE = ("auto_map", "custom_pipeline", "custom_pipelines", "custom_generate")
"""Keys of a config that name Python files of the model's authors."""
ELSEWHERE = ("configuration_files", "fast_tokenizer_files", "attribute_map")
"""Keys that make transformers read another file instead, or one key for another."""
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Keys that, with a slash in their value, name compiled code to be fetched."""

READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe")
"""Suffixes of texts that are read whole."""
TOKENIZER = "tokenizer.json"
_VOCABULARIES = (TOKENIZER, "vocab.json", "added_tokens.json", "tekken.json")
"""Files whose keys are tokens, and mean nothing."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIZED = ("config.json", ADAPTER)
"""Configs whose numbers are sizes of what is built."""
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
MAX_CONFIG, MAX_TEXT = 1 << 20, 64 << 20
"""Bytes of a config, and of a vocabulary or an index: the largest that there are have half of that."""
MAX_PARTS = 20_000
"""Layers, heads, experts: no model has as many."""
MAX_NUMBER = 1 << 40
"""Any number of a config: beyond it a number is no size, and some that are none end what computes with them."""
MAX_TENSORS = 500_000
"""Tensors of a file of weights."""
MAX_SCALE = 1024
"""Numbers of a scale that are looked at."""
_PARTS = re.compile(r"layer|head|expert|depth|stage|label|codebook|num_\w*block", re.IGNORECASE)
"""Pattern in the keys of numbers that say how many parts of a kind are built."""
_TEMPLATES = "additional_chat_templates"
"""Folder whose files are chat templates."""
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32}
_BITS |= {"U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}


def inspect(folder: Path, *, weights: bool) -> None:
    """A ValueError with everything that forbids opening the folder; the weights' files only where they are wanted."""
    problems = [*_strange_files(folder)] or [
        *_configs(folder),
        *_tokenizer(folder),
        *(_weights(folder) if weights else ()),
    ]
    if problems:
        raise ValueError("\n".join(f"path {str(folder)!r}: {problem}" for problem in problems))


def refuse_file(path: str) -> None:
    """A model is a folder; an archive of one is never unpacked."""
    file = Path(path)
    if not file.is_file():
        return
    if file.suffix.lower() in ARCHIVES:
        raise ValueError(f"path {path!r}: an archive, which is never unpacked here; unpack it, and give the folder")
    raise ValueError(f"path {path!r}: a file, not a folder; give the folder that holds config.json and the weights")


def tensors(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file; a ValueError where the file is not whole and sound."""
    try:
        header, room = _header(file)
        return _shapes(header, room)
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "its header is not JSON"
        raise ValueError(f"{file.name} is damaged: {reason}; fetch or save it again") from None


def dtypes(folder: Path) -> set[str]:
    """Names that safetensors has for the dtypes of all weights in a folder that `inspect` let pass."""
    headers = [_header(file)[0] for file in folder.glob("*.safetensors")]
    return {entry["dtype"] for header in headers for name, entry in header.items() if name != "__metadata__"}


def has_new_scales(folder: Path) -> bool:
    """True if each scale of a normalisation is one number throughout, as before any training. Of a folder that
    `inspect` let pass; False where it has no weights."""
    has_scales = False
    for file in sorted(folder.glob("*.safetensors")):
        for scale, width in _scales(file):
            if scale != scale[:width] * (len(scale) // width):
                return False
            has_scales = True
    return has_scales


def _scales(file: Path) -> Iterator[tuple[bytes, int]]:
    """The numbers of each weight with one dimension, of long ones the first, and the bytes of one of them."""
    header, room = _header(file)
    behind = file.stat().st_size - room
    with file.open("rb") as opened:
        for name, entry in header.items():
            if name.endswith(".weight") and len(entry["shape"]) == 1 and entry["shape"][0] > 1:
                width, (start, end) = _BITS[entry["dtype"]] // 8, entry["data_offsets"]
                opened.seek(behind + start)
                yield opened.read(min(end - start, MAX_SCALE * width)), width


def _header(file: Path) -> tuple[Any, int]:
    """A safetensors file's header, and the bytes behind it."""
    size = file.stat().st_size
    with open_file(_real(file)) as opened:
        length = _header_length(opened.read(8), size)
        return json.loads(opened.read(length).decode(), object_pairs_hook=_without_duplicates), size - 8 - length


def _real(file: Path) -> Path:
    """Path of a file: the folder that the user named may be reached through links, and the hub's cache has links."""
    return blob_of(without_links(file.parent) / file.name)


def largest(folder: Path) -> int:
    """Values in all weights of a folder that `inspect` let pass."""
    files = (tensors(file) for file in sorted(folder.glob("*.safetensors")))
    return sum(math.prod(shape) for shapes in files for shape in shapes.values())


def json_object(file: Path, limit: int = MAX_CONFIG) -> dict[str, Any]:
    """The object in a JSON file; a ValueError, in one line, where it holds none."""
    try:
        value = json.loads(read_file(_real(file), limit))
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{file.name} is not JSON{where}: fetch or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is not a JSON object: fetch or save it again")
    return value


# Files


def _strange_files(folder: Path) -> Iterator[str]:
    """Complaints about what a library that opens the folder could not read, or should not: all but files and folders,
    links other than those of a Hugging Face cache, and texts without an end."""
    for file in [*folder.iterdir(), *_inside(folder / _TEMPLATES)]:
        try:
            target = _real(file)
            if target.is_dir() and not target.is_symlink():
                continue
            with open_file(target) as opened:
                size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror or error}"
            continue
        limit = MAX_CONFIG if file.name.endswith(("config.json", ".jinja")) else MAX_TEXT
        if size > limit and file.suffix in READ:
            yield f"{file.name} has {size:,} bytes, more than the {limit:,} that are read"


def _inside(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else []


# Configs


def _configs(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.json")):
        is_config = file.name.endswith("config.json")
        if not is_config and (file.name in _VOCABULARIES or file.name.endswith(".index.json")):
            continue
        try:
            config = json_object(file)
        except ValueError as error:
            if is_config:  # other JSON files are never opened
                yield str(error)
            continue
        yield from _forbidden(file.name, config)
        if file.name in SIZED:
            yield from _beyond(file.name, config)
        if not is_config:
            continue
        if "quantization_config" in config:
            yield f"{file.name} has quantization_config: quantised weights cannot be trained; use the full ones"
        named = config.get("transformers_weights", WEIGHTS)
        if not _is_plain(named):
            yield f"{file.name} has transformers_weights {named!r}: only safetensors of this folder are read"
    if (folder / ADAPTER).exists() and (folder / "config.json").exists():
        yield f"{ADAPTER}: an adapter, in a folder that holds a whole model too; keep one of the two"


def _tokenizer(folder: Path) -> Iterator[str]:
    if not (folder / TOKENIZER).exists():
        return
    try:
        config = json_object(folder / TOKENIZER, MAX_TEXT)
    except ValueError:  # transformers says what is wrong with it, where it is needed
        return
    yield from (f"{TOKENIZER}: {problem}" for problem in growing(config))


def _forbidden(name: str, config: dict[str, Any]) -> Iterator[str]:
    for key, value in _entries(config):
        if key in CODE:
            yield (
                f"{name} has {key}: code of the model's authors, which is never run here; "
                "use a model that transformers knows itself, or remove the entry"
            )
        elif key in KERNELS and "/" in str(value):
            yield f"{name} has {key} {value!r}: code from elsewhere, never run here; remove the entry"
        elif key in ELSEWHERE:
            yield f"{name} has {key}, which would hide what is read from the look at it: remove the entry"


def _beyond(name: str, config: dict[str, Any]) -> Iterator[str]:
    """Numbers that no model has, which would be built before they are compared with the weights."""
    for key, value in _entries(config):
        limit = MAX_PARTS if _PARTS.search(key) else MAX_NUMBER
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > limit:
                yield f"{name} has a number of {len(str(abs(number)))} digits for {key[:100]}: no model has as many"
                break


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key at every depth: a model's parts have configs of their own."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _is_plain(name: Any) -> TypeGuard[str]:
    """A file of this folder in the one format that is read."""
    is_ours = isinstance(name, str) and name.endswith((".safetensors", ".safetensors.index.json"))
    return is_ours and Path(name).name == name and "\0" not in name


# Weights


def _weights(folder: Path) -> Iterator[str]:
    if (folder / ADAPTER).exists():
        yield from _adapter_weights(folder)
        return
    if not (folder / "config.json").is_file():
        yield "there is no config.json: give the folder of a whole model, as save_pretrained writes it"
    for index in sorted({INDEX, _named_weights(folder)}):  # also one that should not be read: it might be
        if index.endswith(".json") and (folder / index).is_file():
            yield from _shards(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    named = {WEIGHTS, INDEX, _named_weights(folder)}
    if files and not any((folder / name).is_file() for name in named):
        yield f"{WEIGHTS} is missing, there is only {files[0].name}: fetch or save it again"
    for file in files:
        try:
            tensors(file)
        except ValueError as error:
            yield str(error)
    if not files:
        others = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in PICKLES)
        reason = (
            f"{', '.join(others)}: convert to safetensors" if others else "no weights: model.safetensors is missing"
        )
        yield f"it holds {reason} (only safetensors are read, pickle never is)"


def _adapter_weights(folder: Path) -> Iterator[str]:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        yield f"{ADAPTER} is there, and {ADAPTER_WEIGHTS} is missing: fetch or save it again"
        return
    try:
        tensors(folder / ADAPTER_WEIGHTS)
    except ValueError as error:
        yield str(error)


def _named_weights(folder: Path) -> str:
    """Name of the weights file, which the config may give; other checks report an invalid config."""
    try:
        named = json_object(folder / "config.json").get("transformers_weights")
    except ValueError:
        return WEIGHTS
    return named if _is_plain(named) else WEIGHTS


def _shards(folder: Path, index: str) -> Iterator[str]:
    try:
        listed = json_object(folder / index, MAX_TEXT).get("weight_map")
    except ValueError as error:
        yield str(error)
        return
    if not isinstance(listed, dict) or not listed:
        yield f"{index} has no weight_map: fetch or save it again"
        return
    for name in sorted({str(name) for name in listed.values()}):
        if not _is_plain(name) or not name.endswith(".safetensors"):
            yield f"{index} names {name[:200]!r}: only safetensors of this folder are read"
        elif not (folder / name).is_file():
            yield f"{name} is missing, which {index} names: fetch or save it again"


def _header_length(first: bytes, size: int) -> int:
    if len(first) < 8:
        raise ValueError(f"it has {size} bytes, less than a header")
    if first == b"version ":
        raise ValueError("it is a Git LFS pointer, not the weights (git lfs pull fetches them)")
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER:
        raise ValueError(f"its header claims {length} bytes, more than any has")
    if length > size - 8:
        raise ValueError(f"its header claims {length} bytes, but only {size - 8} follow")
    return length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    header = dict(pairs)
    if len(header) < len(pairs):
        raise ValueError("its header names a tensor twice")
    return header


def _shapes(header: Any, room: int) -> dict[str, tuple[int, ...]]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    if len(header) > MAX_TENSORS:
        raise ValueError(f"it names {len(header):,} tensors, more than any model has")
    shapes, places = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            shapes[name], span = _tensor(name, entry)
            places.append((*span, name))
    places.sort()
    if places and (beyond := max(end for _, end, _ in places) - room) > 0:
        raise ValueError(f"its tensors go on beyond its end, {beyond} bytes are missing")
    for (_, end, name), (start, _, other) in pairwise([(0, 0, "the header"), *places]):
        if start != end:
            raise ValueError(f"{other!r} overlaps {name!r} or leaves a gap behind it")
    if left := room - (places[-1][1] if places else 0):
        raise ValueError(f"{left} bytes behind its last tensor belong to none")
    return shapes


def _tensor(name: str, entry: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Shape of a tensor, and from where to where it lies."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise ValueError(f"tensor {name!r} has no dtype")
    shape, offsets = (_counts(entry.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no shape or no place")
    if entry["dtype"] not in _BITS:
        raise ValueError(f"tensor {name!r} has dtype {entry['dtype'][:20]!r}, which is unknown here")
    start, end = offsets
    if end - start != math.prod(shape) * _BITS[entry["dtype"]] // 8:
        raise ValueError(f"tensor {name!r} of shape {shape} does not fill its {end - start} bytes")
    return tuple(shape), (start, end)


def _counts(value: Any) -> list[int] | None:
    """A list of numbers that are not negative, and nothing else."""
    fine = isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)
    return value if fine else None
