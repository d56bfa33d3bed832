"""Proximo trains language models by reinforcement learning; each algorithm is one value.

loss, stats = proximo.policy_loss(proximo.DAPO, logprobs=..., old_logprobs=..., advantages=..., mask=..., group=...)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from proximo.version import __version__

if TYPE_CHECKING:
    from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm, UnusualChoice
    from proximo.maths.crediting import advantages
    from proximo.maths.objective import policy_loss
    from proximo.types import Stats

__all__ = [
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "SAPO",
    "Algorithm",
    "Stats",
    "UnusualChoice",
    "__version__",
    "advantages",
    "policy_loss",
]

_ELSEWHERE = {
    "Stats": "proximo.types",
    "advantages": "proximo.maths.crediting",
    "policy_loss": "proximo.maths.objective",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first asked for: torch takes seconds, and help needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ELSEWHERE.get(name, "proximo.algorithms")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
