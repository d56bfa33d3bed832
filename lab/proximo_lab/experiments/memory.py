"""Memory and seconds of one training step under PPO's forms, GRPO and DAPO, beside what `proximo plan` predicts.

    python -m proximo_lab.experiments.memory --out runs/memory

Random weights of the shape of Qwen3-0.6B, 16 × 8 completions of 512 tokens after prompts of 512, two steps measured
after one to warm up. Every other completion is right; a reward model, where there is one, scores all of them. What is
measured: the peak of tensors on the GPU over all steps, and seconds by phase.
Writes memory.json and memory.md. `--shape tiny --groups 4 --group-size 4 --tokens 16 --device cpu` tries the script.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from proximo.algorithms import DAPO, GRPO, PPO, Algorithm
from proximo.models import load_tokenizer, pick_dtype, problem_tokens
from proximo.models.compiling import allow_compiling
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.models.values import OwnLayers, OwnModel, TrunkHead, ValueForm
from proximo.planning.cards import GIB, DeviceCard, card
from proximo.planning.plan import RunPlan, make_plan
from proximo.planning.published_shapes import PAD_ID, Shape, shape_of
from proximo.rl.assemble import assemble
from proximo.rl.build import build_learner
from proximo.rl.clock import Clock
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.rl.rollouts import Collector
from proximo.runs.options import CheckpointOptions
from proximo.runs.records import DataCursor
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Split
from proximo.types import Completion, Grade, Problem
from proximo_lab.bench.memory import peak_bytes, reset_peak

PHASES = ("rollout", "assemble", "update")
TOKEN_BUDGET = 16_384
"""Tokens of a pass, fixed: otherwise activations would fill whatever memory is free."""


@dataclass(frozen=True)
class Row:
    """A way to train, and whether a reward model is held for it."""

    name: str
    algorithm: Algorithm
    form: ValueForm | None = None
    judge: bool = False


FORMS = {"its own model": OwnModel(), "4 layers of its own": OwnLayers(4), "a head on the policy": TrunkHead()}
ROWS = (
    *(
        Row(f"PPO, values by {name}{', reward model' * judge}", PPO, form, judge)
        for name, form in FORMS.items()
        for judge in (True, False)
    ),
    Row("GRPO, reward model", GRPO, judge=True),
    Row("GRPO", GRPO),
    Row("DAPO", DAPO),
)


class Words:
    """Prompts of random words. Every other completion is right, so that no group is dropped and updates are equal."""

    while_sampling = False
    reward_range = (0.0, 1.0)

    def __init__(self, prompt_tokens: int, vocabulary: int, judge: "Judge | None") -> None:
        self.prompt_tokens, self.vocabulary, self.judge = prompt_tokens, vocabulary, judge

    def size(self, split: Split) -> int | None:
        return None

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        drawn = torch.randint(1, self.vocabulary, (self.prompt_tokens,), generator=_generator(index)).tolist()
        return Problem(str(index), " ".join(f"t{number}" for number in drawn), None)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        if self.judge is not None:
            self.judge.score(problems, completions)
        return [Grade(float(index % 2)) for index in range(len(completions))]

    def reference(self, problem: Problem) -> str | None:
        return None


@dataclass
class Judge:
    """A reward model that reads every completion of a step."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def score(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        asked = {problem.id: problem for problem in problems}
        places = {name: index for index, name in enumerate(asked)}
        prompts = [problem_tokens(self.tokenizer, problem) for problem in asked.values()]
        group = torch.tensor([places[problem.id] for problem in problems])
        rows = [torch.tensor(each.tokens) for each in completions]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
        size = max(1, TOKEN_BUDGET // (tokens.shape[1] + len(prompts[0])))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            completion_scores(
                self.model, prompts=prompts, tokens=tokens[part], lengths=lengths[part], group=group[part]
            )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def configured(row: Row, model: Path, judge: Path, options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        algorithm=row.algorithm,
        model=str(model),
        device=options.device,
        compile=options.compile,
        sampling=SamplingOptions(max_tokens=options.tokens),
        training=TrainingOptions(
            groups=options.groups,
            group_size=options.group_size,
            minibatches=min(4, options.groups),
            token_budget=TOKEN_BUDGET,
            refill_rounds=1,
        ),
        value=None if row.form is None else ValueOptions(row.form, learning_rate=1e-5),
        rewards=RewardMix(models=(RewardModel(str(judge), device=options.device),)) if row.judge else RewardMix(),
        evaluation=EvaluationOptions(problems=0),
        checkpoints=CheckpointOptions(every=1000),
        steps=options.steps + 1,
    )


def measured(config: RunConfig, row: Row, options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Peak bytes and mean seconds by phase of the steps after the first."""
    tokenizer, judge, device = load_tokenizer(config.model), None, options.device
    if row.judge:
        scores = load_reward_model(config.rewards.models[0].path, device=device, dtype=pick_dtype(config.dtype, device))
        allow_compiling(scores, config.compile)
        judge = Judge(scores, tokenizer)
    built = build_learner(config, config.model, device, tokenizer)
    learner, cursor = built.learner, DataCursor()
    collector = Collector(
        Words(options.tokens, vocabulary, judge),
        built.samplers.training,
        tokenizer,
        config.sampling,
        config.training,
        config.algorithm.keep,
        config.seed,
    )
    clocks, updates = [], 0
    for index in range(config.steps):
        clock = Clock()
        with _synchronized(clock, "rollout", device):
            version = built.samplers.training.refresh(learner.policy, learner.version)
            learner.start_step(version)
            collected = collector.collect(cursor, step=index, version=version)
        cursor = collected.cursor
        learner.set_learning_rate(index)
        with _synchronized(clock, "assemble", device):
            assembled = assemble(collected.groups, collected.dropped, learner, config.sampling.max_tokens)
        with _synchronized(clock, "update", device):
            updates += sum(1 for _ in learner.updates(assembled.batch))
        clocks.append(clock.seconds)
    built.samplers.close()
    assert updates, "no update was made"
    later = clocks[1:]
    seconds = {name: sum(each[name] for each in later) / len(later) for name in PHASES}
    return {"peak": peak_bytes(device), "seconds": seconds, "updates": updates}


class _synchronized:
    """A phase of a clock that ends when the GPU has."""

    def __init__(self, clock: Clock, name: str, device: str) -> None:
        self.phase, self.device = clock.phase(name), device

    def __enter__(self) -> None:
        self.phase.__enter__()

    def __exit__(self, *error: Any) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()
        self.phase.__exit__(*error)


def write_models(shape: Shape, folder: Path, device: str) -> tuple[Path, Path]:
    """A policy and a reward model with random weights, in Hugging Face's format."""
    policy, judge, dtype = folder / "policy", folder / "judge", pick_dtype("auto", device)
    shape.model(attention="sdpa", dtype=dtype, device=device).save_pretrained(policy)
    config = shape.config(num_labels=1, pad_token_id=PAD_ID, bos_token_id=None, eos_token_id=None)
    AutoModelForSequenceClassification.from_config(config, dtype=dtype).save_pretrained(judge)
    for each in (policy, judge):
        shape.tokenizer(ends=True).save_pretrained(each)
    return policy, judge


def rows(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    shape = shape_of(options.shape)
    policy, judge = write_models(shape, folder, options.device)
    _release(options.device)
    here: DeviceCard = card("auto" if options.device != "cpu" else "cpu")
    for row in (ROWS[number] for number in options.rows):
        _release(options.device)
        reset_peak(options.device)
        left, began = peak_bytes(options.device), time.perf_counter()
        config = configured(row, policy, judge, options)
        plan = make_plan(config, here, prompt_tokens=options.tokens, mean_tokens=None)
        figures = measured(config, row, options, shape.vocabulary)
        yield {"name": row.name, **predicted(plan), **figures, "left": left, "wall": time.perf_counter() - began}


def predicted(plan: RunPlan) -> dict[str, Any]:
    way = plan.full
    time_ = way.time
    return {
        "models": [f"{each.role.partition(' /')[0]}{' (trained)' * each.trained}" for each in way.components],
        "held": way.memory.held,
        "predicted_peak": way.memory.peak,
        "predicted_seconds": None if time_ is None else time_.total,
    }


def _release(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


HEADER = (
    "way", "models", "held, predicted GiB", "peak, predicted GiB", "peak, measured GiB", "difference", "rollout s",
    "assemble s", "update s", "step s", "step, predicted s",
)  # fmt: skip


def table(rows_made: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
    for row in rows_made:
        seconds, predicted_seconds = row["seconds"], row["predicted_seconds"]
        cells = [
            row["name"],
            str(len(row["models"])),
            *(f"{row[name] / GIB:.2f}" for name in ("held", "predicted_peak", "peak")),
            f"{row['peak'] / row['predicted_peak'] - 1:+.1%}",
            *(f"{seconds[name]:.2f}" for name in PHASES),
            f"{sum(seconds.values()):.2f}",
            "–" if predicted_seconds is None else f"{predicted_seconds:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="Qwen3-0.6B")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of a completion")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one to warm up")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[*range(len(ROWS))], help="rows by number, in this order"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the layers, which takes longer to start")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    measured_rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options, Path(folder)):
            measured_rows.append(row)
            peaks = f"{row['peak'] / GIB:.2f} GiB, predicted {row['predicted_peak'] / GIB:.2f}; {row['wall']:.0f} s"
            print(f"{row['name']}: {peaks}; left from before {row['left'] / GIB:.2f} GiB", flush=True)
            device = torch.cuda.get_device_name() if torch.device(options.device).type == "cuda" else "cpu"
            chosen = {name: str(value) for name, value in vars(options).items()}
            results = {"device": device, "torch": torch.__version__, "options": chosen, "rows": measured_rows}
            (options.out / "memory.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.out / "memory.md").write_text(table(measured_rows))
    print(table(measured_rows))


if __name__ == "__main__":
    main()
