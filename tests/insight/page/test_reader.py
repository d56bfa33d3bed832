"""What the page's reader is told: values by hand on the fixture, fates of groups, bounds, and bad questions."""

import base64
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import proximo
from proximo.algorithms import DAPO, GRPO, GSPO, SAPO, Algorithm, explain
from proximo.insight.folder import RunFolder
from proximo.insight.lens import layout
from proximo.insight.lens.states import TokenState
from proximo.insight.page import finding, lenses, reader, summaries
from proximo.losses import Clip
from tests.fixture import GROUP, LOG_RATIO, MASK, OLD, REF, REWARDS, ROLLOUT, assert_close
from tests.stored import UNSCORED, Asked, Said, store

LENGTHS = MASK.sum(1).tolist()
ADVANTAGES = proximo.advantages(GRPO, rewards=REWARDS, group=GROUP, mask=MASK)[0]


def fixture_group() -> Asked:
    """The four rows of tests/fixture.py."""
    said = [
        Said(
            pieces=[f"{row}{place} " for place in range(length)],
            reward=float(REWARDS[row]),
            old=OLD[row, :length].tolist(),
            log_ratio=LOG_RATIO[row, :length].tolist(),
            gap=(OLD - ROLLOUT)[row, :length].tolist(),
            reference=REF[row, :length].tolist(),
        )
        for row, length in enumerate(LENGTHS)
    ]
    return Asked(said, prompt="What is 1+1?", answer="2", problem="one")


def answers(*rewards: float, words: str = "yes", **more) -> list[Said]:
    return [Said([f"{words} {place}"], reward, **more) for place, reward in enumerate(rewards)]


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> RunFolder:
    return store(tmp_path_factory.mktemp("known"), GRPO, [fixture_group()])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> RunFolder:
    """Groups of every fate; two steps, in which one problem comes twice; no reference, and the sampler is trusted."""
    folder = tmp_path_factory.mktemp("mixed")
    alive = Asked(
        [*answers(1.0, 0.0), Said(["yes ", "0"], 0.5, truncated=True, parts={"right": 0.4, "short": 0.1})],
        problem="alive",
    )
    dead = Asked(answers(1.0, 1.0), prompt="Say YES", problem="dead")
    unscored = Asked(answers(UNSCORED, UNSCORED), problem="unscored")
    partly = Asked(answers(1.0, 0.0, UNSCORED), problem="partly")
    dropped = Asked(answers(0.0, 0.0), problem="dropped", dropped=True)
    store(folder, SAPO, [alive, dead, unscored, partly, dropped], step=3)
    return store(folder, SAPO, [dead, replace(alive, said=answers(0.0, 0.25))], step=7, passes=2)


def unpacked(row: dict, name: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(row["arrays"][name]), "<f4").copy()).double()


def states(row: dict) -> list[str]:
    return [TokenState(int(code)).name.lower() for code in unpacked(row, "state")]


def test_steps_and_the_algorithms_to_look_through(known, mixed):
    told = reader.steps(mixed, {})
    assert told["steps"] == [3, 7]
    assert told["own"] == "sapo"
    assert told["five"] == ["ppo", "grpo", "dapo", "gspo", "sapo"]
    names = [each["name"] for each in told["algorithms"]]
    assert names[0] == "sapo"
    assert sorted(names) == sorted(card.name for card in explain.CARDS)
    assert told["states"][TokenState.HIGH] == "high"
    assert reader.steps(known, {})["own"] == "grpo"


def test_a_step_in_a_few_numbers_a_completion(known):
    told = reader.step(known, {"step": "0"})
    rows = told["rows"]
    assert [row["length"] for row in rows] == [4, 2, 3, 1]
    assert [row["blocked"] for row in rows] == [1, 1, 1, 1]  # e^0.30 and e^0.22 over 1.2, e^-0.35 and e^-0.30 under 0.8
    assert [row["pushing"] for row in rows] == [4, 2, 3, 1]
    assert_close(torch.tensor([row["blocked_share"] for row in rows]), [1 / 4, 1 / 2, 1 / 3, 1], 1e-5)
    assert_close(torch.tensor([row["ratio_most"] for row in rows]), torch.tensor([-0.4, -0.35, 1.3, 0.22]).exp(), 1e-5)
    assert_close(torch.tensor([row["advantage_mean"] for row in rows]), ADVANTAGES[:, 0], 1e-6)
    assert_close(torch.tensor([row["gap_most"] for row in rows]), [0.9, -0.8, 0.1, 0.02], 1e-6)
    x = REF[3, 0] - OLD[3, 0] - LOG_RATIO[3, 0]
    assert_close(rows[3]["kl_mean"], x.exp() - x - 1, 1e-6)
    assert_close(rows[3]["entropy_mean"], -(OLD + LOG_RATIO)[3, 0], 1e-6)
    [group] = told["groups"]
    assert (group["fate"], group["why"], group["reward"]) == ("trained", "", 0.5)
    assert group["blocked_share"] == 4 / 10
    assert told["algorithm"]["band"] == [0.8, 1.2]
    assert told["algorithm"]["own"]
    assert_close(torch.tensor(told["ranges"]["advantage"]), [-math.sqrt(3) / 2, math.sqrt(3) / 2], 1e-5)
    low, high = told["ranges"]["ratio"]
    assert low * high == pytest.approx(1)
    assert 1.2 < high < math.exp(1.3)


BY_HAND = [
    # From the ratios of tests/fixture.py and the bands; of GSPO from each row's mean: −0.0375, −0.05, 0.3667, 0.22.
    (GRPO, [["high", "open", "open", "open"], ["open", "low"], ["low", "open", "open"], ["high"]]),
    (DAPO, [["high", "open", "open", "open"], ["open", "low"], ["low", "open", "open"], ["open"]]),
    (GSPO, [["open"] * 4, ["low"] * 2, ["open"] * 3, ["high"]]),
    (SAPO, [["soft", "open", "open", "soft"], ["soft", "soft"], ["soft", "open", "soft"], ["soft"]]),
    (explain.card("cispo"), [["open"] * 4, ["open"] * 2, ["open"] * 3, ["open"]]),
]


def value_of(named) -> tuple[str, Algorithm]:
    card = explain.same_as(named) if isinstance(named, Algorithm) else named
    assert card is not None
    return card.name, card.value


@pytest.mark.parametrize(("named", "expected"), BY_HAND, ids=[value_of(named)[0] for named, _ in BY_HAND])
def test_tokens_have_the_states_by_hand_and_the_gradient_of_autograd(known, named, expected):
    name, algorithm = value_of(named)
    rows = reader.group(known, {"step": "0", "group": "0", "as": name})["rows"]
    assert [states(row) for row in rows] == expected
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    tensors: dict[str, Any] = {"old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK, "group": GROUP}
    loss, _ = proximo.policy_loss(replace(algorithm, kl=None), logprobs=logprobs, **tensors)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.abs().sum() > 0.1
    for row, length in enumerate(LENGTHS):
        assert_close(unpacked(rows[row], "gradient"), gradient[row, :length], 1e-6)


def test_every_number_of_a_token(known):
    row = reader.group(known, {"step": "0", "group": "0"})["rows"][0]
    assert row["pieces"] == ["00 ", "01 ", "02 ", "03 "]
    assert row["tail"] == "00 01 02 03 "
    assert row["specials"] == []
    by_hand = {
        "old": OLD[0],
        "current": OLD[0] + LOG_RATIO[0],
        "sampler": ROLLOUT[0],
        "reference": REF[0],
        "ratio": LOG_RATIO[0].exp(),
        "token_ratio": LOG_RATIO[0].exp(),
        "advantage": ADVANTAGES[0],
        "through": torch.tensor([0.0, 1, 1, 1]),
        "weight": torch.full((4,), 1 / 16),
        "gap": OLD[0] - ROLLOUT[0],
        "entropy": -(OLD[0] + LOG_RATIO[0]),
    }
    for name, value in by_hand.items():
        assert_close(unpacked(row, name), value, 1e-6)
    x = REF[0] - by_hand["current"]
    assert_close(unpacked(row, "kl"), x.exp() - x - 1, 1e-6)
    assert_close(unpacked(row, "kl_gradient"), 0.04 * (1 - x.exp()) / 16, 1e-6)
    assert "own" not in row["arrays"]
    assert "value" not in row["arrays"]
    other = reader.group(known, {"step": "0", "group": "0", "as": "gspo"})["rows"][0]
    assert unpacked(other, "own").tolist() == unpacked(row, "state").tolist()


def test_a_step_read_in_blocks_has_the_numbers_of_the_whole(mixed, monkeypatch):
    whole = summaries.summary(lenses.looked(mixed, {"step": "3"}))
    monkeypatch.setattr(layout, "PLACES", 3)
    monkeypatch.setattr(summaries, "_summaries", lenses.Kept(4))
    monkeypatch.setattr(lenses, "_looks", lenses.Kept(4))
    assert len(mixed.step(3).layout.blocks()) > 3
    assert summaries.summary(lenses.looked(mixed, {"step": "3"})) == whole


def test_a_token_without_a_ratio_does_not_widen_the_gate_s_curve(tmp_path):
    """At a width of 3 the clip range of GSPO, of 0.0004, would be one line."""
    never = Said(["no"], 0.0, old=[-math.inf], log_ratio=[0.0])
    run = store(tmp_path, GSPO, [Asked([*answers(1.0), never])])
    look = lenses.looked(run, {"step": "0"})
    assert look.seen.ratio.isnan().tolist() == [False, True]
    assert max(lenses.shown_algorithm(look)["curve"]["log_ratio"]) < 0.001


def test_why_in_words_under_the_lens_and_under_the_run_s_own(known):
    own = reader.why(known, {"step": "0", "row": "0", "token": "0"})
    assert own == {"words": own["words"]}
    assert "1.3499 > 1.2" in own["words"]
    assert "no gradient" in own["words"]
    other = reader.why(known, {"step": "0", "row": "0", "token": "0", "as": "gspo"})
    assert other["own"] == own["words"]
    assert "full gradient passes" in other["words"]


def test_fates_of_groups_are_named(mixed):
    told = reader.step(mixed, {"step": "3"})
    assert [(group["fate"], group["why"]) for group in told["groups"]] == [
        ("trained", ""),
        ("dead", "no signal: every reward is 1"),
        ("unscored", "unscored: no grader could judge it"),
        ("trained", "1 unscored"),
        ("dropped", "dropped before training: every reward is 0"),
    ]
    rows = told["rows"]
    assert [row["row"] for row in rows if row["truncated"]] == [2]
    assert [row["row"] for row in rows if row["reward"] is None] == [5, 6, 9]
    assert [row["duplicate"] for row in rows[:3]] == [2, None, 0]  # by its text, however it was cut into tokens
    assert [row["fate"] for row in rows] == ["trained"] * 5 + ["unscored"] * 2 + ["trained"] * 2 + ["unscored"] + [
        "dropped"
    ] * 2
    other = reader.step(mixed, {"step": "3", "as": "dapo"})["groups"]
    assert (other[1]["fate"], other[1]["why"]) == ("dropped", "DAPO would drop it: every reward is 1")


def test_a_group_that_is_cut_at_the_limit_is_not_said_to_be_dropped_for_its_rewards(tmp_path):
    filtering = replace(GRPO, keep=replace(GRPO.keep, truncated=False))
    cut = Asked(answers(1.0, 0.0, truncated=True))
    run = store(tmp_path, filtering, [cut, Asked(answers(1.0, 1.0, truncated=True)), fixture_group()])
    told = [(group["fate"], group["why"]) for group in reader.step(run, {"step": "0"})["groups"]]
    assert told == [("dropped", "all completions are truncated and left out of the loss")] * 2 + [("trained", "")]


def test_the_share_without_a_gradient_is_of_the_tokens_that_would_push_everywhere(tmp_path):
    dead = Asked(answers(1.0, 1.0, log_ratio=[0.5]))
    run = store(tmp_path, GRPO, [fixture_group(), dead])
    told = reader.step(run, {"step": "0"})
    assert [row["pushing"] for row in told["rows"]] == [4, 2, 3, 1, 0, 0]
    assert [group["blocked_share"] for group in told["groups"]] == [0.4, None]
    assert reader.lens(run, {"step": "0"})["table"][0]["blocked"] == pytest.approx(0.4)


def test_what_was_not_stored_is_nothing_and_no_zero(mixed):
    told = reader.step(mixed, {"step": "3"})
    assert told["ranges"]["kl"] == [None, None]
    assert {row["kl_mean"] for row in told["rows"]} == {None}
    rows = reader.group(mixed, {"step": "3", "group": "4"})["rows"]
    assert states(rows[0]) == ["idle"]
    assert unpacked(rows[0], "entropy").isnan().all()
    assert "reference" not in rows[0]["arrays"]
    for name in ("step", "group", "lens", "why"):
        query = {"step": "3", "group": "2", "row": "5", "token": "0"}
        json.dumps(getattr(reader, name)(mixed, query), allow_nan=False)


def test_the_sampler_s_gap_is_only_known_where_the_policy_had_not_moved(mixed):
    first = reader.group(mixed, {"step": "3", "group": "0"})["rows"]
    assert unpacked(first[0], "gap").tolist() == [0.0]
    in_both_passes = reader.group(mixed, {"step": "7", "group": "1"})["rows"]
    assert unpacked(in_both_passes[0], "gap").tolist() == [0.0]  # of the first update, whatever pass is shown
    dropped = reader.group(mixed, {"step": "3", "group": "4"})["rows"]
    assert unpacked(dropped[0], "gap").isnan().all()


def test_the_last_pass_is_shown_unless_another_is_asked_for(tmp_path):
    run = store(tmp_path, GRPO, [fixture_group()], passes=2)
    assert reader.step(run, {"step": "0"})["pass"] == 1
    for number in (0, 1):
        row = reader.group(run, {"step": "0", "group": "0", "pass": str(number)})["rows"][0]
        assert_close(unpacked(row, "current"), OLD[0] + (number + 1) * LOG_RATIO[0], 1e-6)


def test_search_looks_into_prompts_and_completions_whatever_the_case(mixed):
    assert reader.step(mixed, {"step": "3", "find": "say yes"}) == {"matches": [3, 4]}
    assert reader.step(mixed, {"step": "3", "find": "YES 0"})["matches"] == [0, 2, 3, 5, 7, 10]
    assert reader.step(mixed, {"step": "3", "find": "no such"})["matches"] == []


def test_an_outline_says_at_once_what_the_whole_step_says_later(mixed):
    told, whole = (reader.step(mixed, {"step": "3", **more}) for more in ({"outline": "1"}, {}))
    names = ("row", "group", "sibling", "fate", "truncated", "reward", "outcome", "length", "size")
    assert [[row[name] for name in names] for row in told["rows"]] == [
        [row[name] for name in names] for row in whole["rows"]
    ]
    assert {key for row in told["rows"] for key in row} == {key for row in whole["rows"] for key in row}
    names = ("group", "problem", "prompt", "answer", "reward")
    assert [[group[name] for name in names] for group in told["groups"]] == [
        [group[name] for name in names] for group in whole["groups"]
    ]
    assert told["tokens"] == sum(row["size"] for row in whole["rows"])


def test_a_text_is_found_in_all_steps_some_at_a_time(mixed, monkeypatch):
    told = reader.steps(mixed, {"find": "YES 0"})
    assert [(hit["step"], hit["row"]) for hit in told["found"]][:2] == [(3, 0), (3, 2)]
    assert {hit["step"] for hit in told["found"]} == {3, 7}
    assert told["next"] is None
    monkeypatch.setattr(finding, "SECONDS", -1.0)
    first = reader.steps(mixed, {"find": "YES 0"})
    assert first["next"] == 7
    rest = reader.steps(mixed, {"find": "YES 0", "from": "7"})
    assert first["found"] + rest["found"] == told["found"]


def test_a_problem_through_time(mixed):
    assert reader.steps(mixed, {"problem": "alive"})["found"] == [
        {"step": 3, "group": 0, "reward": 0.5, "rows": 3},
        {"step": 7, "group": 1, "reward": 0.125, "rows": 2},
    ]
    assert reader.steps(mixed, {"problem": "unscored"})["found"][0]["reward"] is None
    assert reader.steps(mixed, {"problem": "never asked"})["found"] == []


def test_rows_of_the_ledger_that_are_not_ours_are_passed_over(tmp_path):
    run = store(tmp_path, GRPO, [replace(fixture_group(), problem='ö "1"')])
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(
            b'{"problem": "\\u00f6 \\"1\\"", "step": [0]}\n{"problem": "\\u00f6 \\"1\\"", "st\n\xff"\\u00f6 \\"1\\""\n'
        )
    assert [each["step"] for each in reader.steps(run, {"problem": 'ö "1"'})["found"]] == [0]


def test_a_damaged_step_is_left_out_of_a_problem_s_time_and_says_so_itself(tmp_path):
    for step in (0, 1):
        run = store(tmp_path, GRPO, [fixture_group()], step=step)
    run.step_file(0).write_bytes(b"PAR1 and nothing else")
    assert [each["step"] for each in reader.steps(run, {"problem": "one"})["found"]] == [1]
    with pytest.raises(ValueError, match="step-000000.parquet: [^\n]*$"):
        reader.step(run, {"step": "0"})


def test_an_answer_is_bounded_and_the_rest_can_be_asked_for(tmp_path, monkeypatch):
    long = Said([f"{place}," for place in range(20)], 1.0, end="<end>")
    run = store(tmp_path, GRPO, [Asked([long, Said(["x" * 1000], 0.0)], prompt="p" * 30_000)])
    monkeypatch.setattr(reader, "BUDGET", 12)
    whole = reader.group(run, {"step": "0", "group": "0"})
    assert [len(row["pieces"]) for row in whole["rows"]] == [6, 1]
    assert whole["rows"][0]["length"] == 21
    assert len(unpacked(whole["rows"][0], "state")) == 6
    assert whole["rows"][1]["pieces"][0] == "x" * 400 + "… (600 more characters)"
    assert (len(whole["prompt"]), whole["prompt_cut"]) == (20_000, 10_000)
    [more] = reader.group(run, {"step": "0", "group": "0", "row": "0", "from": "12"})["rows"]
    assert more["pieces"] == [f"{place}," for place in range(12, 20)] + ["<end>"]
    assert more["specials"] == [8]


def test_special_tokens_are_those_that_are_not_in_the_text():
    assert reader._specials(["Hi", " you", "<end>"], "Hi you") == [2]
    assert reader._specials([" Hi", " you"], "Hi you") == []  # the tokenizer drops the first space
    assert reader._specials(["<a>", "Hi", "", "ö"], "Hiö") == [0]
    # Bytes that are no character of their own: spelled otherwise in the text, and what follows is found again.
    assert reader._specials(["ok ", "\ufffd", "\ufffdx", " foo", " bar", "<end>"], "ok \ufffdx foo bar") == [5]
    assert reader._specials(["Hi", " .", " you", " too"], "Hi. you too") == [1]


def test_the_lens_has_the_run_s_own_first_and_then_the_five_or_all(known, monkeypatch):
    monkeypatch.setattr(reader, "AT_ONCE", 3)
    five = reader.lens(known, {"step": "0"})["table"]
    assert [row["name"] for row in five] == ["grpo", "ppo", "dapo", "gspo", "sapo"]
    own, dapo, gspo = five[0], five[2], five[3]
    assert own["cosine"] == pytest.approx(1)
    assert own["flips"] == 0
    assert own["blocked"] == pytest.approx(0.4)
    assert (dapo["opened"], dapo["closed"]) == (1, 0)  # the last row's only token
    # Row 1 is stopped whole, of which one token was; rows 0 and 2 are open, of which one each was not.
    assert (gspo["opened"], gspo["closed"]) == (2, 1)
    whole = reader.lens(known, {"step": "0", "all": "1"})["table"]
    assert sorted(row["name"] for row in whole) == sorted(card.name for card in explain.CARDS)
    assert {row["name"]: row["cosine"] for row in whole}["gspo"] == pytest.approx(gspo["cosine"])


def test_an_algorithm_that_no_paper_has_is_the_run_s_own(tmp_path):
    run = store(tmp_path, replace(GRPO, gate=Clip(0.2, 0.5)), [fixture_group()])
    told = reader.step(run, {"step": "0"})["algorithm"]
    assert told["name"] == "own"
    assert told["own"]
    assert "gate.high 0.5 instead of 0.2" in told["idea"]
    assert reader.steps(run, {})["algorithms"][0]["name"] == "own"
    rows = reader.group(run, {"step": "0", "group": "0", "as": "grpo"})["rows"]
    assert states(rows[3]) == ["high"]
    assert TokenState(int(unpacked(rows[3], "own")[0])) == TokenState.OPEN
    assert reader.step(run, {"step": "0", "as": "own"})["algorithm"]["name"] == "own"


def test_a_look_is_kept_until_the_step_is_written_anew(tmp_path):
    run = store(tmp_path, GRPO, [fixture_group()])
    query = {"step": "0"}
    assert lenses.looked(run, query) is lenses.looked(RunFolder(tmp_path), query)
    assert lenses.looked(run, {"step": "0", "as": "gspo"}) is not lenses.looked(run, query)
    before = lenses.looked(run, query)
    store(tmp_path, GRPO, [replace(fixture_group(), said=answers(0.0, 1.0))])
    after = lenses.looked(run, query)
    assert after is not before
    assert len(after.step.batch) == 2


BAD = [
    ("step", {}, "step is None: give a whole number"),
    ("step", {"step": "-1"}, "step is '-1': give a whole number"),
    ("step", {"step": "1e3"}, "give a whole number"),
    ("step", {"step": "9" * 40}, "give a whole number"),
    ("step", {"step": "4"}, "no rollouts of step 4"),
    ("step", {"step": "0", "as": "a2c"}, "no algorithm is called 'a2c'"),
    ("step", {"step": "0", "pass": "1"}, "pass is 1, but step 0 has 1"),
    ("group", {"step": "0"}, "group is None"),
    ("group", {"step": "0", "group": "5"}, "group is 5: step 0 has no such group"),
    ("group", {"step": "0", "group": "0", "row": "9"}, "row is 9: it is not of group 0"),
    ("why", {"step": "0", "row": "0", "token": "4"}, "row 0, token 4: step 0 has no such token"),
    ("why", {"step": "0", "row": "4", "token": "0"}, "no such token"),
    ("lens", {"step": "x"}, "step is 'x'"),
]


@pytest.mark.parametrize(("handler", "query", "said"), BAD)
def test_a_bad_question_is_answered_in_one_line(known, handler, query, said):
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        getattr(reader, handler)(known, query)
    assert said in str(error.value)


def test_a_run_of_another_kind_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.toml").write_text("data = 'rows.jsonl'\n")
    with pytest.raises(ValueError, match="^[^\n]*$"):
        reader.steps(RunFolder(tmp_path), {})
