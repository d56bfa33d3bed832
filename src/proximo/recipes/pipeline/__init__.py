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
from proximo.recipes.pipeline.result import Measured, PipelineResult, PolicyResult, RewardCurve
from proximo.recipes.pipeline.stages import pipeline

__all__ = [
    "DemonstrationOptions",
    "HeldOutOptions",
    "Measured",
    "PipelineConfig",
    "PipelineResult",
    "PolicyResult",
    "PreferenceOptions",
    "RankingOptions",
    "ReinforcementOptions",
    "RewardCurve",
    "RewardModelOptions",
    "pipeline",
    "report",
]
