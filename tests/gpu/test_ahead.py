"""Sampling ahead on a GPU, on a stream of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.rl.config import AheadOptions, EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_the_metrics_are_those_of_a_sampler_that_lags(tmp_path: Path, ordinary_precision):
    settings = RunConfig(
        algorithm=GRPO,
        device="cuda",
        sampling=SamplingOptions(max_tokens=8),
        training=TrainingOptions(groups=8, group_size=8, minibatches=2, learning_rate=1e-4, token_budget=16384),
        evaluation=EvaluationOptions(problems=32, every=2),
        steps=6,
    )
    train(Run(replace(settings, sampler=Mismatched(lag=1)), tmp_path / "lag", ProgressLines()))
    train(Run(replace(settings, ahead=AheadOptions(1)), tmp_path / "ahead", ProgressLines()))
    assert (tmp_path / "ahead/metrics.jsonl").read_bytes() == (tmp_path / "lag/metrics.jsonl").read_bytes()
