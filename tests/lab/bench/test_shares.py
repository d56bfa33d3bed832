"""Shares of the limit and of the arithmetic, by hand; rows of sizes and lengths that nothing was tuned for."""

from dataclasses import replace

import pytest

from proximo.models.adapters.lora import Lora
from proximo.planning.published_shapes import QWEN_8B, QWEN_600M
from proximo.planning.roofline import H200, arithmetic_share, limit_share
from proximo.planning.workloads import LLAMA, ODD, QWEN_1700, UNTUNED, Ends, Workload
from proximo_lab.bench.options import BenchOptions
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.tables import rollout, step, train
from tests.lab.bench.test_bench import SMALLEST, Ticks, alone

TWO = Workload("two", QWEN_600M, 1, 2, 100, Ends(4, 12), 1)
BODY, HEAD = 440_401_920, 155_582_464
ADAPTED = replace(SMALLEST, name="adapted", adapter=Lora(rank=2))


def test_the_share_of_the_arithmetic_counts_unique_tokens_and_attention():
    # One prompt of 100 tokens and completions of 10 and 30: 140 tokens in the layers, 40 in the head. Pairs of a query
    # and a key: 100² / 2 in the prompt, 10 · 100 + 10² / 2 and 30 · 100 + 30² / 2 in the completions.
    pairs = 5_000 + 1_050 + 3_450
    operations = 6 * BODY * 140 + 6 * HEAD * 40 + 12 * 28 * 2048 * pairs
    assert arithmetic_share(TWO, H200, [([10, 30], 0.5)]) == pytest.approx(operations / (0.5 * 790e12))


def test_the_share_of_the_arithmetic_is_that_of_the_middle_turn():
    turns = [([10, 30], 1.0), ([10, 30], 2.0), ([10, 30], 4.0)]
    assert arithmetic_share(TWO, H200, turns) == arithmetic_share(TWO, H200, turns[1:2])


def test_frozen_weights_have_no_gradient_of_their_own():
    adapted = replace(TWO, shape=QWEN_8B, adapter=Lora())
    pairs = 5_000 + 1_050 + 3_450
    operations = 4 * 6_945_767_424 * 140 + 4 * 622_329_856 * 40 + 12 * 36 * 4096 * pairs
    assert arithmetic_share(adapted, H200, [([10, 30], 0.5)]) == pytest.approx(operations / (0.5 * 790e12))


def test_the_share_of_the_limit_is_of_the_lengths_that_occurred():
    # 258 launches of 3 µs bound every step: their bytes take 0.28 ms. Three tokens are two steps after the prefill.
    prefill = (2 * BODY * 100 + 2 * 28 * 2048 * 100 * 100) / 790e12
    assert limit_share(TWO, H200, [([3, 2], 0.01)]) == pytest.approx((prefill + 2 * 258 * 3e-6) / 0.01)
    assert limit_share(TWO, H200, [([5, 2], 0.01)]) == pytest.approx((prefill + 4 * 258 * 3e-6) / 0.01)


def test_a_steps_shares_are_of_the_lengths_of_each_turn(monkeypatch):
    drawn = iter([([12, 1, 1, 1], 9.0, 9.0), ([2, 2, 2, 2], 0.1, 0.2), ([3, 3, 3, 3], 0.1, 0.2)])

    def stepped(self):
        lengths, rolled, trained = next(drawn)
        self.drawn.append(lengths)
        return {"rollout": rolled, "train": trained, "step": rolled + trained}

    ending = replace(SMALLEST, completion=Ends(4, 12))
    monkeypatch.setattr(Ours, "step", stepped)
    session = replace(alone(), known=replace(H200, arithmetic=1e10))
    rolled, trained, whole = step.Beside(ending).run(session)
    machine, lengths = session.machine, ([2] * 4, [3] * 4)
    share = limit_share(ending, machine, [(each, 0.1) for each in lengths])
    use = arithmetic_share(ending, machine, [(each, 0.2) for each in lengths])
    assert (rolled.figures["of the limit"], trained.figures["of the arithmetic"]) == (f"{share:.0%}", f"{use:.0%}")
    assert use > 0.01
    assert not {"of the limit", "of the arithmetic"} & set(whole.figures)


def test_rows_that_nothing_was_tuned_for_are_in_every_table_of_times():
    names = {workload.name for workload in UNTUNED} | {"ends-1000", "ends-2000"}
    for table in (rollout, train, step):
        assert names <= {line.name for line in table.GPU}
    required = {line.workload.name: line.use for line in train.GPU if isinstance(line, train.Beside) and line.use}
    assert {
        name: required[name] for name in ("odd", "llama-1b", "qwen-1.7b", "medium-4b", "ends-1000", "ends-2000")
    } == {
        "odd": 0.50,
        "llama-1b": 0.58,
        "qwen-1.7b": 0.58,
        "medium-4b": 0.65,
        "ends-1000": 0.50,
        "ends-2000": 0.50,
    }
    assert [(each.groups, each.siblings, each.prompt, each.completion) for each in (ODD, LLAMA, QWEN_1700)] == [
        (12, 24, 300, 700),
        (16, 16, 200, 600),
        (32, 8, 384, 768),
    ]
    assert {each.shape.head_width for each in UNTUNED} == {64, 96, 128, 256}


def test_an_adapter_is_sampled_and_trained_alone():
    side = Ours(ADAPTED, "cpu", Ticks())
    before = {name: weight.detach().clone() for name, weight in side.model.named_parameters()}
    assert side.step() == {"rollout": 1.0, "train": 1.0, "step": 2.0}
    changed = {name for name, weight in side.model.named_parameters() if not weight.equal(before[name])}
    assert changed
    assert all("lora" in name for name in changed)


def test_an_adapters_row_has_no_peer():
    session = replace(alone(), options=BenchOptions(steps=1, warmup=0, peers=("best",)))
    [row] = train.Beside(ADAPTED).run(session)
    assert row.note == "ours alone: peers are measured without adapters"
    assert row.details["workload"]["adapter"]["rank"] == 2
