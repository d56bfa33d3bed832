"""Stages of tiny models for tests on ranks: the same work in one process and in shards.

`python -m tests.distributed.stage_cases FOLDER` runs all stages in a process of a group, whole and interrupted.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from proximo.data import DataFile
from proximo.distributed.mesh import Mesh
from proximo.distributed.rank0 import OnRanks, StageConfig, without_data
from proximo.distributed.rank_group import Crew
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.supervised.dpo import DpoConfig, dpo
from proximo.supervised.reward_model import RewardModelConfig, train_reward_model
from proximo.supervised.schedule import FitOptions
from proximo.supervised.sft import SftConfig, sft
from proximo.supervised.stage_model import HoldsStages
from tests.supervised.test_encoding import chatml

FIT = FitOptions(batch=5, learning_rate=1e-3, epochs=2.0, token_budget=40, save_every=1, warmup_steps=0)
"""Batches that are dealt unevenly, and several micro-batches in each."""
STAGES: dict[type, Callable] = {SftConfig: sft, DpoConfig: dpo, RewardModelConfig: train_reward_model}


class Halted(Exception):
    """The run was interrupted."""


def configs(folder: Path) -> dict[str, StageConfig]:
    examples = [{"prompt": f"{7 * number}+1=", "completion": str(7 * number + 1)} for number in range(16)]
    rankings = [
        {"prompt": f"{7 * number}+1=", "chosen": str(7 * number + 1), "rejected": "9" * (1 + number % 4)}
        for number in range(16)
    ]
    chats = [{"messages": _turns(number)} for number in range(16)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("examples", examples), ("rankings", rankings), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, data = str(folder / "model"), DataFile(str(folder / "rankings.jsonl"), held_out=0.3)
    tiny_model(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=24).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    speaker, tokenizer = tiny_model(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=24), chatml()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the new embeddings
        speaker.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for each in (speaker, tokenizer):
        each.save_pretrained(folder / "speaker")
    return {
        "sft": SftConfig(DataFile(str(folder / "examples.jsonl"), held_out=0.3), model, fit=FIT),
        "dpo": DpoConfig(data, model, fit=FIT),
        "lora": DpoConfig(data, model, adapter=Lora(rank=4), fit=FIT),
        "reward": RewardModelConfig(data, model, fit=FIT),
        "chats": SftConfig(DataFile(str(folder / "chats.jsonl"), held_out=0.3), str(folder / "speaker"), fit=FIT),
    }


def _turns(number: int) -> list[dict[str, str]]:
    """A conversation of one to four replies: one row, of which only the replies are trained."""
    sums = [(f"{number}+{turn}?", str((number + turn) * 10 ** (turn % 3))) for turn in range(1 + number % 4)]
    return [
        {"role": role, "content": text} for pair in sums for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def run(config: StageConfig, folder: Path, ranks: HoldsStages | None = None, *, halt: str | None = None) -> None:
    """One attempt at a stage; `halt`: it is interrupted once a line begins so."""

    def say(line: str) -> None:
        if halt is not None and line.startswith(halt):
            raise Halted

    STAGES[type(config)](config, folder, say, None, ranks)


def conduct(config: StageConfig, folder: Path, mesh: Mesh, *, halt: str | None = None) -> None:
    """One attempt on all ranks of a mesh; those above 0 follow."""
    crew = Crew(mesh)
    ranks = OnRanks(crew)
    if mesh.rank:
        ranks.follow_stage(without_data(config, ranks))
        return
    try:
        run(config, folder, ranks, halt=halt)
    finally:
        crew.dismiss()


def interrupted(config: StageConfig, folder: Path, mesh: Mesh) -> None:
    """The same, stopped after the third of six steps and resumed."""
    with suppress(Halted):
        conduct(config, folder, mesh, halt="held-out after step 3")
    conduct(config, folder, mesh)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = configs(folder / "data" / os.environ["RANK"])  # in a group only rank 0 would save the model
    mesh = Mesh.join(device="cpu", timeout=60.0)
    for name, config in cases.items():
        conduct(config, folder / name / "ranks", mesh)
        interrupted(config, folder / name / "resumed", mesh)
        with suppress(Halted):
            conduct(config, folder / name / "alone", mesh, halt="held-out after step 3")
        if mesh.rank == 0:  # the resume point of two ranks, read by one process
            run(config, folder / name / "alone")
    mesh.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
