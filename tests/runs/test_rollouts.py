"""What a step's table says is what was written: ragged rows, passes, token texts; and files that are none."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from proximo.insight.lens.steps import read_step
from proximo.models import tiny_tokenizer
from proximo.models.tokens.spelling import UNKNOWN, Spelling
from proximo.runs.rollouts import FORMAT, MAX_ANSWER, METADATA_KEY, rollout_table, write_rollouts
from proximo.system.sealing import seal
from proximo.types import Problem
from proximo.types.batches import Batch, Stats
from tests import batches
from tests.fixture import LOG_RATIO, MASK, OLD, REF, ROLLOUT, assert_close
from tests.steps import SPELLING, batch_of, fixture_batch, fixture_step, padded, stored, update

# There and back


def test_rows_come_back_as_they_were(tmp_path):
    batch = fixture_batch(values=2 * OLD, returns=3 * OLD, truncated=torch.tensor([False, True, False, False]))
    step = stored(tmp_path, batch, [update(range(4), OLD + LOG_RATIO)])
    read = step.batch.rows(torch.arange(4))
    for name in ("tokens", "lengths", "mask", "group", "outcome", "rewards", "truncated", "version"):
        assert torch.equal(getattr(read, name), getattr(batch, name)), name
    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "advantages"):
        assert torch.equal(getattr(read, name), torch.where(MASK, getattr(batch, name), 0.0)), name
    assert read.prompts == batch.prompts
    assert step.number == 0
    assert step.state == ["trained"] * 4
    assert step.sibling == [0, 1, 2, 3]
    assert step.problem == ["p-0"] * 4
    assert step.prompt == ["0="] * 4
    assert step.answer == ["0"] * 4
    assert step.text == ["0123", "01", "012", "0"]
    assert [list(row) for row in step.pieces] == [["0", "1", "2", "3"], ["0", "1"], ["0", "1", "2"], ["0"]]
    assert step.parts == [{"task": 1.0}, {"task": 0.0}, {"task": 0.0}, {"task": 1.0}]
    assert torch.equal(step.current, (OLD + LOG_RATIO)[MASK].unsqueeze(0))
    assert torch.equal(step.entropy, -(OLD + LOG_RATIO)[MASK].unsqueeze(0))
    assert torch.equal(step.batch.old_logprobs, OLD[MASK])


def test_what_was_not_computed_is_not_there(tmp_path):
    step = fixture_step(tmp_path, ref_logprobs=None)
    assert step.batch.ref_logprobs is None
    assert step.batch.values is None
    assert step.batch.routes is None


def test_float32_stays_float32(tmp_path):
    batch = fixture_batch(old_logprobs=OLD.float(), rollout_logprobs=ROLLOUT.float(), ref_logprobs=REF.float())
    step = stored(tmp_path, batch, [update(range(4), (OLD + LOG_RATIO).float())])
    assert step.batch.old_logprobs.dtype == step.current.dtype == torch.float32
    assert torch.equal(step.current[0], (OLD + LOG_RATIO).float()[MASK])


def test_updates_know_their_rows_in_every_pass(tmp_path):
    """Updates count among the rows that train; the table has all of them."""
    current = OLD + LOG_RATIO
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0])
    batch = replace(fixture_batch(), rewards=rewards, outcome=rewards)
    facts = Stats(totals={"policy_loss": torch.tensor(0.25), "loss": torch.tensor(math.nan)})
    updates = [
        update([2, 0], current[[3, 0]], stats=facts, version=5),
        update([1], current[[2]], version=6),
        update([0, 1], current[[0, 2]] - 1, version=7),
        update([2], current[[3]] * math.nan, skipped="not finite: the gradient", version=8),
    ]
    step = stored(tmp_path, batch, updates, trained=[0, 2, 3])
    assert step.state == ["trained", "unscored", "trained", "trained"]
    assert step.passes == 2
    assert step.updates.tolist() == [[0, -1, 1, 0], [2, -1, 2, 3]]
    first, second = (padded(step.layout, each) for each in step.current)
    assert_close(first[[0, 2, 3]], torch.where(MASK, current, 0.0)[[0, 2, 3]])
    assert_close(second[[0, 2]], torch.where(MASK, current - 1, 0.0)[[0, 2]])
    assert step.current[:, step.layout.of(1)].isnan().all()
    assert step.current[1, step.layout.of(3)].isnan().all()  # it was not run
    assert [each["version"] for each in step.metadata["updates"]] == [5, 6, 7, 8]
    assert [each["skipped"] for each in step.metadata["updates"]] == [None, None, None, "not finite: the gradient"]
    assert [each["policy_loss"] for each in step.metadata["updates"]] == [0.25, None, None, None]
    assert step.metadata["updates"][0]["loss"] is None  # JSON has no NaN
    assert step.metadata["updates"][0]["gradient_norm"] == 1.0


def test_dropped_groups_are_there_and_say_so(tmp_path):
    group = torch.tensor([0, 0, 1, 1])
    batch = batch_of(MASK, group, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    step = stored(tmp_path, batch, [update([0, 1], OLD[:2])], trained=[0, 1], kept_groups=1)
    assert step.state == ["trained", "trained", "dropped", "dropped"]
    assert step.problem == ["p-0", "p-0", "p-1", "p-1"]
    assert step.sibling == [0, 1, 0, 1]


def test_long_targets_are_cut_and_others_are_spelled():
    def answer(value) -> str | None:
        batch = batch_of(MASK[:1], torch.zeros(1, dtype=torch.long), torch.zeros(1))
        (group,) = batch.groups
        batch = replace(batch, groups=(replace(group, problem=Problem("a", "b", value)),))
        table = rollout_table(batch, SPELLING, trained=torch.arange(1), kept_groups=1)
        return table.column("answer")[0].as_py()

    assert answer(None) is None
    assert answer("42") == "42"
    assert answer({"target": 7, "numbers": [1, 2]}) == '{"target": 7, "numbers": [1, 2]}'
    assert answer({1j}) == '"{1j}"'
    assert len(answer("x" * 10_000) or "") == MAX_ANSWER


@pytest.mark.slow("writes many rollouts")
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    passes=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_ragged_rows_come_back(lengths, passes, seed):
    """Rows of any lengths, also of none, in any number of passes, some of them not run."""
    random = torch.Generator().manual_seed(seed)
    width = max(*lengths, 1)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    count = len(lengths)
    group = torch.randint(0, count, (count,), generator=random)
    group = group.unique(return_inverse=True)[1]

    def normal() -> torch.Tensor:
        return torch.randn(count, width, generator=random)

    batch = batch_of(mask, group, torch.randn(count, generator=random), old_logprobs=normal(), advantages=normal())
    updates, expected = [], []
    for _ in range(passes):
        logprobs = normal()
        logprobs[torch.rand(count, generator=random) < 0.3] = math.nan
        order = torch.randperm(count, generator=random)
        half = count // 2
        updates += [update(part.tolist(), logprobs[part]) for part in (order[:half], order[half:]) if len(part)]
        expected.append(torch.where(mask, logprobs, math.nan))
    with tempfile.TemporaryDirectory() as folder:
        step = stored(Path(folder), batch, updates)
    assert step.passes == passes
    assert torch.equal(step.batch.lengths, torch.tensor(lengths))
    assert torch.equal(step.batch.old_logprobs, batch.old_logprobs[mask])
    assert torch.equal(step.batch.rows(torch.arange(count)).old_logprobs, torch.where(mask, batch.old_logprobs, 0.0))
    assert torch.equal(step.batch.group, group)
    for number, logprobs in enumerate(expected):
        torch.testing.assert_close(step.current[number], logprobs[mask], rtol=0, atol=0, equal_nan=True)
        assert (step.updates[number] >= 0).all()
    assert [list(map(len, step.pieces))] == [lengths]


def test_routes_that_were_replayed_come_back(tmp_path):
    routes = torch.arange(4 * 4 * 2 * 3, dtype=torch.int16).reshape(4, 4, 2, 3) % 8
    routes = torch.where(MASK[:, :, None, None], routes, -1)
    prompt_routes = (torch.tensor([[[1, 2, 3], [4, 5, 6]]], dtype=torch.int16),)
    batch = replace(fixture_batch(), routes=routes, prompt_routes=prompt_routes)
    step = stored(tmp_path, batch, [update(range(4), OLD)])
    assert step.batch.routes is not None
    assert torch.equal(step.batch.routes, routes[MASK])
    read = step.batch.rows(torch.arange(4))
    assert read.routes is not None
    assert torch.equal(read.routes, routes)
    assert len(step.batch.prompt_routes) == 1
    assert torch.equal(step.batch.prompt_routes[0], prompt_routes[0])


# Files that are none of ours


def written(folder: Path, change=lambda table: table, facts: object = None) -> Path:
    """A good table, spoiled."""
    batch = fixture_batch()
    updates = [update(range(4), OLD + LOG_RATIO)]
    table = rollout_table(batch, SPELLING, trained=torch.arange(4), kept_groups=1, updates=updates)
    known = table.schema.metadata
    table = change(table).replace_schema_metadata(
        known if facts is None else {METADATA_KEY: json.dumps(facts).encode()}
    )
    path = folder / "step-000003.parquet"
    write_rollouts(table, path)
    return path


def without(name: str):
    return lambda table: table.drop_columns([name])


def with_column(name: str, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values)


OTHER_VERSION = "another version of Proximo wrote it: read it with that one, or run the step again"
ONE = {"version": 0, "skipped": None, "value_only": False}
SPOILED = [
    ({"facts": {"format": FORMAT - 1, "updates": []}}, OTHER_VERSION),
    ({"facts": {"format": FORMAT + 1, "updates": []}}, OTHER_VERSION),
    ({"facts": ["format"]}, OTHER_VERSION),
    ({"facts": {"format": FORMAT}}, "it is damaged, 'updates' is missing"),
    ({"facts": {"format": FORMAT, "updates": [{}]}}, "it is damaged, 'version' is missing"),
    ({"facts": {"format": FORMAT, "updates": 3}}, "it is damaged, or something else than a run's rollouts"),
    ({"facts": {"format": FORMAT, "updates": []}}, "it is damaged: a row belongs to an update that is missing"),
    ({"change": without("pieces")}, "it is damaged, 'pieces' is missing"),
    ({"change": without("current_logprobs")}, "it is damaged, 'current_logprobs' is missing"),
    (
        {"change": with_column("tokens", pa.array([1, 2, 3, 4]))},
        "it is damaged, or something else than a run's rollouts",
    ),
    ({"change": with_column("group", pa.array([0, 0, 2**40, 0]))}, "it is damaged: groups are not numbered from 0"),
    ({"change": with_column("group", pa.array([0, 0, -1, 0]))}, "it is damaged: groups are not numbered from 0"),
    (
        {"change": with_column("old_logprobs", pa.array([[0.0], [0.0], [0.0], [0.0]]))},
        "it is damaged: a column is not aligned with the tokens",
    ),
    (
        {"change": with_column("pieces", pa.array([["a"]] * 4))},
        "it is damaged: a column is not aligned with the tokens",
    ),
    (
        {"change": with_column("pieces", pa.array(["a"] * 4))},
        "it is damaged, or something else than a run's rollouts",
    ),
    (
        {"change": with_column("entropy", pa.array([[[0.5]], [[0.5]], [[0.5]], [[0.5]]]))},
        "it is damaged: a column is not aligned with the tokens",
    ),
]


@pytest.mark.parametrize(("how", "complaint"), SPOILED)
def test_a_spoiled_table_is_refused_in_one_line(how, complaint, tmp_path):
    path = written(tmp_path, **how)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        read_step(path, 3)
    assert str(caught.value) == f"{path}: {complaint}"


def test_what_spoils_tables_is_not_in_a_good_one(tmp_path):
    assert read_step(written(tmp_path), 3).number == 3
    assert read_step(written(tmp_path, facts={"format": FORMAT, "updates": [ONE]}), 3).passes == 1


def test_rows_in_several_groups_of_the_file_are_read_as_those_in_one(tmp_path):
    path = written(tmp_path)
    table, pieces = pq.read_table(path), read_step(path, 3).pieces[:]
    pq.write_table(table, path, row_group_size=1)
    seal(path)
    assert read_step(path, 3).pieces[:] == pieces


def test_files_that_are_cut_empty_foreign_or_not_there_are_refused_in_one_line(tmp_path):
    good = written(tmp_path).read_bytes()
    path = tmp_path / "step.parquet"
    for data in (b"", b"PAR1", good[: len(good) // 2], b"step,reward\n0,1\n", good[:200] + b"\0" * 400 + good[600:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
            read_step(path, 0)
        assert str(caught.value).startswith(f"{path}: ")
    pq.write_table(pa.table({"anything": [1, 2]}), path)
    with pytest.raises(ValueError, match="another version of Proximo wrote it"):
        read_step(path, 0)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        read_step(tmp_path / "nothing.parquet", 0)


# Spelling


def joined(spelling: Spelling, tokens: list[int]) -> str:
    pieces = spelling(tokens)
    assert len(pieces) == len(tokens)
    return "".join(pieces)


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE, of a few merges only: characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=290, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the answer is the sum", "the the answer answer"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TEXTS = [
    "37+48=85",
    " leading and  double spaces ",
    "größer, 数学 und 👩‍🔬!",
    "\n\ttabs\r\n",
    "the answer is 𝄞 the",
    "é́",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text(text, byte_level):
    tokens = byte_level.encode(text)
    assert joined(Spelling(byte_level), tokens) == text
    assert joined(Spelling(byte_level), [*tokens, byte_level.eos_token_id]) == text + "<|end|>"


def test_a_character_of_several_tokens_stands_at_the_last_of_them(byte_level):
    tokens = byte_level.encode("a数b")
    assert len(tokens) == 5
    assert Spelling(byte_level)(tokens) == ["a", "", "", "数", "b"]


def test_a_character_that_was_cut_off_is_not_made_up(byte_level):
    tokens = byte_level.encode("a数")[:-1]
    pieces = Spelling(byte_level)(tokens)
    assert pieces[0] == "a"
    assert "数" not in pieces
    assert len(pieces) == len(tokens)
    # What comes after it is readable again.
    assert "".join(Spelling(byte_level)([*tokens, *byte_level.encode("the sum")])[len(tokens) :]) == "the sum"


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=12))
def test_any_text_comes_back(text, byte_level):
    assert joined(Spelling(byte_level), byte_level.encode(text)) == text


def test_a_stray_byte_does_not_spoil_what_follows(byte_level):
    tokens = byte_level.encode("数")
    assert Spelling(byte_level)([tokens[0], *tokens]) == [UNKNOWN, "", "", "数"]


def test_a_policy_that_says_half_characters_for_ever_is_spelled_in_a_few_calls(byte_level, monkeypatch):
    spelling, calls = Spelling(byte_level), []
    real = spelling._decoded
    monkeypatch.setattr(spelling, "_decoded", lambda tokens: calls.append(len(tokens)) or real(tokens))
    pieces = spelling(byte_level.encode("数")[:1] * 3000)
    assert pieces == [UNKNOWN] * 3000
    assert len(calls) < 20
    assert max(calls) <= 9


def test_a_space_that_a_text_cannot_begin_with_is_spelled():
    """As SentencePiece's tokenizers have it: decoded alone, a word loses its space."""
    words = Tokenizer(WordLevel({"<unk>": 0, "▁the": 1, "▁sum": 2, "▁a": 3}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = Metaspace(), MetaspaceDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert tokenizer.decode([2]) == "sum"
    assert Spelling(tokenizer)([1, 2]) == [" the", " sum"]


def test_the_tiny_tokenizers_pieces_are_its_text():
    tokenizer = tiny_tokenizer()
    tokens = [*tokenizer.encode("12 + 7 =\n19"), tokenizer.eos_token_id]
    assert joined(Spelling(tokenizer), tokens) == "12 + 7 =\n19<eos>"
    assert Spelling(tokenizer)([]) == []
    assert Spelling(tokenizer)(tokenizer.encode("a ")) == ["a", " "]


def test_a_step_of_random_rows_is_a_batch_again(tmp_path):
    random = batches.make(seed=1, num_groups=3, group_size=3, width=5, spread=0.1)
    batch = batch_of(random.mask, random.group, torch.arange(9.0), old_logprobs=random.old_logprobs)
    step = stored(tmp_path, batch, [update(range(9), random.logprobs)])
    assert isinstance(step.batch, Batch)
    picked = step.batch.rows(torch.tensor([4, 2]))
    assert torch.equal(picked.group, random.group[[4, 2]])
