"""The benchmarks measure what they say, and report nothing where the sides compute different things."""

import json
import math
import mmap
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from proximo.models.stop_tokens import end_tokens
from proximo.planning.published_shapes import QWEN_4B, QWEN_600M, SMOLLM_135M, TINY
from proximo.planning.roofline import H200, decode_seconds, decode_step, prefill_seconds, training
from proximo.planning.workloads import C_TINY, MEDIUM, TAIL, Tail, Workload
from proximo_lab.bench.memory import peak_bytes, reset_peak, used_bytes
from proximo_lab.bench.options import BenchOptions, parsed
from proximo_lab.bench.report import Row, Verdict, aligned, rendered, save, short
from proximo_lab.bench.running import main, measured
from proximo_lab.bench.session import Session, Turn
from proximo_lab.bench.sides import trl
from proximo_lab.bench.sides.ablations import PaddedPasses, training_without
from proximo_lab.bench.sides.numerics import Agreement, Learned, our_update
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.sides.trl import Settings, Trl
from proximo_lab.bench.sides.turns import Rounds
from proximo_lab.bench.tables import TABLES, growth
from proximo_lab.bench.tables.growth import exponent
from proximo_lab.bench.tables.memory import head_bytes, our_head, plain_head
from proximo_lab.bench.tables.rollout import DecodeShare, SharedGain
from proximo_lab.bench.tables.step import Beside
from proximo_lab.bench.tables.train import CPU_WITHOUT, Exact
from proximo_lab.bench.timing import Ratio, Times, Watch, interleaved
from tests.run_processes import Script

SMALLEST = Workload("smallest", TINY, 2, 2, 6, 4, 4)


def quiet(line: str) -> None:
    pass


def ours(workload: Workload = SMALLEST) -> Ours:
    return Ours(workload, "cpu", Ticks())


class Ticks:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


# Limits, by hand


def test_shapes_have_the_weights_and_the_keys_they_are_known_for():
    # 30 layers of 576 x (9 + 3 + 3 + 9) x 64 + 3 x 576 x 1536, and so on
    assert [shape.body for shape in (SMOLLM_135M, QWEN_600M, QWEN_4B)] == [106_168_320, 440_401_920, 3_633_315_840]
    assert [shape.head for shape in (SMOLLM_135M, QWEN_600M, QWEN_4B)] == [28_311_552, 155_582_464, 388_956_160]
    assert [shape.kv_bytes(2) for shape in (SMOLLM_135M, QWEN_600M, QWEN_4B)] == [23_040, 114_688, 147_456]


def test_a_shapes_model_has_those_weights():
    model = TINY.model(attention="sdpa", dtype=torch.float32, device="cpu")
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2)
    assert matrices == TINY.body + TINY.head


@pytest.mark.parametrize(
    ("shape", "rows", "prompt", "groups", "shared", "milliseconds"),
    [
        (QWEN_600M, 64, 512, 4, False, 1.59),
        (QWEN_600M, 64, 512, 4, True, 0.774),  # 258 kernels of 3 µs; its bytes take 0.769
        (QWEN_600M, 512, 2048, 32, False, 31.7),
        (QWEN_600M, 512, 2048, 32, True, 5.52),
        (QWEN_4B, 512, 512, 32, False, 15.4),
        (SMOLLM_135M, 512, 512, 32, True, 0.85),
    ],
)
def test_decode_limit(shape, rows, prompt, groups, shared, milliseconds):
    workload = Workload("any", shape, groups, rows // groups, prompt, 512, 1)
    step = decode_step(workload, 256, shared=shared)
    assert 1000 * step.seconds(shape, H200) == pytest.approx(milliseconds, rel=5e-3)


def test_a_step_with_little_to_read_is_bound_by_arithmetic():
    workload = Workload("any", QWEN_4B, 64, 64, 1, 2, 1)
    step = decode_step(workload, 1, shared=True)
    operations = 2 * (3_633_315_840 + 388_956_160) * 4096 + 4 * 36 * 4096 * (4096 * 2)
    assert step.seconds(QWEN_4B, H200) == pytest.approx(operations / 790e12)


def test_a_rollouts_limit_is_the_sum_of_its_steps():
    workload = replace(MEDIUM, completion=3)
    steps = [decode_step(workload, done, shared=True).seconds(QWEN_600M, H200) for done in (1, 2)]
    assert decode_seconds(workload, H200, shared=True) == pytest.approx(sum(steps))
    flops = 2 * 440_401_920 * 16 * 512 + 2 * 28 * 2048 * 16 * 512 * 512
    assert prefill_seconds(workload, H200) == pytest.approx(flops / 790e12)


def test_training_operations_are_of_unique_tokens():
    medium = training(32, 512, [512] * 512)
    assert medium.tokens == 278_528
    assert medium.hardware_operations(QWEN_600M) == pytest.approx(1.23e15, rel=5e-3)
    long_prompt = training(16, 4096, [256] * 256)
    assert long_prompt.hardware_operations(QWEN_600M) == pytest.approx(0.758e15, rel=5e-3)
    # 6 body · tokens + 6 head · completions + 12 layers · width · pairs, in one second
    pairs = 32 * 512**2 / 2 + 512 * (512 * 512 + 512**2 / 2)
    operations = 6 * 440_401_920 * 278_528 + 6 * 155_582_464 * 262_144 + 12 * 28 * 2048 * pairs
    assert medium.use(QWEN_600M, H200, 2.0) == pytest.approx(operations / (2 * 790e12))


# Workloads


def test_lengths_are_fixed():
    assert MEDIUM.lengths == [512] * 256
    assert MEDIUM.even
    assert not TAIL.even
    assert max(TAIL.lengths) == TAIL.longest == 8192
    assert len(TAIL.lengths) == 128
    assert TAIL.completion_tokens / 128 == pytest.approx(1024, rel=0.03)
    assert TAIL.lengths == TAIL.lengths != sorted(TAIL.lengths)
    assert min(Tail(2, 100).lengths(50)) == 1


def test_prompts_completions_and_rewards_are_the_same_every_time():
    assert SMALLEST.prompts() == SMALLEST.prompts()
    assert [len(prompt) for prompt in SMALLEST.prompts()] == [6, 6]
    ragged = replace(SMALLEST, completion=Tail(3, 9))
    assert ragged.completions() == ragged.completions()
    assert [len(row) for siblings in ragged.completions() for row in siblings] == ragged.lengths
    rewards = SMALLEST.rewards()
    assert rewards == SMALLEST.rewards()
    assert all(len(set(siblings)) == 2 for siblings in rewards)


def test_the_tokenizer_reads_a_prompt_back_and_nobody_can_say_its_end():
    tokenizer = TINY.tokenizer()
    prompt = SMALLEST.prompts()[0]
    assert tuple(tokenizer.encode(SMALLEST.text(prompt), add_special_tokens=False)) == prompt
    model = TINY.model(attention="sdpa", dtype=torch.float32, device="cpu")
    assert end_tokens(model, tokenizer) == {TINY.vocabulary}


def test_weights_come_from_the_seed():
    first, second, other = (
        TINY.model(attention="sdpa", dtype=torch.float32, device="cpu", seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


# Times


def test_sides_take_turns_and_warm_ups_do_not_count():
    order = []
    times = {"A": iter([9.0, 9.0, 3.0, 1.0, 2.0]), "B": iter([9.0, 9.0, 6.0, 4.0, 8.0])}

    def turn(name):
        def work():
            order.append(name)
            return {"step": next(times[name])}

        return Turn(name, work)

    first, second = interleaved([turn("A"), turn("B")], steps=3, warmup=2, say=quiet)
    assert order == ["A", "B"] * 5
    assert first["step"] == Times((3.0, 1.0, 2.0))
    assert first["step"].median == 2.0
    assert first["step"].spread == 0.5
    ratio = second["step"] / first["step"]
    assert ratio == Ratio((2.0, 4.0, 4.0))
    assert (ratio.median, ratio.lowest, ratio.highest) == (4.0, 2.0, 4.0)


def test_a_watch_adds_up_phases_and_forgets_the_turn():
    watch = Watch("cpu", Ticks())
    for _ in range(2):
        with watch.phase("rollout"):
            watch.clock()
    assert watch.taken() == {"rollout": 4.0}
    assert watch.taken() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the highest resident size")
def test_memory_that_was_given_back_is_still_seen():
    before = used_bytes("cpu")
    # The system's own pages, which it takes back at once; an allocator may keep what was freed.
    with mmap.mmap(-1, 2**28) as pages:
        for place in range(0, 2**28, mmap.PAGESIZE):
            pages[place] = 1
    assert peak_bytes("cpu") - before > 2**27
    reset_peak("cpu")
    assert peak_bytes("cpu") - before < 2**27


def test_exponent():
    assert exponent([1, 2, 4, 8], [3.0, 6.0, 12.0, 24.0]) == pytest.approx(1.0)
    assert exponent([1, 4, 16], [5.0, 10.0, 20.0]) == pytest.approx(0.5)
    assert exponent([1, 10], [7, 7]) == pytest.approx(0.0)


# A loop of somebody else's


def test_a_loop_stops_after_each_round():
    seen = []

    def loop():
        for number in range(100):
            seen.append(number)
            rounds.pause()

    rounds = Rounds(loop)
    assert seen == []
    rounds.resume()
    assert seen == [0]
    rounds.resume()
    assert seen == [0, 1]
    rounds.stop()
    assert seen == [0, 1]


def test_what_a_loop_raises_is_raised_where_it_was_resumed():
    def loop():
        rounds.pause()
        raise torch.OutOfMemoryError("full")

    rounds = Rounds(loop)
    rounds.resume()
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        rounds.resume()
    rounds.stop()


# Reports


def test_a_table_is_aligned_and_says_what_was_reached():
    rows = [
        Row("a", {"ours s": "1.5"}, {"× TRL": "7"}, (Verdict("step", 7.0, 6.0), Verdict("peak", 61.0, 60.0, False))),
        Row("longer", {"TRL s": "2"}, note="out of memory"),
    ]
    assert rendered(rows, figures=True).splitlines() == [
        "row     ours s  TRL s  × TRL  target     reached",
        "a       1.5            7      step ≥ 6   yes, 7",
        "                              peak ≤ 60  NO, 61",
        "longer          2                                 out of memory",
    ]
    assert "ours s" not in rendered(rows, figures=False)
    assert "target" not in rendered(rows[1:], figures=True)


def test_numbers_are_short():
    assert [short(value) for value in (1.23456, 123456.0, 0.000123, math.nan)] == ["1.23", "123,456", "0.000123", "–"]
    assert aligned([["a", "", "b"], ["c", "", "d"]]) == "a  b\nc  d"


def test_results_are_kept_until_they_are_measured_again(tmp_path):
    around = {"load": (0.1, 0.2)}
    save(tmp_path, "step", "cpu", around, [Row("a", note="old"), Row("b", verdicts=(Verdict("x", math.nan, 1.0),))])
    path = save(tmp_path, "step", "cpu", around, [Row("a", note="new")])
    assert path.name.startswith("step-cpu-20")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["a"]["note"] == "new"
    assert rows["a"]["around"] == {"load": [0.1, 0.2]}
    assert rows["b"]["verdicts"] == [{"what": "x", "value": None, "bound": 1.0, "at_least": True, "reached": False}]


# Numbers before times


def test_sides_agree_within_a_tolerance():
    mine = Learned(loss=0.0, gradient_norm=2.0, scale=0.5)
    assert Agreement(mine, replace(mine, loss=0.0004, gradient_norm=2.001), 1e-3).gap == pytest.approx(8e-4)
    assert Agreement(mine, replace(mine, gradient_norm=2.001), 1e-3).holds
    assert not Agreement(mine, replace(mine, gradient_norm=2.003), 1e-3).holds
    assert not Agreement(mine, replace(mine, loss=0.001), 1e-3).holds
    assert not Agreement(mine, replace(mine, gradient_norm=math.nan), 1e-3).holds


class StandIn(Trl):
    """A peer that learned what it is told it learned."""

    def __init__(self, learned: tuple[float, float]) -> None:
        self.settings = Settings("TRL best", checkpointing=False, full_weights=False, rows=4)
        self.watch, self.learned = Watch("cpu", Ticks()), learned

    def loss_and_norm(self):
        return self.learned

    def step(self):
        return {"rollout": 4.0, "train": 6.0, "step": 10.0}

    def close(self):
        pass


def stepped(monkeypatch, norm_factor: float) -> list[Row]:
    """A row of `step` beside a peer whose gradient is so many times ours."""
    known = our_update(ours())
    peer = StandIn((known.loss, known.gradient_norm * norm_factor))
    monkeypatch.setattr(trl, "is_there", lambda: True)
    monkeypatch.setattr(Session, "opened", lambda *_: peer)
    options = BenchOptions(steps=2, warmup=0, peers=("best",))
    return Beside(SMALLEST).run(Session(options, "cpu", Ticks(), quiet, H200))


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    [row] = stepped(monkeypatch, 1.001)
    assert row.refused
    assert "TRL best" in row.note
    assert row.ratios == {}
    assert "REFUSED" in rendered([row], figures=True)


def test_a_peer_that_computes_the_same_is(monkeypatch):
    rows = stepped(monkeypatch, 1.00001)
    assert not any(row.refused for row in rows)
    # On the clock of ticks each of our phases takes one second.
    assert [row.ratios["× TRL best"] for row in rows] == ["4 (4–4)", "6 (6–6)", "5 (5–5)"]
    assert rows[-1].details["seconds"]["ours"]["step"] == [2.0, 2.0]


# Our side


def test_our_turns_do_the_whole_workload():
    side = ours()
    assert side.rollout() == {"rollout": 1.0}
    assert side.training() == {"train": 1.0}
    assert side.step() == {"rollout": 1.0, "train": 1.0, "step": 2.0}
    assert side.learner.version == 2
    batch_rows = side.update(side.fixed_groups).rows
    assert len(batch_rows) == SMALLEST.rows


def test_without_sharing_or_packing_the_update_is_the_same():
    ragged = replace(SMALLEST, completion=Tail(4, 9))
    norms, losses = [], []
    for change in (lambda side: side.update(side.fixed_groups), _apart, _padded):
        update = change(ours(ragged))
        norms.append(update.gradient_norm)
        losses.append(update.stats.floats()["loss"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    assert norms[0] > 0


def _apart(side: Ours):
    return side.update(side.fixed_groups, apart=True)


def _padded(side: Ours):
    side.learner.passes = PaddedPasses(**vars(side.learner.passes))
    return side.update(side.fixed_groups)


def test_half_of_the_groups_can_be_dead():
    side = ours()
    turns = {turn.name: turn.turn for turn in training_without(side)}
    assert set(turns) == {"without shared prompts", "without packing", "with half of the groups dead"}
    seen = []
    update = side.learner.update
    side.learner.update = lambda batch, **how: seen.append(update(batch, **how)) or seen[-1]
    for turn in turns.values():
        assert turn() == {"train": 1.0}
    dead = [int(found.logprobs.isnan().all(dim=1).sum()) for found in seen]
    assert dead == [0, 0, 2]


@pytest.mark.slow("measures speed and memory")
def test_log_probs_need_less_than_all_logits():
    size = {"tokens": 512, "vocabulary": 65536, "width": 8}
    if not used_bytes("cpu"):
        pytest.skip("this system does not tell")
    assert head_bytes(our_head, "cpu", **size) > 0
    assert head_bytes(plain_head, "cpu", **size) > 512 * 65536 * 4  # at least the logits


# Rows without a peer


def alone() -> Session:
    return Session(BenchOptions(steps=2, warmup=0, peers=()), "cpu", Ticks(), quiet, H200)


def test_a_decode_step_is_what_lies_between_two_rollouts(monkeypatch):
    taken = {64: 1.0, 192: 1.5}
    monkeypatch.setattr(Ours, "rollout", lambda self, tokens: {"rollout": taken[tokens]})
    [row] = DecodeShare(256, 0.5, rows=3, shape=TINY).run(alone())
    # 128 steps in half a second
    assert row.figures["ms a step"] == "3.91"
    limit = 128 * (9 * 4 + 6) * 3e-6  # so small that launches bound it
    assert row.verdicts[0].value == pytest.approx(limit / 0.5)


def test_prompts_read_once_are_timed_without_the_prefill(monkeypatch):
    def rollout(self, tokens=None):
        prefill, steps = 2.0, 0.0 if tokens == 1 else 3.0
        return {"rollout": prefill + steps * (2 if self.switches else 1)}

    monkeypatch.setattr(Ours, "rollout", rollout)
    [row] = SharedGain(SMALLEST, 1.7).run(alone())
    assert (row.verdicts[0].value, row.verdicts[0].reached) == (2.0, True)


@pytest.mark.slow("measures speed and memory")
def test_growth_is_an_exponent_over_the_sizes(monkeypatch):
    monkeypatch.setattr(Ours, "training", lambda self: {"train": float(self.workload.siblings)})
    wider = [line for line in growth.CPU if line.name == "siblings"]
    [row] = wider[0].run(alone())
    assert row.details["sizes"] == (4, 8, 16, 32)
    assert row.ratios == {"ours": "1"}


def test_gradients_are_held_against_the_padded_reference():
    [row] = Exact(TINY).run(alone())
    assert row.verdicts[0].reached
    assert row.verdicts[0].value > 0


def test_techniques_are_switched_off_beside_ours():
    rows = replace(CPU_WITHOUT[0], workload=SMALLEST).run(alone())
    assert [row.name for row in rows] == [
        "smallest, with everything",
        "smallest, without shared prompts",
        "smallest, without packing",
        "smallest, with half of the groups dead",
    ]
    assert rows[1].ratios == {"times as long": "1 (1–1)"}


@pytest.mark.slow("measures speed and memory")
def test_what_does_not_fit_is_said_and_the_next_row_is_measured(tmp_path, capsys, monkeypatch):
    def full(self, groups=None, *, apart=False):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Ours, "training", full)
    arguments = ["train", "--only", "c-tiny", "gradient-tiny", "--peers", "none", "--device", "cpu"]
    assert main([*arguments, "--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].split()[:2] == ["c-tiny", "REFUSED:"]
    assert "yes" in printed[-1]


# The command


@pytest.mark.slow("measures speed and memory")
def test_a_table_from_beginning_to_end(tmp_path, capsys):
    arguments = ["step", "--only", "c-tiny", "--peers", "none", "--steps", "1", "--warmup", "0", "--device", "cpu"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    last = printed.out.splitlines()
    assert last[-4:] == ["row", "c-tiny rollout", "c-tiny train", "c-tiny step"]
    assert "CPU seconds" in printed.out
    assert "turn 1" in printed.err
    [path] = tmp_path.glob("step-cpu-*.json")
    whole = json.loads(path.read_text())["rows"][-1]
    assert whole["details"]["workload"]["groups"] == C_TINY.groups
    assert set(whole["details"]["seconds"]["ours"]) == {"rollout", "train", "step"}
    assert torch.__version__.startswith(whole["around"]["versions"]["torch"].partition("+")[0])


@pytest.mark.slow("measures speed and memory")
def test_rows_of_several_threads_stand_beside_those_of_one(tmp_path, monkeypatch):
    [table] = [each for each in TABLES if each.name == "step"]
    own = replace(table, cpu=(SimpleNamespace(name="row", run=lambda _: [Row("row step")]),))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            measured(own, BenchOptions(device="cpu", threads=number, results=str(tmp_path)))
    finally:
        torch.set_num_threads(threads)
    [path] = tmp_path.iterdir()
    rows = {row["name"]: row["around"]["threads"] for row in json.loads(path.read_text())["rows"]}
    assert rows == {"row step": 1, "row step, 2 threads": 2}


@pytest.mark.slow("measures speed and memory")
def test_without_trl_our_side_is_measured_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trl, "is_there", lambda: False)
    arguments = ["rollout", "--only", "c-tiny", "--steps", "1", "--warmup", "0", "--device", "cpu"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert 'pip install "trl==1.16.0"' in printed
    assert printed.splitlines()[-1] == "c-tiny"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step", "--only", "nothing"], "--only nothing: there is no such row; there are c-tiny, c-tiny-ends"),
        (["growth", "--ablate"], "--ablate: table growth has nothing to switch off"),
    ],
)
def test_a_row_that_is_not_there_is_refused(arguments, said, capsys):
    assert main([*arguments, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "invalid choice"),
        (["step", "--peers", "worst"], "peers has 'worst'"),
        (["step", "--steps", "0"], "steps is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_options_as_they_are_typed():
    table, options = parsed(
        ["train", "--only", "a", "b", "--peers", "none", "--token-budget", "99"], [("train", "")], "x"
    )
    assert table == "train"
    assert options == BenchOptions(only=("a", "b"), peers=(), token_budget=99)


def test_rows_have_names_of_their_own():
    for table in TABLES:
        for lines in (table.cpu, table.gpu, table.cpu_without, table.gpu_without):
            assert len({line.name for line in lines}) == len(lines), table.name


@pytest.mark.slow("starts Python anew")
def test_it_and_compiling_run_without_the_command_lines_dependencies(tmp_path):
    """Ours are imported anew, in a process that has the large packages already."""
    script = """
hidden = ("tyro", "rich", "math_verify", "jaxtyping", "beartype")
for name in [each for each in sys.modules if each.partition(".")[0] in ("proximo", *hidden)]:
    del sys.modules[name]
for name in hidden:
    sys.modules[name] = None
import proximo.models.compiling
import proximo_lab.bench.running
import proximo_lab.bench.starting
"""
    assert Script(script, stderr=tmp_path / "stderr").wait() == 0, (tmp_path / "stderr").read_text()


# The peer


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_learns_what_we_learn():
    for settings in (trl.best(SMALLEST), trl.DEFAULT):
        peer = Trl(SMALLEST, settings, device="cpu", clock=Ticks())
        try:
            peer.training()
            mine = our_update(ours())
            assert Agreement(mine, Learned(*peer.loss_and_norm(), scale=mine.scale), 1e-4).holds
            peer.fixed = False
            assert set(peer.step()) == {"rollout", "train", "step"}
        finally:
            peer.close()
