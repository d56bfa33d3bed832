"""The sampler of a config whose completions come from engines. Light: every config knows this file."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.processes.child import NodePlaces
from proximo.samplers.sampler import RunSamplers, SampledPolicy

REFUSED = {
    "min_tokens": "it hides the end of sequence from the distribution",
    "presence_penalty": "it changes the distribution",
    "frequency_penalty": "it changes the distribution",
    "repetition_penalty": "it changes the distribution",
    "logit_bias": "it changes the distribution",
    "bad_words": "it changes the distribution",
    "logits-processors": "they change the distribution",
    "logprobs-mode": "log-probs must be those of the distribution that tokens are drawn from",
    "weight-transfer-config": "sampler.sync says how weights arrive",
    "load-format": "engines start with the policy's weights",
    "enable-lora": 'sampler.sync = "adapter" starts engines with it',
    "lora-modules": "the run loads its own adapter",
}
"""Arguments of vLLM with which the log-probs that it returns are not the policy's, or weights do not arrive."""


@dataclass(frozen=True)
class Fleet:
    """Engines with weights of their own sample; after every update they get the policy's, and a probe compares their
    log-probs with the learner's.

    Example: Fleet(engines=2, tensor_parallel=2, sync="gloo")
    """

    engine: Literal["vllm", "embedded"] = "vllm"
    """Kind of engine. `vllm`: vLLM servers, which the run starts and ends, or those of `urls`. `embedded`: copies of
    the model in this process, slow and exact, to try a fleet without servers."""
    engines: int = 1
    """Number of engines to start. Ignored with `urls`."""
    tensor_parallel: int = 1
    """GPUs of each engine that the run starts."""
    urls: tuple[str, ...] = ()
    """Addresses of vLLM servers that are already running, such as http://node7:8000. Empty: the run starts its own."""
    sync: Literal["folder", "gloo", "nccl", "adapter"] = "folder"
    """Way of weights to engines. `folder`: safetensors in the folder for temporary files (TMPDIR), which all engines
    must be able to read. `gloo`: over TCP. `nccl`: between GPUs, not tested. `adapter`: the LoRA adapter alone, through
    the same folder; engines keep the base model."""
    probe: int = 64
    """Tokens per engine whose log-probs are compared with the policy's after every push."""
    deadline: float = 600.0
    """Seconds after which an engine that starts, takes weights or owes a token counts as dead."""
    kv_cache_mb: int | None = None
    """Size of each engine's KV cache in MB. None: vLLM decides."""
    python: str = ""
    """Python with vLLM to start servers with. Empty: the Python of this process."""
    cluster: Literal["local", "ray"] = "local"
    """Place where servers start. `local`: on this machine. `ray`: spread over the nodes of a Ray cluster, which all see
    the folder for temporary files (TMPDIR) and have the same Python; one that is lost starts again where there is
    room."""
    address: str = "auto"
    """Address of the Ray cluster, such as 10.0.0.1:6379; `ray` only. auto: the one that this machine belongs to."""
    arguments: tuple[str, ...] = ()
    """Further arguments for servers that the run starts, such as "--enforce-eager"."""

    def __post_init__(self) -> None:
        for name in ("engines", "tensor_parallel", "probe"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}: give at least 1")
        if not self.deadline > 0:
            raise ValueError(f"sampler.deadline is {self.deadline}: give a positive number of seconds")
        if self.kv_cache_mb is not None and self.kv_cache_mb < 1:
            raise ValueError(f"sampler.kv_cache_mb is {self.kv_cache_mb}: give at least 1, or None")
        for url in self.urls:
            if not _is_address(url):
                raise ValueError(f"sampler.urls has {url!r}: give addresses such as http://node7:8000")
        given = " ".join(self.arguments).replace("_", "-")
        for name, reason in REFUSED.items():
            if name.replace("_", "-") in given:
                raise ValueError(f"sampler.arguments has {name}, which is refused: {reason}; leave it out")
        if self.cluster == "local" and self.address != "auto":
            raise ValueError(
                f'sampler.address is {self.address!r}, but sampler.cluster is "local": use "ray", or leave it out'
            )
        if self.cluster == "ray" and (self.urls or self.engine == "embedded"):
            raise ValueError('sampler.cluster is "ray", which starts servers: use engine = "vllm" and leave out urls')
        if self.engine == "embedded" and (self.urls or self.sync in ("nccl", "adapter")):
            raise ValueError('sampler.engine is "embedded": leave out urls, and use sync = "folder" or "gloo"')

    @property
    def copies(self) -> int:
        return self.engines if self.engine == "embedded" else 0

    def check(self) -> list[str]:
        """Remarks on servers of `urls` that do not answer yet, and on vLLM where it is missing; ValueError where a
        server cannot be used, or Ray is needed and not there."""
        if self.cluster == "ray":
            from proximo.processes.cluster import need_ray

            need_ray("sampler")
        if not self.urls:
            return self._missing()
        from proximo.samplers.engines.engine import EngineLost
        from proximo.samplers.engines.vllm import VllmEngine

        remarks: list[str] = []
        for url in self.urls:
            try:
                VllmEngine("sampler.urls: the server", frozenset(), url=url).check_version()
            except EngineLost as lost:
                remarks.append(f"{url} in sampler.urls does not answer yet; the run waits {self.deadline:g} s ({lost})")
        return remarks

    def _missing(self) -> list[str]:
        """A remark if servers would be started with this Python, and it has no vLLM."""
        if self.engine != "vllm" or self.python or self.cluster == "ray" or find_spec("vllm") is not None:
            return []
        return [
            "sampler: vLLM is not installed in this Python, and engines cannot start without it: install vllm, or name "
            "a Python that has it (--sampler.python)"
        ]

    @property
    def reads_weights_only(self) -> bool:
        """True if nothing of this process decodes with the policy's module, so that ranks need no copy of it on their
        devices."""
        return self.engine == "vllm"

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        from proximo.samplers.engines.building import build_fleet

        fleet = build_fleet(self, policy, tokenizer, slots=slots, record_routes=record_routes)
        return RunSamplers(
            fleet,
            fleet,
            close=fleet.close,
            take_events=fleet.take_events,
            take_intervals=fleet.lanes.take,
            drop=fleet.drop,
            begun=fleet.begun,
        )


@dataclass(frozen=True)
class Workers:
    """Processes of reward functions and environments on the nodes of a cluster, which all see the same files and have
    the same Python."""

    processes: int = 1
    """Number of processes that compute at the same time, each with a core of its own. Functions that wait, for a server
    or a disk, get more than that, up to their own `at_once`."""
    cluster: Literal["ray"] = "ray"
    """Kind of the cluster. Ray places the processes and notices losses; no data passes through it."""
    address: str = "auto"
    """Address of the Ray cluster, such as 10.0.0.1:6379. auto: the one that this machine belongs to."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"workers.processes is {self.processes}: give at least 1, or leave workers out")

    def open(self) -> NodePlaces:
        """Join the cluster. ValueError where Ray is not installed, or no cluster answers."""
        from proximo.processes.cluster import Nodes, OnRay

        return Nodes(OnRay("workers", self.address, gpus=0), self.processes)


def _is_address(url: str) -> bool:
    """A server's, without a path: requests go to paths of their own."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
        )
    except ValueError:  # a port that is none
        return False
