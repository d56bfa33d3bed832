"""The fleet of a run, from its options."""

import copy
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from proximo.models.context_length import reach_of
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.routing import needed_routers, router_layers
from proximo.models.stop_tokens import end_tokens
from proximo.processes.server import Starts, start_here
from proximo.samplers.engines.adapters import base_weights, pushed_rank
from proximo.samplers.engines.command import WITH_ADAPTERS, WITH_ROUTES, Command, server_arguments
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.engine import Engine
from proximo.samplers.engines.fleet import FleetSampler
from proximo.samplers.engines.sync import Folder, Gloo, Transport, WeightSync, write_weights
from proximo.samplers.engines.vllm import VllmEngine
from proximo.samplers.sampler import SampledPolicy
from proximo.system.scratch import Scratch

SAY_ROUTES = ("cuda",)
"""Devices on which a vLLM server can say which experts tokens went to."""


class FleetOptions(Protocol):
    """Options of a fleet, as a `Fleet` has them."""

    @property
    def engine(self) -> Literal["vllm", "embedded"]: ...

    @property
    def engines(self) -> int: ...

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def urls(self) -> tuple[str, ...]: ...

    @property
    def sync(self) -> Transport: ...

    @property
    def probe(self) -> int: ...

    @property
    def deadline(self) -> float: ...

    @property
    def kv_cache_mb(self) -> int | None: ...

    @property
    def python(self) -> str: ...

    @property
    def cluster(self) -> Literal["local", "ray"]: ...

    @property
    def address(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]: ...


def build_fleet(
    options: FleetOptions,
    policy: SampledPolicy,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slots: int,
    record_routes: bool = False,
) -> FleetSampler:
    """Build a fleet. Nothing is started yet: that happens when the first weights are pushed."""
    if record_routes:
        needed_routers(policy.model, 'routing_replay is "sampler"')
    layers = router_layers(policy.model) if record_routes else []
    scratch = Scratch("proximo-fleet-")
    try:
        adapter_rank = pushed_rank(policy.model) if options.sync == "adapter" else 0
        embedded = options.engine == "embedded"
        make = (
            _embedded(policy, tokenizer, record_routes)
            if embedded
            else _vllm(options, policy, tokenizer, slots, scratch.path, adapter_rank, layers)
        )
        return FleetSampler(
            policy.model,
            tokenizer,
            make,
            make_sync(options.sync, scratch.path, policy.model),
            scratch,
            engines=len(options.urls) or options.engines,
            slots=slots,
            probe=options.probe,
            deadline=options.deadline,
            repeats=options.engine == "embedded",
            record_routes=record_routes,
        )
    except BaseException:  # a full disk or a signal, too, while a model is written there
        scratch.remove()
        raise


def _embedded(
    policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, record_routes: bool
) -> Callable[[str, int], Engine]:
    return lambda name, slot: EmbeddedEngine(name, policy.model, tokenizer, record_routes=record_routes)


def _vllm(
    options: FleetOptions,
    policy: SampledPolicy,
    tokenizer: PreTrainedTokenizerBase,
    slots: int,
    scratch: Path,
    adapter_rank: int,
    layers: Sequence[int],
) -> Callable[[str, int], Engine]:
    ends = end_tokens(policy.model, tokenizer)
    if options.urls:
        return lambda name, slot: VllmEngine(name, ends, url=options.urls[slot], layers=layers)
    if layers and policy.device.type not in SAY_ROUTES:
        raise ValueError(
            'routing_replay is "sampler", but vLLM says which experts tokens went to on GPUs only: use "old_policy", '
            'or sampler.engine = "embedded"'
        )
    python = options.python or sys.executable
    if shutil.which(python) is None:
        raise ValueError(f"sampler.python is {python}, which cannot be executed: name a Python that has vLLM")
    if python == sys.executable and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            'sampler.engine is "vllm", which this Python lacks: pip install "proximo[vllm]", or name a Python that has '
            "it in sampler.python"
        )
    starts = start_here if options.cluster == "local" else _on_ray(options)
    folder = scratch / "model"
    folder.mkdir()
    write_model(folder, policy, tokenizer, only_base=adapter_rank > 0)
    places = _places(options, policy)
    reach = reach_of(policy.model.config)

    def make(name: str, slot: int) -> Engine:
        arguments = server_arguments(
            str(folder),
            dtype=str(policy.model.dtype).removeprefix("torch."),
            length=None if reach is None else reach.tokens,
            slots=slots,
            sync=options.sync,
            tensor_parallel=options.tensor_parallel,
            adapter_rank=adapter_rank,
            returns_routes=bool(layers),
        )
        if options.kv_cache_mb is not None:
            arguments += ["--kv-cache-memory-bytes", str(options.kv_cache_mb << 20)]
        environment = places[slot] | (WITH_ADAPTERS if adapter_rank else {}) | (WITH_ROUTES if layers else {})
        command = Command(python, [*arguments, *options.arguments], environment, starts)
        return VllmEngine(name, ends, command=command, layers=layers)

    return make


def _on_ray(options: FleetOptions) -> Starts:
    from proximo.processes.cluster import OnRay

    return OnRay("sampler", options.address, options.tensor_parallel)


def write_model(
    folder: Path, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, only_base: bool = False
) -> None:
    """A checkpoint of the policy for servers to start from; `only_base`: without its adapter."""
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]
    config.dtype = policy.model.dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_weights(folder, base_weights(policy.model) if only_base else policy.weights())


def _places(options: FleetOptions, policy: SampledPolicy) -> list[dict[str, str]]:
    """The environment of each engine: threads on a CPU, or GPUs besides the learner's; Ray shows each its own."""
    device = policy.device
    if device.type == "cpu":
        threads = str(torch.get_num_threads())
        return [{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}] * options.engines
    if options.cluster == "ray":
        return [{}] * options.engines
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    # Each rank of this machine has the GPU of its number; of a group that nobody counts, all may be here.
    counts = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"))
    ranks = next((int(each) for each in counts if each is not None and each.isdecimal()), 1)
    taken = {device.index or 0} if ranks == 1 else {*range(ranks)}
    others = [each for number, each in enumerate(visible.split(",")) if number not in taken]
    size, needed = options.tensor_parallel, options.engines * options.tensor_parallel
    if not others and needed == 1 and options.kv_cache_mb is not None:
        return [{"CUDA_VISIBLE_DEVICES": visible}]  # learner and engine share the only GPU
    if len(others) < needed:
        raise ValueError(
            f"sampler.engines {options.engines} × sampler.tensor_parallel {size} needs {needed} GPUs besides the "
            f"learner's, and there are {len(others)}: use fewer"
            + (", or one engine with kv_cache_mb on the only GPU" if ranks == 1 else ", or fewer ranks")
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(others[size * n : size * (n + 1)])} for n in range(options.engines)]


def make_sync(transport: Transport, scratch: Path, model: PreTrainedModel) -> WeightSync:
    """`scratch` is a folder that engines can read; `model` is the policy's, whose adapter may be pushed."""
    if transport == "adapter":
        from proximo.samplers.engines.adapters import AdapterFolder

        return AdapterFolder(scratch, model)
    if transport == "nccl":
        from proximo.samplers.engines.nccl import Nccl

        return Nccl()
    return Folder(scratch) if transport == "folder" else Gloo()
