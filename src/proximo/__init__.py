"""Proximo trains language models by reinforcement learning; each algorithm is one value.

loss, stats = proximo.policy_loss(proximo.DAPO, logprobs=..., old_logprobs=..., advantages=..., mask=..., group=...)
"""

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm, UnusualChoice
from proximo.maths.credit import advantages
from proximo.maths.objective import policy_loss
from proximo.types import Stats

__all__ = ["DAPO", "GRPO", "GSPO", "PPO", "SAPO", "Algorithm", "Stats", "UnusualChoice", "advantages", "policy_loss"]
