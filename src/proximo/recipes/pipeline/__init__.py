"""The classic pipeline on a task whose true reward is known: fine-tuning, reward model, PPO, GRPO and DPO.

Example: result = pipeline(PIPELINE_DEMO, Path("runs/demo"), print); print(report(result))
"""

from proximo.recipes.pipeline.config import (
    DemonstrationOptions,
    HeldOutOptions,
    PipelineConfig,
    PreferenceOptions,
    RankingOptions,
    ReinforcementOptions,
    RewardModelOptions,
)
from proximo.recipes.pipeline.report import report
from proximo.recipes.pipeline.result import Curve, Measured, Policy, Result
from proximo.recipes.pipeline.stages import pipeline

__all__ = [
    "Curve",
    "DemonstrationOptions",
    "HeldOutOptions",
    "Measured",
    "PipelineConfig",
    "Policy",
    "PreferenceOptions",
    "RankingOptions",
    "ReinforcementOptions",
    "Result",
    "RewardModelOptions",
    "pipeline",
    "report",
]
