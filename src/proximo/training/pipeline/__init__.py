"""The classic pipeline on a task whose true reward is known: fine-tuning, reward model, PPO, GRPO and DPO.

Example: result = pipeline(PIPELINE_DEMO, Path("runs/demo"), print); print(report(result))
"""

from proximo.training.pipeline.config import (
    DemonstrationOptions,
    HeldOutOptions,
    PipelineConfig,
    PreferenceOptions,
    RankingOptions,
    ReinforcementOptions,
    RewardModelOptions,
)
from proximo.training.pipeline.report import report
from proximo.training.pipeline.result import Curve, Measured, Policy, Result
from proximo.training.pipeline.stages import pipeline

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
