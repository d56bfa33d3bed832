"""`proximo.plan`: what a run would take on a device, before any weights."""

from dataclasses import dataclass, replace

from proximo.api.validate import refuse_kind, refuse_values
from proximo.learner.ranks import Ranks
from proximo.models import pick_device
from proximo.planning.cards import CPU, GIB, HERE, DeviceCard, card
from proximo.planning.holdings import holdings
from proximo.planning.memory import StepSize
from proximo.planning.on_ranks import ranks_use
from proximo.planning.plan import RunPlan, make_plan, planned_dtype
from proximo.planning.shapes import read_shape
from proximo.recipes.defaults import longest_prompt
from proximo.rl.config import RunConfig
from proximo.rl.preflight.estimate import MemoryEstimate
from proximo.runs.pace import duration

PROMPT_TOKENS = 512
"""Tokens of a prompt, where nothing else is said."""


def plan(
    config: RunConfig,
    gpu: str | DeviceCard = "auto",
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_tokens: int | None = None,
) -> RunPlan:
    """Predict a run's memory and time on a device, with full fine-tuning and with LoRA; what `proximo plan` does.

    No weights are loaded: of a model on the hub only its config and tokenizer files are fetched, and of a model with a
    name, such as "8B", nothing.

    config         the run; its `model` may also be a shape by name (0.6B, 1.7B, 4B, 8B, llama-1B …) or a config.json.
                   Its `adapter` is that of the LoRA side; None: rank 16 on all linear layers
    gpu            a card by name (H200, A100-40, RTX4090 …), "cpu" or "auto" for this machine, or a
                   planning.cards.DeviceCard with numbers of its own
    prompt_tokens  tokens of a prompt
    mean_tokens    tokens of an average completion; None: all reach `config.sampling.max_tokens`

    With `config.ranks` the verdicts are those of so many such GPUs.

    Example:
        config = proximo.RunConfig(model="8B", sampling=proximo.SamplingOptions(max_tokens=1024))
        plan = proximo.plan(config, "A100-40")
        print(plan.verdicts, plan.full.memory.needed, plan.lora.memory.peak)
    """
    refuse_kind("config", config, RunConfig, "a proximo.RunConfig, such as proximo.RunConfig(model='8B')")
    refuse_values(config)
    chosen = gpu if isinstance(gpu, DeviceCard) else card(gpu)
    return make_plan(config, chosen, prompt_tokens=prompt_tokens, mean_tokens=mean_tokens)


MORE_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of ranks that are tried where a run does not fit."""
PASSES = (8192, 4096, 2048, 1024, 512)
"""Tokens per pass that are tried where the usual ones do not fit."""


@dataclass(frozen=True)
class Fit:
    """Prediction whether a run fits on the device that it would use here."""

    fits: bool
    peak: int
    """Predicted bytes at the peak, or if only the weights are known, the bytes of those."""
    seconds: float | None
    """Predicted seconds of a step; None if it does not fit or cannot be predicted."""
    lines: list[str]


def fit_here(config: RunConfig, held: MemoryEstimate) -> Fit:
    """Predict with the data's longest prompt and all completions at their limit; a model that cannot be planned is
    judged by its weights and optimizer alone."""
    if not read_shape(config.model).is_packed:
        has = f"{held.bytes_held / 1e9:.1f} of {held.bytes_there / 1e9:.1f} GB before any activation"
        line = f"{'fits' if held.fits else 'does not fit'}: {has}; activations of this architecture are not predicted"
        return Fit(held.fits, held.bytes_held, None, [line])
    here, prompt = CPU if pick_device(config.device) == "cpu" else HERE, max(1, longest_prompt(config))
    if config.ranks is not None and config.ranks.processes > 1:
        return _fit_on_ranks(config, config.ranks, card(here), prompt)
    planned = plan(config, here, prompt_tokens=prompt)
    chosen, other = (planned.lora, planned.full) if config.adapter is not None else (planned.full, planned.lora)
    seconds = chosen.time and chosen.time.total
    if seconds is None:
        lines = [planned.verdicts[planned.ways.index(chosen)].partition(": ")[2]]
    else:
        peak = f"predicted peak {chosen.memory.peak / GIB:,.1f} of {chosen.memory.usable / GIB:,.1f} GiB"
        lines = [f"fits: {peak}; a step takes about {duration(seconds)} if all completions reach the limit"]
    if not chosen.fits and (budget := _smaller_passes(config, planned)) is not None:
        lines.append(f"it fits with --training.token-budget {budget}: shorter passes, for the same results")
    elif not chosen.fits and other.fits and config.adapter is None:
        lines.append(f"{other.name} fits: --adapter.type Lora")
    return Fit(chosen.fits, chosen.memory.peak, seconds, lines)


def _fit_on_ranks(config: RunConfig, ranks: Ranks, device: DeviceCard, prompt_tokens: int) -> Fit:
    """The same of each rank, of which every one has a device like this, or a share of this machine's memory."""
    full, small = holdings(config, planned_dtype(config.dtype, device), compiled=config.compile and device.is_gpu)
    holding, size = small if config.adapter is not None else full, StepSize.of(config, prompt_tokens, None)
    number, use = ranks.processes, ranks_use(holding, size, device, ranks, config.sampler)
    line, tried = use.line, [number, *(count for count in MORE_RANKS if count > number)]
    more = (
        []
        if use.fits or not device.is_gpu
        else [count for count in tried if ranks_use(holding, size, device, Ranks(count), config.sampler).fits]
    )
    if more:
        line += f"; it fits on {more[0]} with ranks.shard = 0"
    elif not use.fits and device.is_gpu and not getattr(config.sampler, "reads_weights_only", False):
        line += "; more ranks do not help, since each has a whole copy to sample with: use engines (sampler.type Fleet)"
    return Fit(use.fits, use.peak, None, [line])


def _smaller_passes(config: RunConfig, planned: RunPlan) -> int | None:
    """Tokens per pass with which a run fits on a CPU, where passes are not fitted to the memory."""
    if planned.card.is_gpu or config.training.token_budget is not None:
        return None
    for budget in PASSES:
        smaller = replace(config, training=replace(config.training, token_budget=budget))
        tried = make_plan(smaller, planned.card, prompt_tokens=planned.size.prompt_tokens, mean_tokens=None)
        if (tried.full if config.adapter is None else tried.lora).fits:
            return budget
    return None
