"""Rankings from rollouts: a hand-made run whose answer is known, and what a real run leaves behind."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import GRPO
from proximo.cli import main
from proximo.data import DataFile, Mistakes, read_rankings
from proximo.models import tiny_tokenizer
from proximo.models.tokens.spelling import Spelling
from proximo.rl.assemble import to_batch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.log import RunLog
from proximo.runs.rollouts import rollout_table
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.encoding import prepare
from proximo.supervised.pairs import Counts, PairsConfig, write_pairs
from proximo.tasks import File
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests.rows import read_rows, write_rows

CHAT = [{"role": "user", "content": "größer?"}]


def row(group: int, text: str, outcome: float, *, reward: float | None = None, truncated=False, messages=None) -> dict:
    return {
        "group": group,
        "prompt": f"prompt {group}",
        "messages": None if messages is None else json.dumps(messages),
        "text": text,
        "outcome": outcome,
        "reward": outcome if reward is None else reward,
        "truncated": truncated,
    }


STEPS = {
    3: [
        # Two levels, the rows in disorder: the first right one against the first wrong one.
        row(0, "wrong", 0.0, reward=0.5),
        row(1, "same", 1.0, messages=CHAT),
        row(0, "right", 1.0, reward=0.2),
        row(0, "right too", 1.0, reward=0.2),
        row(0, "wrong too", 0.0, reward=0.1),
        # One level once the truncated and the unscored are gone.
        row(1, "cut", 0.0, truncated=True, messages=CHAT),
        row(1, "who knows", math.nan, messages=CHAT),
    ],
    11: [
        # Three levels; the first text of the lowest has been said better before.
        row(0, "best", 1.0, messages=CHAT),
        row(0, "middle", 0.5, messages=CHAT),
        row(0, "best", 0.0, messages=CHAT),
        row(0, "worst", 0.0, messages=CHAT),
        row(0, "  ", -1.0, messages=CHAT),
        # Two levels of one text are no preference.
        row(7, "twice", 0.0),
        row(7, "twice", 1.0),
    ],
}


def hand_made(folder: Path) -> str:
    (folder / "rollouts").mkdir(parents=True)
    for step, rows in STEPS.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / f"step-{step:06d}.parquet")
    return str(folder)


def test_rankings_of_a_hand_made_run(tmp_path):
    out = tmp_path / "new" / "pairs.jsonl"
    counts = write_pairs(PairsConfig(hand_made(tmp_path / "run"), str(out)))
    assert read_rows(out) == [
        {"prompt": "prompt 0", "chosen": "right", "rejected": "wrong"},
        {"prompt": CHAT, "ranking": ["best", "middle", "worst"]},
    ]
    assert "größer?" in out.read_text(encoding="utf-8")
    assert counts == Counts(groups=4, fresh=2, one_level=2, truncated=1, unscored=1, empty=1)
    mistakes = Mistakes()
    rankings = read_rankings(str(out), mistakes)
    assert not mistakes
    assert [ranking.completions for ranking in rankings] == [("right", "wrong"), ("best", "middle", "worst")]
    assert rankings[1].prompt == tuple(CHAT)


def test_the_reward_may_rank_otherwise_than_the_outcome(tmp_path):
    out = tmp_path / "pairs.jsonl"
    write_pairs(PairsConfig(hand_made(tmp_path / "run"), str(out), steps=":4", by="reward"))
    assert read_rows(out) == [{"prompt": "prompt 0", "ranking": ["wrong", "right", "wrong too"]}]


@pytest.mark.parametrize(("steps", "groups"), [("3:11", 2), ("4:", 2), (":12", 4), (":", 4), ("11:12", 2)])
def test_steps_are_half_open(tmp_path, steps: str, groups: int):
    config = PairsConfig(hand_made(tmp_path / "run"), str(tmp_path / "pairs.jsonl"), steps=steps)
    assert write_pairs(config).groups == groups


# Old rows


def wide_run(folder: Path, groups: int) -> str:
    (folder / "rollouts").mkdir(parents=True)
    rows = [
        row(number, f"{number} {word}", outcome)
        for number in range(groups)
        for word, outcome in (("y", 1.0), ("n", 0.0))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / "step-000000.parquet")
    return str(folder)


def old_pairs(path: Path, count: int) -> str:
    rows = [{"prompt": f"old {n}", "chosen": "a", "rejected": "b", "margin": n / 2} for n in range(count)]
    write_rows(path, rows)
    return str(path)


@pytest.mark.parametrize(("share", "old"), [(0.1, 5), (0.5, 45), (0.0, 0), (0.25, 15)])
def test_the_share_of_old_rows_is_exact_and_the_seed_repeats(tmp_path, share: float, old: int):
    run, earlier = wide_run(tmp_path / "run", 45), old_pairs(tmp_path / "old.jsonl", 60)

    def rows(name: str, seed: int) -> list[dict]:
        config = PairsConfig(run, str(tmp_path / name), old=earlier, old_share=share, seed=seed)
        counts = write_pairs(config)
        assert (counts.fresh, counts.old, counts.old_missing) == (45, old, 0)
        return read_rows(tmp_path / name)

    first = rows("first.jsonl", 1)
    assert len(first) == 45 + old
    assert old / len(first) == share
    drawn = [each for each in first if each["prompt"].startswith("old")]
    assert len({each["prompt"] for each in drawn}) == old
    assert all(each["margin"] == int(each["prompt"].split()[1]) / 2 for each in drawn)
    assert rows("again.jsonl", 1) == first
    assert (rows("other.jsonl", 2) == first) is (old == 0)


def test_too_few_old_rows_are_all_taken_and_said(tmp_path, capsys):
    run, earlier = wide_run(tmp_path / "run", 45), old_pairs(tmp_path / "old.jsonl", 3)
    assert main(["pairs", run, "--out", str(tmp_path / "pairs.jsonl"), "--old", earlier]) == 0
    said = capsys.readouterr().out
    assert "45 rankings from 45 groups; 0 had completions of one level only" in said
    assert f"3 old rankings from {earlier}, 2 fewer than wanted: it has no more" in said
    assert main(["pairs", run, "--out", str(tmp_path / "more.jsonl"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["fresh"], facts["old"], facts["truncated"]) == (45, 0, 0)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}"], "pairs needs --out"),
        (["--out", "x.jsonl"], "pairs needs the folder of a run"),
        (["{run}", "--out", "x.csv"], "out is 'x.csv': give a name that ends with .jsonl"),
        (["{run}", "--out", "{taken}"], "the file exists"),
        (["nowhere", "--out", "x.jsonl"], "run is 'nowhere': it has no rollouts"),
        (["{run}", "--out", "x.jsonl", "--steps", "5"], "steps is '5': give A:B"),
        (["{run}", "--out", "x.jsonl", "--steps", "5:9"], "has steps 3 to 11, none of them in this range"),
        (["{run}", "--out", "x.jsonl", "--old", "none.jsonl"], "old is 'none.jsonl': there is no such file"),
        (["{run}", "--out", "x.jsonl", "--old", "{taken}"], "taken.jsonl:1: chosen and rejected are equal"),
        (["{run}", "--out", "x.jsonl", "--old-share", "1.0"], "old_share is 1.0"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, arguments: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    run, taken = hand_made(tmp_path / "run"), tmp_path / "taken.jsonl"
    taken.write_text('{"prompt": "p", "chosen": "a", "rejected": "a"}\n')
    with pytest.raises(SystemExit) as stopped:
        main(["pairs", *(each.format(run=run, taken=taken) for each in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def test_nothing_to_rank_and_old_formats_are_refused(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row(0, "a", 1.0), row(0, "b", 1.0)]), folder / "step-000000.parquet")
    config = PairsConfig(str(tmp_path / "run"), str(tmp_path / "x.jsonl"))
    with pytest.raises(
        ValueError, match=r"none of its 1 groups has completions of different task scores.*left out: \d truncated, "
    ):
        write_pairs(config)
    pq.write_table(pa.table({"group": [0], "text": ["a"]}), folder / "step-000000.parquet")
    with pytest.raises(ValueError, match="has no column messages, outcome, prompt, truncated"):
        write_pairs(config)


# What a run writes


def test_rollouts_keep_problem_conversation_text_and_parts(tmp_path):
    tokenizer = tiny_tokenizer()
    prompt = tuple(tokenizer.encode("user: größer?\nassistant: "))
    said = Completion((10, 11, 1), (-0.1, -0.2, -0.3), "56", "stop")
    cut = Completion((12,), (-0.5,), "7", "length")
    groups = [
        Group(
            Problem("chat-1", tuple(CHAT), "56"),
            prompt,
            (Rollout(said, Grade(1.0, {"task": 1.0, "style": 0.25})), Rollout(cut, Grade(0.0, {"task": 0.0}))),
        ),
        Group(Problem("text-1", "größer", None), (20, 21), (Rollout(said, Grade(0.5)),)),
    ]
    log = RunLog(tmp_path)
    batch = to_batch(groups)
    # Rows leave and change places; what belongs to them goes with them.
    everyone = torch.arange(3)
    log.rollouts(0, rollout_table(batch.rows(everyone.flip(0)), Spelling(tokenizer), trained=everyone, kept_groups=2))
    table = pq.read_table(tmp_path / "rollouts" / "step-000000.parquet")
    rows = table.to_pylist(maps_as_pydicts="strict")
    assert [each["problem"] for each in rows] == ["text-1", "chat-1", "chat-1"]
    assert [each["text"] for each in rows] == ["56", "7", "56"]
    assert [each["parts"] for each in rows] == [{}, {"task": 0.0}, {"task": 1.0, "style": 0.25}]
    assert rows[0]["messages"] is None
    assert rows[0]["prompt"] == "größer"  # as it was given, not as this tokenizer would spell it
    assert json.loads(rows[1]["messages"]) == CHAT
    assert rows[1]["prompt"].startswith("user: gr")
    assert table.schema.field("messages").type == pa.string()


@pytest.mark.usefixtures("ordinary_precision")
def test_pairs_of_a_real_run(tmp_path):
    config = RunConfig(
        algorithm=GRPO,
        task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=5),
        sampling=SamplingOptions(max_tokens=8),
        training=TrainingOptions(groups=8, group_size=8, minibatches=1),
        evaluation=EvaluationOptions(problems=2),
        steps=2,
    )
    train(Run(config, tmp_path / "run", ProgressLines()))
    counts = write_pairs(PairsConfig(str(tmp_path / "run"), str(tmp_path / "pairs.jsonl")))
    rows = read_rows(tmp_path / "pairs.jsonl")
    assert counts.groups == 16
    assert len(rows) == counts.fresh > 4
    for each in rows:
        first, second = each["prompt"].removesuffix("=").split("+")
        assert int(each["chosen"]) == int(first) + int(second)
        assert each["rejected"] != each["chosen"]


def test_rankings_of_a_run_on_a_file_have_held_out_rows(tmp_path):
    """A run trains on what its file's hash does not hold out, which the same hash would not hold out here either."""
    rows = (json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(60))
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    task = File(str(tmp_path / "sums.jsonl"))
    asked = [task.problem(index, "train", 0).prompt for index in range(task.size("train"))]
    stored = [
        row(number, text, outcome) | {"prompt": prompt}
        for number, prompt in enumerate(asked)
        for text, outcome in (("1", 1.0), ("0", 0.0))
    ]
    run, out = tmp_path / "run", str(tmp_path / "pairs.jsonl")
    (run / "rollouts").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(stored), run / "rollouts" / "step-000001.parquet")
    write_pairs(PairsConfig(str(run), out))
    prepared = prepare(DataFile(out), read_rankings, tiny_tokenizer())
    assert len(prepared.held_out) == round(0.1 * len(asked))
    assert prepared.counts == (
        f"{len(asked) - len(prepared.held_out)} to train on, {len(prepared.held_out)} held out (by a second hash, as "
        "the first, by which runs hold out prompts, chooses none of these)"
    )
    [again] = File(out, answer_columns=("chosen",)).remarks  # and so are a run's on rows of which none is held out
    assert again.startswith(f"{out}: {len(prepared.held_out)} rows held out by a second hash")
