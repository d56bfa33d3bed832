"""A sampler behind HTTP, as a user would write it: one file that knows the package, and that the package does not know.

The engine on the other side keeps weights of its own: they are pushed before a step or an evaluation samples with them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from urllib.request import Request as Post
from urllib.request import urlopen

from safetensors.torch import save
from transformers import PreTrainedTokenizerBase

from proximo.samplers.sampler import RunSamplers, SampledPolicy, SamplingOptions, Stream
from proximo.types import Completion, Request


@dataclass(frozen=True)
class HttpSampler:
    """An engine at an address."""

    url: str
    repeats: bool = False
    """Whether the engine gives equal completions for equal requests."""
    copies: ClassVar[int] = 0

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        if record_routes:
            raise ValueError(f"sampler.url is {self.url}, which records no routes: use routing_replay = old_policy")
        engine = HttpEngine(self.url, self.repeats)
        return RunSamplers(engine, engine)


class HttpEngine:
    def __init__(self, url: str, repeats: bool) -> None:
        self._url, self.repeats = url, repeats
        self._version: int | None = None

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        if version != self._version:
            weights = {name: weight.cpu().contiguous() for name, weight in policy.weights()}
            with self._post("weights", save(weights)) as answer:
                answer.read()  # to its end: the engine has the weights then, and not before
            self._version = version
        return version

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        asked = {"requests": [asdict(each) for each in requests], "options": asdict(options), "seed": seed}
        with self._post("sample", json.dumps(asked | {"step": step, "version": version}).encode()) as lines:
            for line in lines:
                number, siblings = json.loads(line)
                yield number, tuple(_completion(each) for each in siblings)

    def _post(self, path: str, body: bytes):
        return urlopen(Post(f"{self._url}/{path}", body), timeout=60)


def _completion(facts: dict[str, Any]) -> Completion:
    lists: dict[str, Any] = {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
    return Completion(**facts | lists)
