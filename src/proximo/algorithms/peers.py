"""What TRL 1.16 and verl 0.9 call the same knob, and where their defaults differ from ours.

Read in their released sources; `make parity` runs many of them against ours.
"""

from dataclasses import dataclass

from proximo.losses.pieces.advantages import (
    BatchScaled,
    BestAgainstWorst,
    BetaNormalized,
    GroupCentred,
    GroupNormalized,
    Imitation,
    LeaveOneOut,
    LiveScaled,
)
from proximo.losses.pieces.corrections import (
    GeometricRejection,
    IcePop,
    SequenceMasked,
    SequenceTruncated,
    TokenTruncated,
)
from proximo.losses.pieces.credit import (
    Gae,
    ProcessNormalized,
    ReturnToGo,
    SequenceWhitened,
    SignScaled,
    TeacherKl,
    TokenWhitened,
)
from proximo.losses.pieces.divergences import KlLoss
from proximo.losses.pieces.extras import EntropyBonus, PositiveNll, RouterBalance, ValueLoss
from proximo.losses.pieces.filters import KeepAll, KeepCorrect, KeepMixed
from proximo.losses.pieces.gates import CappedScore, Clip, GammaScore, GeometricClip, Reinforce, SoftGate, Unclipped
from proximo.losses.pieces.ratios import (
    CurrentPolicy,
    NoRatio,
    OldPolicy,
    SamplerPolicy,
    SequenceProductRatio,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from proximo.losses.pieces.selection import ClipCovariance, KlCovariance, OffPolicyMask, TopEntropy
from proximo.losses.pieces.shaping import KlReward, LinearOverlong, SoftOverlong
from proximo.losses.pieces.traits import Traits
from proximo.losses.pieces.weights import ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean


@dataclass(frozen=True)
class Peers:
    trl: str
    verl: str


PEERS: dict[type, Peers] = {
    SoftOverlong: Peers(
        "reward function get_soft_overlong_punishment(max_completion_len, soft_punish_cache), capped too; u is 1",
        "reward manager dapo, overlong_buffer.{len, penalty_factor}; not capped beyond the limit, u is 1",
    ),
    LinearOverlong: Peers("none", "none"),
    KlReward: Peers("none in GRPOTrainer; RLOOTrainer's beta", "use_kl_in_reward False, kl_penalty kl, kl_coef 0.001"),
    KeepAll: Peers("the default; mask_truncated_completions False", "the default; no mask for truncated completions"),
    KeepMixed: Peers(
        "none: dead groups stay, in the denominator too",
        "filter_groups.{enable False, metric}: drops std == 0, refills with new prompts",
    ),
    KeepCorrect: Peers("none on the loop; filter a dataset for SFTTrainer", "none on the loop"),
    GroupNormalized: Peers('scale_rewards "group": ddof 1, epsilon 1e-4', "adv_estimator grpo: ddof 1, epsilon 1e-6; a group of one gets its raw reward"),
    GroupCentred: Peers('scale_rewards "none"', "norm_adv_by_std_in_grpo False (default True)"),
    LeaveOneOut: Peers("RLOOTrainer", "adv_estimator rloo: a group of one gets its raw reward"),
    BatchScaled: Peers('scale_rewards "batch": epsilon 1e-4', "none"),
    LiveScaled: Peers("none", "adv_estimator gpg: rows / rows with non-zero reward, another quantity"),
    BetaNormalized: Peers('none: loss_type "bnpo" is a token mean per micro-batch, unrelated', "none"),
    Imitation: Peers("none on the loop; SFTTrainer on the kept completions", "none on the loop"),
    BestAgainstWorst: Peers("experimental OnlineDPOTrainer: beta 0.1, two completions and a judge or reward", "none"),
    TeacherKl: Peers("none; GKDTrainer and GOLDTrainer minimise a divergence over the whole vocabulary", "distillation: other losses over the teacher's top tokens"),
    ReturnToGo: Peers("none", "adv_estimator reinforce_plus_plus (always whitened)"),
    Gae: Peers("none: PPOTrainer was removed", "adv_estimator gae: gamma 1, lam 1.0 where PPO has 0.95"),
    ProcessNormalized: Peers("none", "none"),
    TokenWhitened: Peers("none", "built into gae and reinforce_plus_plus*: unbiased, 1e-8, as here"),
    SequenceWhitened: Peers("RLOOTrainer's normalize_advantages: epsilon 1e-4 on the std", "none"),
    SignScaled: Peers("none", "none"),
    OldPolicy: Peers("recomputed when steps_per_generation or num_iterations make it differ", "recomputed before every update"),
    SamplerPolicy: Peers("none", "rollout_correction.bypass_mode False"),
    CurrentPolicy: Peers("implied by one update per batch", "loss_mode gpg"),
    NoRatio: Peers("none", "loss_mode gpg"),
    TokenRatio: Peers('importance_sampling_level "token"', "one for each token in every loss_mode but gspo"),
    SequenceRatio: Peers('importance_sampling_level "sequence" (default "token")', "loss_mode gspo, in its sequence_token form"),
    SequenceTokenRatio: Peers("none", "loss_mode gspo"),
    SequenceProductRatio: Peers('RLOOTrainer; loss_type "vespo"', "none"),
    Clip: Peers("epsilon 0.2, epsilon_high None (= epsilon), delta None", "clip_ratio_low 0.2, clip_ratio_high 0.2; with loss_mode vanilla also clip_ratio_c 3.0: a dual clip is on by default"),
    SoftGate: Peers('loss_type "sapo", sapo_temperature_pos 1.0, sapo_temperature_neg 1.05', "loss_mode sapo, actor.tau_pos 1.0, actor.tau_neg 1.05"),
    Unclipped: Peers("none", "loss_mode kl_cov"),
    GeometricClip: Peers("experimental GMPO trainer", "loss_mode geo_mean: a plain mean per micro-batch"),
    Reinforce: Peers("none", "loss_mode gpg"),
    CappedScore: Peers('loss_type "cispo": epsilon_high is the cap itself, 1 + our high', "loss_mode cispo: two-sided, 0.2 and 0.2 by default"),
    GammaScore: Peers('loss_type "vespo", vespo_{k,lambda}_{pos,neg}', "none"),
    ClipCovariance: Peers("none", "loss_mode clip_cov, clip_cov_ratio 2e-4, clip_cov_{lb,ub} 1 and 5"),
    KlCovariance: Peers("none", "loss_mode kl_cov, kl_cov_ratio 2e-4, ppo_kl_coef 0.1"),
    TopEntropy: Peers("top_entropy_quantile 1.0 (off)", "none"),
    OffPolicyMask: Peers("off_policy_mask_threshold None", "none"),
    TokenTruncated: Peers('vllm_importance_sampling_mode "token_truncate"', "rollout_correction.rollout_is token, threshold 2.0"),
    SequenceTruncated: Peers('vllm_importance_sampling_mode "sequence_truncate"', "rollout_correction.rollout_is sequence, threshold 2.0"),
    SequenceMasked: Peers('vllm_importance_sampling_mode "sequence_mask", on by default with vLLM: at most 3, no lower bound', "rollout_correction.rollout_rs seq_sum_k1; rejected tokens leave the denominator"),
    IcePop: Peers('vllm_importance_sampling_mode "token_mask"', "rollout_correction.rollout_rs token_k1; rejected tokens leave the denominator"),
    GeometricRejection: Peers("none", "rollout_correction.rollout_rs seq_mean_k1; rejected tokens leave the denominator"),
    KlLoss: Peers("beta 0.0; use_bias_correction_kl True, which is UnbiasedK3", "use_kl_loss False, kl_loss_coef 0.001, kl_loss_type low_var_kl (K3 within ±10)"),
    TokenMean: Peers('loss_type "dapo", the default', "loss_agg_mode token-mean, the default"),
    SequenceMean: Peers('loss_type "grpo" or "sapo" (default "dapo")', "loss_agg_mode seq-mean-token-mean (default token-mean)"),
    PromptMean: Peers("none", "none"),
    SequenceSum: Peers('loss_type "luspo"', "loss_agg_mode seq-mean-token-sum"),
    ConstantLength: Peers('loss_type "dr_grpo", L = max_completion_length; the std stays unless scale_rewards is "none"', "loss_agg_mode seq-mean-token-sum-norm, L = loss_scale_factor or the padded width"),
    ValueLoss: Peers("none: PPOTrainer was removed", "critic.cliprange_value 0.5"),
    EntropyBonus: Peers("entropy_coef 0.0", "entropy_coeff 0"),
    PositiveNll: Peers("none", "none"),
    RouterBalance: Peers("router_aux_loss_coef None: the model's own, so on for a mixture; prompts count too, per micro-batch", "off for Qwen3-MoE on Megatron (load balancing none); none on FSDP"),
}  # fmt: skip


@dataclass(frozen=True)
class OwnPeers(Traits):
    """What a piece from outside says of its peers."""

    peers: tuple[str, str] = ("not given", "not given")
    """What TRL and verl call it."""


def peers_of(piece: object) -> Peers:
    return PEERS.get(type(piece)) or Peers(*OwnPeers.read(piece).peers)


_POOLED_CLIP = Peers(
    "epsilon 0.2 unless set, epsilon_high None (= epsilon), delta None: GSPO's widths must be given",
    "clip_ratio_low 0.2, clip_ratio_high 0.2 unless set; no dual clip: clip_ratio_c is not read",
)
COMBINED: dict[tuple[type, type], Peers] = {
    (Clip, SequenceRatio): _POOLED_CLIP,
    (Clip, SequenceTokenRatio): _POOLED_CLIP,
}
"""A gate on a ratio with which the peers treat it otherwise: one loss of theirs holds both."""

UNUSED: dict[str, Peers] = {
    "shape": Peers("no shaping; a penalty is one more reward function", "no shaping by default"),
    "select": Peers(
        "off_policy_mask_threshold None, top_entropy_quantile 1.0", "none, unless loss_mode is clip_cov or kl_cov"
    ),
    "correct": Peers("vllm_importance_sampling_correction True with vLLM", "rollout_correction.rollout_is null"),
    "kl": Peers("beta 0.0", "use_kl_loss False"),
    "extra": Peers("entropy_coef 0.0", "entropy_coeff 0"),
}
"""The same for a stage that the algorithm leaves empty."""
