"""The trial of a whole file: gate, keep, extra, task and sampler of a user's own, by the command line alone."""

import json
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.rl import train as training

MINE = '''
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from proximo.samplers.embedded import Embedded
from proximo.types import Grade, Problem


@dataclass(frozen=True)
class Wall:
    """Blocks tokens that have moved further than `far`, in either direction."""

    far: float = 0.02
    formula: ClassVar[str] = "wall(r)·A"

    def __call__(self, log_ratio, logprobs, advantages, mask):
        return -log_ratio.clamp(-self.far, self.far).exp() * advantages

    def through(self, log_ratio, advantages):
        return (log_ratio.abs() <= self.far).to(log_ratio.dtype)


@dataclass(frozen=True)
class KeepUnsolved:
    """Drops groups that are nearly solved, and completions far from their group's mean outcome."""

    solved: float = 0.9
    far: float = 0.8
    refills: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __call__(self, outcome, group):
        count = torch.bincount(group).to(outcome)
        mean = (torch.zeros_like(count).index_add(0, group, outcome) / count)[group]
        return (mean <= self.solved) & ((outcome - mean).abs() <= self.far)


@dataclass(frozen=True)
class Spring:
    """coefficient · (log π − log π_old)²."""

    coefficient: float = 0.5

    def term(self, rows):
        return self.coefficient * (rows.logprobs - rows.old_logprobs).square()


@dataclass(frozen=True)
class Doubling:
    """`7+7=`: the double of a number; partial credit for the first digit."""

    largest: int = 60
    while_sampling = True
    reward_range = (0.0, 1.0)

    def size(self, split):
        return self.largest // 2

    def problem(self, index, split, seed):
        number = 2 * (index % self.size(split)) + (split == "held_out")
        return Problem(f"double-{number}", f"{number}+{number}=", str(2 * number))

    def grade(self, problems, completions):
        return [Grade(self.score(p.answer, c.text.strip())) for p, c in zip(problems, completions, strict=True)]

    def score(self, answer, text):
        return 1.0 if text == answer else 0.25 * (text[:1] == answer[:1])

    def reference(self, problem):
        return problem.answer


@dataclass(frozen=True)
class Shifted:
    """The sampler of this process, with random numbers of its own."""

    shift: int = 1000
    copies: ClassVar[int] = 0

    def build(self, policy, tokenizer, *, slots, record_routes):
        built = Embedded().build(policy, tokenizer, slots=slots, record_routes=record_routes)
        return replace(built, training=ShiftedSampler(built.training, self.shift))


class ShiftedSampler:
    def __init__(self, inner, shift):
        self._inner, self._shift, self.repeats = inner, shift, inner.repeats

    def refresh(self, policy, version):
        return self._inner.refresh(policy, version)

    def stream(self, requests, options, *, seed, step, version=0):
        return self._inner.stream(requests, options, seed=seed + self._shift, step=step, version=version)
'''
PIECES = ["--gate.type", "mine.py:Wall", "--keep.type", "mine.py:KeepUnsolved", "--extra.type", "mine.py:Spring"]
FLAGS = [
    *(f"--algorithm.{each.removeprefix('--')}" if each.startswith("--") else each for each in PIECES),
    *(
        "--model",
        "tiny-arithmetic",
        "--task.type",
        "mine.py:Doubling",
        "--sampler.type",
        "mine.py:Shifted",
        "--sampling.max-tokens",
        "5",
    ),
    *("--training.groups", "6", "--training.group-size", "6", "--training.minibatches", "3"),
    *("--training.learning-rate", "3e-4", "--training.warmup-steps", "0"),
    *("--evaluation.problems", "4", "--evaluation.every", "2", "--checkpoints.every", "2", "--steps", "5"),
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def kept(folder: Path) -> dict[str, bytes]:
    """The files of a run that a resume must give again, byte for byte."""
    files = [folder / "metrics.jsonl", folder / "ledger.jsonl", *folder.glob("rollouts/*.parquet")]
    files += folder.glob("checkpoints/step-000005/**/*.safetensors")
    assert len(files) > 2 + 5 + 1
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def die_before(index: int, monkeypatch) -> None:
    """The run breaks off before this step, counted from 0, and saves nothing on its way out."""
    whole = training.train_step

    def until(run, step, cursor):
        if step == index:
            raise RuntimeError("killed")
        return whole(run, step, cursor)

    monkeypatch.setattr(training, "train_step", until)


@pytest.mark.slow("trains and resumes a run")
def test_a_file_of_ones_own_trains_resumes_explains_and_is_replayed(here, capsys):
    assert main(["train", *FLAGS, "--run", "whole"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        die_before(3, patch)
        with pytest.raises(RuntimeError, match="killed"):
            main(["train", *FLAGS, "--run", "parts"])
    assert main(["train", *FLAGS, "--run", "parts"]) == 0
    attempts = json.loads((here / "parts" / "run.json").read_text())["attempts"]
    assert [(each["from"], each["ended"]) for each in attempts] == [
        (None, "failed: killed"),
        ("step-000002", "finished"),
    ]
    assert kept(here / "parts") == kept(here / "whole")

    # Each of the five did something.
    rows = [json.loads(line) for line in (here / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy_loss" in row]
    assert max(row["blocked"] for row in steps) > 0.01
    assert max(row["rounds"] for row in steps) > 1
    assert min(row["extra_loss"] for row in steps) > 1e-6
    ledger = (here / "whole" / "ledger.jsonl").read_text()
    assert '"problem": "double-2", ' in ledger
    assert '"state": "filtered"' in ledger
    assert main(["train", *FLAGS, "--sampler.shift", "0", "--steps", "1", "--run", "shifted"]) == 0
    first = Path("rollouts/step-000001.parquet")
    assert (here / "shifted" / first).read_bytes() != (here / "whole" / first).read_bytes()

    capsys.readouterr()
    assert main(["explain", "grpo", *PIECES]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "J(θ) = (1/B) Σ_i (1/|y_i|) Σ_t [ wall(r)·A − 0.04 · KL ] − Spring (formula not given)" in shown
    for words in (
        "from mine.py:Wall what Blocks tokens",
        "from mine.py:KeepUnsolved what Drops",
        "from mine.py:Spring",
    ):
        assert words in shown, words

    away = []
    for row in steps:
        assert main(["replay", "whole", "--step", str(row["step"]), "--as", "grpo", "--json"]) == 0
        own, grpo = json.loads(capsys.readouterr().out)["algorithms"]
        assert own["is_own"]
        assert abs(own["policy_loss"] - row["policy_loss"]) < 1e-6
        away.append(abs(grpo["policy_loss"] - row["policy_loss"]))
    assert max(away) > 1e-3
