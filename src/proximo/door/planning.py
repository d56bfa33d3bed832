"""`proximo.plan`: what a run would take on a device, before any weights."""

from proximo.door.refusing import refuse_kind, refuse_values
from proximo.planning.cards import Card, card
from proximo.planning.plan import Plan, make_plan
from proximo.training.config import RunConfig

PROMPT_TOKENS = 512
"""Tokens of a prompt, where nothing else is said."""


def plan(
    config: RunConfig,
    gpu: str | Card = "auto",
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_tokens: int | None = None,
) -> Plan:
    """Predict a run's memory and time on a device, with full fine-tuning and with LoRA; what `proximo plan` does.

    No weights are loaded: of a model on the hub only its config and tokenizer files are fetched, and of a model with a
    name, such as "8B", nothing.

    config         the run; its `model` may also be a shape by name (0.6B, 1.7B, 4B, 8B, llama-1B …) or a config.json.
                   Its `adapter` is that of the LoRA side; None: rank 16 on all linear layers
    gpu            a card by name (H200, A100-40, RTX4090 …), "cpu" or "auto" for this machine, or a
                   planning.cards.Card with numbers of its own
    prompt_tokens  tokens of a prompt
    mean_tokens    tokens of an average completion; None: all reach `config.sampling.max_tokens`

    Example:
        config = proximo.RunConfig(model="8B", sampling=proximo.SamplingOptions(max_tokens=1024))
        plan = proximo.plan(config, "A100-40")
        print(plan.verdicts, plan.full.memory.needed, plan.lora.memory.peak)
    """
    refuse_kind("config", config, RunConfig, "a proximo.RunConfig, such as proximo.RunConfig(model='8B')")
    refuse_values(config)
    chosen = gpu if isinstance(gpu, Card) else card(gpu)
    return make_plan(config, chosen, prompt_tokens=prompt_tokens, mean_tokens=mean_tokens)
