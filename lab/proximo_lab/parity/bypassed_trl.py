# pyright: reportMissingImports=false
"""TRL's trainers without training: their own methods, called on tensors that we give.

A trainer is made without its `__init__`; what a method reads from `self` comes from TRL's own config
object, so that its defaults are TRL's, and from the few stand-ins below. The log-probs that a model
would compute are the batch's.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from proximo_lab.parity.batches import Batch, group_size
from proximo_lab.parity.measure import Measured

CONFIGS = {
    GRPOTrainer: GRPOConfig,
    GMPOTrainer: GMPOConfig,
    RLOOTrainer: RLOOConfig,
    DPOTrainer: DPOConfig,
    RewardTrainer: RewardConfig,
}


class OneProcess:
    """An accelerator with nobody to talk to."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor

    def pad_across_processes(self, tensor: Tensor, dim: int, pad_index: float) -> Tensor:
        return tensor


def bypassed(kind: type, **settings: Any) -> Any:
    """A trainer of this kind that never ran `__init__`; unknown attributes are looked up in its config."""
    trainer: Any = object.__new__(type(kind.__name__, (kind,), {"__getattr__": _from_config}))
    trainer.args = CONFIGS[kind](output_dir="unused", use_cpu=True, bf16=False, **settings)
    trainer.accelerator = OneProcess()
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.ref_model = SimpleNamespace()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.aux_loss_enabled = False
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    if hasattr(trainer.args, "epsilon"):
        trainer.epsilon_low = trainer.args.epsilon
        trainer.epsilon_high = trainer.args.epsilon if trainer.args.epsilon_high is None else trainer.args.epsilon_high
    trainer._entropy_bonus_enabled = getattr(trainer.args, "entropy_coef", 0.0) != 0.0
    return trainer


def _from_config(trainer: Any, name: str) -> Any:
    if name == "args":
        raise AttributeError(name)
    return getattr(trainer.args, name)


def loss(trainer: Any, batch: Batch, tokens: int | None = None, **more: Tensor) -> Tensor:
    """`_compute_loss` of a GRPO, GMPO or RLOO trainer; `tokens` are those of the generation batch."""
    rows = len(batch.mask)
    one_each = torch.ones(rows, 1, dtype=torch.long)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logprobs, batch.entropy, None)
    inputs = {
        "prompt_ids": one_each,
        "prompt_mask": one_each,
        "completion_ids": torch.ones(batch.mask.shape, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": row_advantages(batch),
        "old_per_token_logps": batch.old_logprobs,
        "old_logps": (batch.old_logprobs * batch.mask).sum(dim=1),
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": torch.tensor(tokens or batch.tokens),
    }
    return trainer._compute_loss(None, inputs | more)


def row_advantages(batch: Batch) -> Tensor:
    """One per row, NaN (unscored) as TRL has it: 0."""
    return torch.where(batch.mask, batch.advantages, 0.0).nan_to_num().sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)


def grpo(**settings: Any) -> Measured:
    """The loss of a GRPO trainer with these settings, all rows in one call."""
    trainer = bypassed(GRPOTrainer, **settings)
    return lambda batch: loss(trainer, batch)


def corrected(**settings: Any) -> Measured:
    """The same with the sampler's mismatch corrected, as TRL does when vLLM samples."""
    trainer = bypassed(GRPOTrainer, use_vllm=True, **settings)

    def corrected_loss(batch: Batch) -> Tensor:
        made = scored(trainer, batch)
        ratio, sampler = made["importance_sampling_ratio"], made["sampling_per_token_logps"]
        return loss(trainer, batch, importance_sampling_ratio=ratio, sampling_per_token_logps=sampler)

    return corrected_loss


def in_micro_batches(**settings: Any) -> Measured:
    """Two micro-batches of one optimizer step, added up as the trainer would."""
    trainer = bypassed(GRPOTrainer, gradient_accumulation_steps=2, **settings)
    return lambda batch: torch.stack([loss(trainer, half, tokens=batch.tokens) for half in batch.halves()]).sum()


def scored(trainer: Any, batch: Batch) -> dict[str, Tensor]:
    """Run `_generate_and_score_completions` on given completions, log-probs and rewards."""
    rows, width = batch.mask.shape
    old, ref = batch.old_logprobs * batch.mask, batch.ref_logprobs * batch.mask
    prompts, completions = [[1]] * rows, [[1] * width] * rows
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer.num_generations = group_size(batch)
    trainer.reward_weights, trainer.reward_func_names = torch.ones(1), ["reward"]
    trainer.eos_token_ids, trainer._tokenizer = [1], SimpleNamespace(pad_token_id=0)
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._calculate_rewards = lambda *_: batch.rewards.unsqueeze(1).clone()
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        ref if model is trainer.ref_model else old,
        None,
        None,
    )
    made = (prompts, completions, batch.mask.int().tolist(), completions, batch.rollout_logprobs.tolist())
    is_rloo = isinstance(trainer, RLOOTrainer)
    trainer._generate = lambda _: (prompts, completions, completions) if is_rloo else (*made, {}, None, None)
    return trainer._generate_and_score_completions([{"prompt": "?"} for _ in range(rows)])


def advantages(kind: type, **settings: Any) -> Measured:
    """Advantages of each row, spread over its sampled tokens."""
    trainer = bypassed(kind, **settings)
    return lambda batch: scored(trainer, batch)["advantages"].unsqueeze(1) * batch.mask


def moved(batch: Batch) -> Tensor:
    """log π − log π_ref of each completion."""
    return ((batch.logprobs - batch.ref_logprobs) * batch.mask).sum(dim=1)


def preference(loss_type: str, **settings: Any) -> Measured:
    """DPO's loss on pairs: the first half of the rows chosen, the second rejected."""
    trainer = bypassed(DPOTrainer, **settings)
    trainer.loss_types, trainer.loss_weights, trainer.precompute_ref_logps = [loss_type], [1.0], True

    def paired(batch: Batch) -> Tensor:
        nothing = torch.zeros_like(batch.mask)
        outputs = SimpleNamespace(
            log_probs=batch.logprobs * batch.mask, entropy=batch.entropy, mean_logits=batch.entropy, is_top1=nothing
        )
        reference = (batch.ref_logprobs * batch.mask).sum(dim=1).chunk(2)
        # One prompt token goes before each completion.
        completion_mask = torch.cat([nothing[:, :1], batch.mask], dim=1).long()
        inputs = {
            "input_ids": torch.ones_like(completion_mask),
            "attention_mask": torch.ones_like(completion_mask),
            "completion_mask": completion_mask,
            "ref_chosen_logps": reference[0],
            "ref_rejected_logps": reference[1],
        }
        return trainer._compute_loss(lambda **_: outputs, inputs, False)

    return paired


def ranking(**settings: Any) -> Measured:
    """The reward model's loss on pairs, each row's first number its score."""
    trainer = bypassed(RewardTrainer, **settings)

    def ranked(batch: Batch) -> Tensor:
        outputs = SimpleNamespace(logits=batch.logprobs[:, :1])
        margin = batch.values[: len(batch.mask) // 2, 0]
        return trainer.compute_loss(lambda **_: outputs, {"attention_mask": batch.mask.long(), "margin": margin})

    return ranked
