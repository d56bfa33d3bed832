"""The plan compared with what a GPU really takes: `pytest tests/gpu/test_plan.py -s` prints both.

Two whole steps of each workload; peaks of the rollout and of the update are to be within a tenth of the prediction.
Seconds are printed, not bounded.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.models.adapters.lora import Lora
from proximo.planning.cards import GIB, card, this_machine
from proximo.planning.plan import RunPlan, Way, make_plan
from proximo.planning.published_shapes import LLAMA_1B, QWEN_4B, QWEN_8B, QWEN_600M, QWEN_1700M
from proximo.planning.workloads import Workload
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.samplers.sampler import SamplingOptions
from proximo_lab.bench.memory import release
from proximo_lab.bench.sides.ours import ALGORITHM, Ours
from proximo_lab.bench.timing import clock_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WORKLOADS = [
    Workload("medium", QWEN_600M, 16, 16, 512, 512, 0),
    Workload("odd", QWEN_600M, 12, 24, 300, 700, 0),
    Workload("long-prompt", QWEN_600M, 8, 16, 4096, 256, 0),
    Workload("llama-1b", LLAMA_1B, 16, 16, 200, 600, 0),
    Workload("1.7b", QWEN_1700M, 32, 8, 384, 768, 0),
    Workload("4b", QWEN_4B, 16, 16, 512, 512, 0),
]

WORKLOADS_LORA = [
    Workload("lora-0.6b", QWEN_600M, 16, 16, 512, 512, 0),
    Workload("lora-8b", QWEN_8B, 8, 16, 512, 2048, 0),
]


def planned(workload: Workload, folder: Path) -> RunPlan:
    """For the memory that is free now, and the datasheet's speeds where this GPU is an H200."""
    workload.shape.config().to_json_file(folder / "config.json")
    run = RunConfig(
        model=str(folder / "config.json"),
        algorithm=ALGORITHM,
        sampling=SamplingOptions(max_tokens=workload.longest),
        training=TrainingOptions(groups=workload.groups, group_size=workload.siblings, minibatches=1),
    )
    here = this_machine(gpu=True)
    known = card("H200") if "H200" in here.name else here
    device = replace(known, memory=here.memory, context=0.0)
    return make_plan(run, device, prompt_tokens=workload.prompt, mean_tokens=None)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_peaks_are_within_a_tenth_of_the_plan(workload: Workload, tmp_path: Path):
    release("cuda")
    plan = planned(workload, tmp_path).full
    compare(workload, plan, Ours(workload, "cuda", clock_of("cuda")))


@pytest.mark.parametrize("workload", WORKLOADS_LORA, ids=lambda each: each.name)
def test_peaks_with_an_adapter_are_within_a_tenth_of_the_plan(workload: Workload, tmp_path: Path):
    release("cuda")
    plan = planned(workload, tmp_path).lora
    ours = Ours(workload, "cuda", clock_of("cuda"))
    policy = LoraPolicy(ours.model, Lora(), base="none", seed=0)
    ours.learner = Learner(policy, ALGORITHM, ours.options.for_learner(), temperature=1.0, seed=0)
    compare(workload, plan, ours)


def compare(workload: Workload, plan: Way, ours: Ours) -> None:
    assert plan.fits
    assert plan.time is not None
    ours.step()
    seconds = ours.step()
    peaks = ours.watch.peaks
    use, time = plan.memory, plan.time
    for phase, predicted in (("rollout", use.rollout_peak), ("train", use.update_peak)):
        print(f"\n{workload.name:<12} {phase:<8} plan {predicted / GIB:6.1f} GiB, measured {peaks[phase] / GIB:6.1f}")
    print(
        f"{workload.name:<12} seconds: rollout {time.rollout.total:.2f} and {seconds['rollout']:.2f}, "
        f"update {time.update:.2f} and {seconds['train']:.2f}; {use.pass_tokens} tokens a pass, "
        f"{use.checkpointed} layers checkpointed"
    )
    assert use.rollout_peak == pytest.approx(peaks["rollout"], rel=0.1)
    assert use.update_peak == pytest.approx(peaks["train"], rel=0.1)
