"""Keys under which what a tokenizer made is kept: the tokenizer, its chat template, the texts, and the code."""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.system.version import __version__, source_fingerprint

SECONDS = 2.0
"""Seconds of work from which on its result is kept."""
PACKAGES = ("transformers", "tokenizers", "jinja2")
CHANGING = ("strftime_now", "random")
"""Words of templates that may write something else each time."""


def tokens_key(tokenizer: PreTrainedTokenizerBase, parts: Iterable[str]) -> str | None:
    """Key of the tokens of these parts; None where what they depend on is not known, or changes from day to day."""
    backend, template = getattr(tokenizer, "backend_tokenizer", None), json.dumps(tokenizer.chat_template)
    if backend is None or any(word in template for word in CHANGING):
        return None
    kind = f"{type(tokenizer).__module__} {type(tokenizer).__qualname__}"
    settings = f"{tokenizer.special_tokens_map} {tokenizer.split_special_tokens}"
    digest = hashlib.sha256()
    for part in (_code(), kind, settings, template, backend.to_str(), *parts):
        digest.update(hashlib.sha256(part.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    return " ".join([__version__, source_fingerprint(), *map(version, PACKAGES)])
