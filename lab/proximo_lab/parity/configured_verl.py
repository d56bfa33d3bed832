# pyright: reportMissingImports=false
"""verl's functions with a config of verl's own making, so that its defaults are verl's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.utils.losses import sft_loss

from proximo_lab.parity.batches import Batch, sparse_rewards
from proximo_lab.parity.measure import Measured

NO_DUAL_CLIP = 1e9
"""verl's dual clip cannot be switched off, only moved out of reach."""


def actor(policy_loss: dict[str, Any] | None = None, **settings: Any) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=8,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **settings,
    )


def loss(
    mode: str,
    batch: Batch,
    config: ActorConfig,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """A registered policy loss, aggregated as its config says."""
    return core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch.old_logprobs,
        log_prob=batch.logprobs,
        advantages=batch.advantages,
        response_mask=batch.mask.double() if mask is None else mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )[0]


def policy(mode: str = "vanilla", policy_loss: dict[str, Any] | None = None, **settings: Any) -> Measured:
    """The policy loss with these settings, the dual clip out of reach unless one is given."""
    config = actor(policy_loss, **{"clip_ratio_c": NO_DUAL_CLIP, **settings})
    return lambda batch: loss(mode, batch, config)


def with_kl(kind: str, coefficient: float, **settings: Any) -> Measured:
    """The policy loss plus the KL loss, added as verl's actor adds them."""
    config = actor(clip_ratio_c=NO_DUAL_CLIP, **settings)

    def total(batch: Batch) -> Tensor:
        divergence = core_algos.kl_penalty(batch.logprobs, batch.ref_logprobs, kind)
        return loss("vanilla", batch, config) + coefficient * core_algos.agg_loss(
            divergence, batch.mask.double(), config.loss_agg_mode
        )

    return total


def in_micro_batches(mode: str, policy_loss: dict[str, Any] | None = None, **settings: Any) -> Measured:
    """Two micro-batches told the step's sizes, their losses added as verl's engine adds them."""

    def added(batch: Batch) -> Tensor:
        sizes = {"batch_num_tokens": batch.tokens, "global_batch_size": len(batch.mask)}
        config = actor(policy_loss, clip_ratio_c=NO_DUAL_CLIP, global_batch_info=sizes, **settings)
        return torch.stack([loss(mode, half, config) for half in batch.halves()]).sum()

    return added


def corrected(level: str, threshold: float | str, **settings: Any) -> Measured:
    """The policy loss with verl's own weights against the sampler's mismatch."""
    config = actor(clip_ratio_c=NO_DUAL_CLIP, **settings)

    def total(batch: Batch) -> Tensor:
        log_ratio = batch.old_logprobs - batch.rollout_logprobs
        weights, _ = compute_rollout_correction_weights(log_ratio, batch.mask.double(), level, threshold)
        return loss("vanilla", batch, config, weights=weights)

    return total


def rejected(bounds: str, keep_denominator: bool, **settings: Any) -> Measured:
    """The policy loss after verl rejected rows by the geometric mean of their mismatch."""

    def total(batch: Batch) -> Tensor:
        log_ratio = batch.old_logprobs - batch.rollout_logprobs
        mask, _ = compute_rollout_rejection_mask(log_ratio, batch.mask.double(), "seq_mean_k1", bounds)
        sizes = {"batch_num_tokens": batch.tokens if keep_denominator else mask.sum().clamp(min=1)}
        config = actor(clip_ratio_c=NO_DUAL_CLIP, global_batch_info=sizes, **settings)
        return loss("vanilla", batch, config, mask=mask)

    return total


def estimator(name: str, kl: float = 0.0, **settings: Any) -> Measured:
    """A registered advantage estimator on the batch's rewards, KL in the reward if asked for; 0 off the mask."""
    return lambda batch: estimated(name, batch, kl, **settings)[0] * batch.mask


def estimated(name: str, batch: Batch, kl: float = 0.0, **settings: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns."""
    mask = batch.mask.double()
    rewards = core_algos.compute_rewards(
        sparse_rewards(batch), batch.old_logprobs * mask, batch.ref_logprobs * mask, kl
    )
    inputs: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask} | settings
    if name == "gae":
        inputs["values"] = batch.values
    else:
        inputs["index"] = np.array([str(label) for label in batch.group.tolist()])
    return core_algos.get_adv_estimator_fn(name)(**inputs)


def overlong(limit: int, cache: int) -> Measured:
    """The DAPO reward manager's length penalty on rows whose score is 0."""
    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "answer", eos_token="<eos>"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=limit,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=cache, penalty_factor=1.0, log=False),
    )

    def penalties(batch: Batch) -> Tensor:
        rows, width = batch.mask.shape
        contiguous = torch.arange(width).expand(rows, width) < batch.mask.sum(dim=1, keepdim=True)
        one_each = torch.ones(rows, 1, dtype=torch.long)
        data = DataProto.from_dict(
            tensors={
                "prompts": one_each,
                "responses": torch.ones(rows, width, dtype=torch.long),
                "attention_mask": torch.cat([one_each, contiguous.long()], dim=1),
            },
            non_tensors={
                "reward_model": np.array([{"ground_truth": ""}] * rows, dtype=object),
                "data_source": np.array(["any"] * rows, dtype=object),
            },
        )
        return manager(data).sum(dim=1).double()

    return penalties


def supervised(batch: Batch) -> Tensor:
    data = {"dp_size": 1, "batch_num_tokens": batch.tokens, "response_mask": batch.mask, "pad_mode": "left_right"}
    return sft_loss(actor(), {"log_probs": batch.logprobs}, data)[0]
