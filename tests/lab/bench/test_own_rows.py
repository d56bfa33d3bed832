"""Rows whose completions end at random, rows of the user's own, and the seconds of the first turn."""

import json
from dataclasses import replace

import pytest
import torch

from proximo.models.stop_tokens import end_tokens
from proximo.planning.published_shapes import LLAMA_1B, QWEN_4B, QWEN_8B, QWEN_600M, QWEN_1700M, SHAPES, TINY, shape_of
from proximo.planning.roofline import H200, decode_seconds, decode_step, prefill_seconds, rollout_seconds
from proximo.planning.workloads import ENDS_1000, ENDS_2000, MEDIUM, Ends, Workload
from proximo.samplers.embedded.buffers import BufferPool
from proximo_lab.bench.options import BenchOptions, parsed
from proximo_lab.bench.own import OwnRow
from proximo_lab.bench.running import main
from proximo_lab.bench.session import Session
from proximo_lab.bench.sides import trl
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.sides.trl import Settings, Trl
from proximo_lab.bench.tables import rollout, step
from proximo_lab.bench.tables.rollout import Beside
from proximo_lab.bench.timing import Watch
from tests.lab.bench.test_bench import SMALLEST, Ticks, alone, quiet

ENDING = replace(SMALLEST, name="ending", completion=Ends(4, 12))


# Ends at random


def test_one_token_in_mean_ends_a_completion():
    tokens = ENDS_1000.end_tokens
    assert tokens == ENDS_1000.end_tokens == sorted(set(tokens))
    assert len(tokens) == 152  # 151,936 / 1,000
    assert 0 < tokens[0] < tokens[-1] < 151_936  # token 0 is padding
    assert MEDIUM.end_tokens == []
    assert len(Ends(2000, 9).tokens(1024)) == 1


def test_given_lengths_are_the_quantiles_of_ends_at_random():
    # Four rows with ends one time in two: 1/8, 3/8, 5/8 and 7/8 of completions have ended by 1, 1, 2 and 3 tokens.
    assert sorted(Ends(2, 100).lengths(4)) == [1, 1, 2, 3]
    assert sorted(Ends(2, 2).lengths(4)) == [1, 1, 2, 2]
    lengths = ENDS_1000.lengths
    assert lengths == ENDS_1000.lengths != sorted(lengths)
    # A length cut at `most` is (1 - (1 - 1/mean) ** most) * mean on average.
    assert sum(lengths) / 256 == pytest.approx(1000 * (1 - 0.999**4096), rel=5e-3)
    assert (ENDS_1000.longest, ENDS_1000.limit) == (4096, 4096)
    # The highest quantile, 511/512, is below the limit: ln(512) / -ln(1 - 1/2000), rounded up.
    assert (ENDS_2000.longest, ENDS_2000.limit) == (12_474, 16_384)
    assert sum(ENDS_2000.lengths) / 256 == pytest.approx(2000, rel=1e-2)


def test_completions_end_at_those_tokens_or_at_the_limit():
    side = Ours(ENDING, "cpu", Ticks())
    assert end_tokens(side.model, side.tokenizer) == {*ENDING.end_tokens, TINY.vocabulary}
    answers = side.sampler.sample(side.requests, side.sampling, seed=0, step=1)
    completions = [completion for siblings in answers for completion in siblings]
    for completion in completions:
        assert not set(completion.tokens[:-1]) & set(ENDING.end_tokens)
        assert len(completion.tokens) == 12 or completion.tokens[-1] in ENDING.end_tokens
    side.rollout()
    assert side.drawn == [[len(completion.tokens) for completion in completions]]
    assert len(set(side.drawn[0])) > 1
    assert side.step() == {"rollout": 1.0, "train": 1.0, "step": 2.0}
    assert [len(lengths) for lengths in side.drawn] == [4, 4]


@pytest.mark.slow("draws many completions")
def test_many_completions_have_the_mean_they_should():
    side = Ours(replace(SMALLEST, siblings=64, completion=Ends(8, 32)), "cpu", Ticks())
    for _ in range(2):
        side.rollout()
    lengths = [length for drawn in side.drawn for length in drawn]
    # 256 lengths of mean 7.9 and nearly that deviation: an error of 6 %; the rest is for weights that are not even.
    assert sum(lengths) / len(lengths) == pytest.approx(8 * (1 - (7 / 8) ** 32), rel=0.2)
    assert max(lengths) <= 32


def test_without_ends_a_completion_that_stops_early_is_our_mistake(monkeypatch):
    side = Ours(SMALLEST, "cpu", Ticks())
    monkeypatch.setattr(side, "sampler", Ours(ENDING, "cpu", Ticks()).sampler)
    side.sampling = replace(side.sampling, max_tokens=12)
    with pytest.raises(AssertionError):
        side.rollout()


# The limit for lengths that occurred


def test_a_step_reads_the_rows_that_are_left_and_their_prompts():
    workload = Workload("any", QWEN_600M, 2, 2, 100, Ends(4, 12), 1)
    lengths = [5, 2, 3, 3]
    first = decode_step(workload, 1, shared=True, lengths=lengths)
    assert (first.rows, first.context, first.read) == (4, 4 * 101, 2 * 100 + 4)
    later = decode_step(workload, 2, shared=True, lengths=lengths)  # the second row ended with its second token
    assert (later.rows, later.context, later.read) == (3, 3 * 102, 2 * 100 + 6)
    last = decode_step(workload, 4, shared=True, lengths=lengths)  # one row of the first group
    assert (last.rows, last.context, last.read) == (1, 104, 104)
    assert decode_step(workload, 2, shared=False, lengths=lengths).read == 3 * 102


def test_the_limit_of_drawn_lengths_is_the_sum_of_their_steps():
    # So many keys that bytes bound every step: 2 bytes a weight, 114,688 a token of keys and values, 4.3 TB/s.
    workload = Workload("any", QWEN_600M, 2, 2, 50_000, Ends(4, 12), 1)
    weights = 2 * (440_401_920 + 155_582_464)
    read = [100_004, 50_000 + 2]  # after one token all four rows, after two one row
    decoding = sum(weights + 114_688 * tokens for tokens in read) / 4.3e12
    assert decode_seconds(workload, H200, shared=True, lengths=[3, 2, 2, 2]) == pytest.approx(decoding)
    whole = rollout_seconds(workload, H200, [3, 2, 2, 2])
    assert whole == pytest.approx(decoding + prefill_seconds(workload, H200))


def test_a_row_of_ends_is_measured_turn_by_turn(monkeypatch):
    drawn = iter([([12] * 4, 9.0), ([3, 2, 2, 2], 1.0), ([2, 2, 2, 2], 1.0), ([4, 4, 4, 4], 2.0)])

    def drawing(self):
        lengths, seconds = next(drawn)
        self.drawn.append(lengths)
        return {"rollout": seconds}

    monkeypatch.setattr(Ours, "rollout", drawing)
    session = replace(alone(), options=BenchOptions(steps=3, warmup=0, peers=()))
    [row] = Beside(ENDING, rate=8.5, share=0.7).run(session)
    # 9 tokens in 1 s, 8 in 1 s, 16 in 2 s
    assert [(verdict.what, verdict.reached) for verdict in row.verdicts] == [
        ("tok/s", False),
        ("share of the limit", False),
    ]
    assert row.verdicts[0].value == 8.0
    # Launches bound each step: (9 * 4 + 6) of 3 µs; one, two and three steps after the prefill.
    launches, prefill = 42 * 3e-6, prefill_seconds(ENDING, H200)
    limits = [2 * launches + prefill, launches + prefill, 3 * launches + prefill]
    assert row.details["limit seconds"] == pytest.approx(limits)
    assert row.verdicts[1].value == pytest.approx(limits[2] / 2.0)
    del row.figures["ours GiB"]
    assert row.figures == {
        "ours tok/s": "8",
        "ours s": "1",
        "ms a step": "500",  # 1,000 / 3, 1,000 / 2 and 2,000 / 4
        "of the limit": "0%",
        "ours first s": "9",
    }
    assert row.details["drawn"] == [
        {"tokens": 48, "longest": 12},
        {"tokens": 9, "longest": 3},
        {"tokens": 8, "longest": 2},
        {"tokens": 16, "longest": 4},
    ]
    assert "ours alone" in row.note


def test_pages_are_those_kept_for_the_next_call(monkeypatch):
    monkeypatch.setattr(BufferPool, "_keeps", property(lambda self: True))  # as on a GPU
    side = Ours(SMALLEST, "cpu", Ticks(), switches={"shared_prefix": True})
    assert side.sampler.pages == 0
    side.rollout()
    assert side.sampler.pages == 6  # one for each of two prompts and of four rows


def test_two_rows_of_a_gpu_have_a_required_rate():
    found = {line.name: line for line in rollout.GPU if isinstance(line, Beside)}
    assert {name: (line.rate, line.share) for name, line in found.items() if line.rate} == {
        "ends-1000": (21_000, 0.7),
        "ends-2000": (12_500, 0.7),
    }


class Peer(Trl):
    def __init__(self) -> None:
        self.settings = Settings("TRL best", checkpointing=False, full_weights=False, rows=4)
        self.watch = Watch("cpu", Ticks())

    def rollout(self):
        return {"rollout": 4.0}

    def close(self):
        pass


def with_peer(monkeypatch) -> Session:
    monkeypatch.setattr(trl, "is_there", lambda: True)
    monkeypatch.setattr(Session, "opened", lambda *_: Peer())
    return Session(BenchOptions(steps=2, warmup=0, peers=("best",)), "cpu", Ticks(), quiet, H200)


def test_a_sampled_step_with_ends_at_random_has_no_peer(monkeypatch):
    *_, whole = step.Beside(ENDING).run(with_peer(monkeypatch))
    assert whole.ratios == {}
    assert "a peer would draw other lengths" in whole.note


# The first turn


def test_the_first_turns_seconds_are_in_the_row(monkeypatch):
    turns = iter([50.0, 2.0, 2.0])
    monkeypatch.setattr(Ours, "rollout", lambda self: {"rollout": next(turns)})
    [row] = Beside(SMALLEST).run(with_peer(monkeypatch))
    assert row.figures["ours first s"] == "50"
    assert row.details["first turn"] == {"rollout": 50.0}
    assert row.details["seconds"]["ours"] == {"rollout": [2.0, 2.0]}
    assert row.ratios == {"× TRL best": "2 (2–2)"}


def test_a_steps_first_turn_is_a_rollout_and_an_update(monkeypatch):
    rolled = iter([50.0])
    monkeypatch.setattr(Ours, "rollout", lambda self: {"rollout": next(rolled)})
    rows = step.Beside(SMALLEST).run(alone())
    assert [row.figures["ours first s"] for row in rows] == ["50", "1", "51"]
    assert rows[-1].details["first turn"] == {"rollout": 50.0, "train": 1.0}


# Shapes


def test_named_shapes_have_the_weights_they_are_known_for():
    assert [shape.body for shape in (LLAMA_1B, QWEN_1700M, QWEN_8B)] == [973_078_528, 1_409_286_144, 6_945_767_424]
    assert [shape.head for shape in (LLAMA_1B, QWEN_1700M, QWEN_8B)] == [262_668_288, 311_164_928, 622_329_856]
    assert [shape.name for shape in SHAPES if not shape.tied] == ["Qwen3-8B", "Qwen3-14B", "Llama-8B", "Qwen2.5-7B"]
    assert shape_of("qwen3-4b") == shape_of("4B") == QWEN_4B


def test_a_head_of_its_own_is_read_and_trained():
    shape = replace(TINY, tied=False)
    model = shape.model(attention="sdpa", dtype=torch.float32, device="cpu")
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert matrices == shape.body + 2 * shape.head
    side = Ours(replace(SMALLEST, shape=shape), "cpu", Ticks())
    assert side.step() == {"rollout": 1.0, "train": 1.0, "step": 2.0}


def test_sizes_can_be_written_out():
    shape = shape_of("2x96x160x6x2x48x700")
    sizes = (shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_width)
    assert (*sizes, shape.vocabulary) == (2, 96, 160, 6, 2, 48, 700)
    assert shape.body == 2 * (96 * 16 * 48 + 3 * 96 * 160)


# The command


def test_a_row_of_ones_own():
    workload = OwnRow("tiny", groups=3, siblings=5, prompt=7, lengths="9").workload()
    assert workload == Workload("tiny-3x5-p7-r9", TINY, 3, 5, 7, 9, 15)
    assert OwnRow("Qwen3-0.6B", lengths="1000:4096").workload().completion == ENDS_1000.completion
    # 32,768 tokens hold 18 rows of 1,000 + 800, and 18 divides 12 x 24.
    assert OwnRow("Qwen3-0.6B", groups=12, siblings=24, prompt=1000, lengths="800").workload().peer_rows == 18
    assert [workload.even_part(most) for most in (100, 15, 8, 4, 1)] == [15, 15, 5, 3, 1]


def test_the_options_of_a_row_of_ones_own():
    _, options = parsed(["step", "--shape", "tiny", "--siblings", "4", "--lengths", "8:32"], [("step", "")], "x")
    assert options == BenchOptions(own=OwnRow("tiny", siblings=4, lengths="8:32"))


@pytest.mark.slow("measures speed and memory")
@pytest.mark.parametrize("table", ["rollout", "train", "step"])
@pytest.mark.parametrize("lengths", ["5", "4:12"])
def test_an_odd_shape_from_beginning_to_end(table, lengths, tmp_path, capsys):
    arguments = [table, "--shape", "2x96x160x6x2x48x700", "--groups", "2", "--siblings", "3", "--prompt", "7"]
    arguments += ["--lengths", lengths, "--steps", "1", "--warmup", "0", "--peers", "none", "--device", "cpu"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    name = f"2x96x160x6x2x48x700-2x3-p7-r{lengths}"
    assert name in capsys.readouterr().out
    [path] = tmp_path.glob("*.json")
    whole = json.loads(path.read_text())["rows"][-1]
    assert whole["around"]["options"]["own"]["lengths"] == lengths
    assert all(seconds > 0 for seconds in whole["details"]["first turn"].values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "3"], "groups is 3 without a shape: give --shape too"),
        (["--shape", "9B"], "shape is '9B': give one of tiny, SmolLM2-135M"),
        (["--shape", "2x96x160x6x2x48"], "or the sizes as LAYERSxHIDDEN"),
        (["--shape", "2x96x160x6x4x48x700"], "6 heads and 4 kv_heads: give a divisor of heads"),
        (["--shape", "2x96x160x6x2x47x700"], "head_width 47: give an even number"),
        (["--shape", "0x96x160x6x2x48x700"], "layers 0: give at least 1"),
        (["--shape", "2x96x160x6x2x48x1"], "vocabulary 1: give at least 2"),
        (["--shape", "tiny", "--siblings", "0"], "siblings is 0: give at least 1"),
        (["--shape", "tiny", "--lengths", "many"], "lengths is 'many': give tokens, such as 512, or MEAN:LIMIT"),
        (["--shape", "tiny", "--lengths", "0"], "lengths is '0'"),
        (["--shape", "tiny", "--lengths", "2000:4096"], "lengths has mean 2000: give 2 to 1024"),
        (["--shape", "tiny", "--lengths", "1:4096"], "lengths has mean 1: give 2 to 1024"),
        (["--shape", "tiny", "--prompt", "131072"], "prompt is 131072 and lengths 512: together"),
        (["--shape", "tiny", "--only", "c-tiny"], "shape is given with only or ablate"),
    ],
)
def test_a_row_that_cannot_be_is_refused_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["step", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_table_without_rows_of_ones_own_says_so(capsys):
    assert main(["growth", "--shape", "tiny", "--device", "cpu"]) == 2
    assert "--shape: table growth takes no row of your own" in capsys.readouterr().err
