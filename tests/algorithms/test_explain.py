"""What `proximo explain` says: complete, true to the value, and one line for what was changed."""

import re
from dataclasses import dataclass, replace
from typing import get_type_hints

import pytest
import torch

from proximo import algorithms
from proximo.algorithms import DAPO, GRPO, GSPO, GSPO_TOKEN, LUSPO, PPO, SAPO, VAPO, Algorithm, UnusualChoice, explain
from proximo.algorithms.explain import UNUSED, objective
from proximo.cli import main
from proximo.config.unions import classes
from proximo.losses import (
    Clip,
    ClipCovariance,
    EntropyBonus,
    IcePop,
    KeepMixed,
    KlLoss,
    KlReward,
    PromptMean,
    SoftOverlong,
    TokenMean,
    TokenTruncated,
)
from proximo.losses.pieces.divergences import Divergence
from proximo.losses.pieces.gates import Gate
from proximo.losses.pieces.protocols import Description, GateTraits
from proximo.rl.config import TrainingOptions
from proximo.runs.metric_docs import meaning
from tests import ROOT

PIECES = {kind for stage in get_type_hints(Algorithm).values() for kind in classes(stage)}
"""Each class of the package that a stage may hold."""
ESTIMATORS = set(classes(Divergence))


def silent(pieces: set[type], member: str) -> set[str]:
    """Names of the pieces that do not say this of themselves."""
    return {kind.__name__ for kind in pieces if not hasattr(kind, member)}


def test_every_piece_gives_its_formula_and_its_peers():
    assert {Clip, KlLoss, EntropyBonus, SoftOverlong} < PIECES
    assert silent((PIECES | ESTIMATORS) - {KlLoss}, "formula") == set()
    assert silent(PIECES, "peers") == set()
    assert {stage for stage in explain.STAGES if getattr(Algorithm(), stage) is None} == UNUSED.keys()


def test_a_forgotten_formula_is_noticed():
    @dataclass(frozen=True)
    class Forgotten:
        peers = ("none", "none")

    assert silent({Clip, Forgotten}, "formula") == {"Forgotten"}
    assert silent({Clip, Forgotten}, "peers") == set()


@pytest.mark.parametrize("kind", sorted(PIECES | ESTIMATORS, key=str))
def test_what_a_piece_says_of_itself_is_of_the_right_kind(kind: type):
    said = Description.read(kind())
    assert kind is KlLoss or said.formula is not None
    assert all(isinstance(words, str) and words for words in said.peers)


@pytest.mark.parametrize("gate", classes(Gate))
def test_a_gate_says_what_its_statistics_mean(gate: type):
    statistics, one = GateTraits.read(gate()).statistics, torch.zeros(1, 1)
    named = {} if statistics is None else statistics(one, one, torch.ones(1, 1, dtype=torch.bool))
    assert Description.read(gate()).metrics.keys() == named.keys()
    assert all(meaning(name) == words for name, words in Description.read(gate()).metrics.items())


def test_every_named_algorithm_has_a_card():
    named = {
        name.lower().replace("_", "-"): value
        for name, value in vars(algorithms).items()
        if isinstance(value, Algorithm)
    }
    assert {card.name: card.value for card in explain.CARDS} == named


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "gspo", "sapo"])
def test_the_five_give_a_source_for_every_choice_they_make(name: str):
    card = explain.card(name)
    assert card is not None
    for stage in explain.STAGES:
        if getattr(card.value, stage) is not None:
            assert explain.source(card, stage), f"{name} does not say why it chooses so for {stage}"


def test_sources_name_only_stages_that_exist():
    for card in explain.CARDS:
        assert card.sources.keys() <= set(explain.STAGES)


@pytest.mark.parametrize(
    ("algorithm", "lines"),
    [
        (GRPO, [
            "J(θ) = (1/B) Σ_i (1/|y_i|) Σ_t [ min( ρ·A, clip(ρ, 0.8, 1.2)·A ) − 0.04 · KL ]",
            "ρ = π(y_t) / π_old(y_t)",
            "A = (R − group mean) / (group std + 1e-06),  ddof 1;  0 if all R are equal",
            "KL = π_ref/π − log(π_ref/π) − 1",
        ]),
        (GSPO, [
            "J(θ) = (1/B) Σ_i (1/|y_i|) Σ_t min( ρ·A, clip(ρ, 0.9997, 1.0004)·A )",
            "ρ = ( Π_t π(y_t) / π_old(y_t) )^(1/|y|)",
            "A = (R − group mean) / (group std + 1e-06),  ddof 1;  0 if all R are equal",
        ]),
        (SAPO, [
            "J(θ) = (1/B) Σ_i (1/|y_i|) Σ_t (4/τ)·σ( τ(ρ − 1) ) · A,  τ = 1 if A > 0 else 1.05",
            "ρ = π(y_t) / π_old(y_t)",
            "A = (R − group mean) / (group std + 1e-06),  ddof 1;  0 if all R are equal",
        ]),
        (DAPO, [
            "J(θ) = (1/N) Σ_i Σ_t min( ρ·A, clip(ρ, 0.8, 1.28)·A )",
            "ρ = π(y_t) / π_old(y_t)",
            "A = (R − group mean) / (group std + 1e-06),  ddof 1;  0 if all R are equal",
            "R = task score − u · (|y| − L + C)/C where positive, at most 1;  L = completion limit, C = L/5, "
            "u = half of what a right answer earns more than a wrong one",
            "over groups with both right and wrong task scores",
        ]),
        (PPO, [
            "J(θ) = (1/N) Σ_i Σ_t min( ρ·A, clip(ρ, 0.8, 1.2)·A )  − 0.1 · ½(V − return)², V within ±0.2 of V_old",
            "ρ = π(y_t) / π_old(y_t)",
            "A = whitened over all sampled tokens: "
            "Σ_l (γλ)^l δ_t+l,  δ_t = R_t + γ·V_t+1 − V_t,  γ = 1, λ = 0.95",
            "R = task score − 0.05 · (log π − log π_ref) at every token",
        ]),
    ],
    ids=["grpo", "gspo", "sapo", "dapo", "ppo"],
)  # fmt: skip
def test_formulas_of_the_five(algorithm: Algorithm, lines: list[str]):
    assert objective(algorithm) == lines


def test_the_formula_follows_the_value():
    changed = replace(
        DAPO,
        gate=Clip(0.1, 0.3, dual=3.0),
        weights=PromptMean(),
        correct=IcePop(0.5, 5.0),
        select=ClipCovariance(),
        shape=(SoftOverlong(100, 20), KlReward(0.2)),
        keep=KeepMixed(truncated=False),
        extra=EntropyBonus(0.01),
    )
    text = "\n".join(objective(changed))
    for part in (
        "clip(ρ, 0.9, 1.3)", "3·A if A < 0", "1/P", "w_μ = π_old/μ within [0.5, 5], else 0", "0.0002 of the tokens",
        "L = 100, C = 20", "− 0.2 · (log π − log π_ref)", "truncated completions masked", "+ 0.01 · entropy",
    ):  # fmt: skip
        assert part in text, part


def test_every_named_formula_prints_and_no_two_algorithms_read_the_same():
    texts = ["\n".join(objective(card.value)) for card in explain.CARDS]
    assert len(set(texts)) == len(texts)


def test_changes_are_named_field_by_field():
    card = explain.card("dapo")
    assert card is not None
    assert explain.changes(card, DAPO) == []
    (line,) = explain.changes(card, replace(DAPO, gate=Clip(0.2, 0.2)))
    assert line.startswith("gate.high is 0.2, not 0.28 (eq. 10")
    assert explain.changes(card, replace(DAPO, weights=PromptMean()))[0].startswith(
        "weights is PromptMean(), not TokenMean()"
    )
    assert explain.changes(card, replace(DAPO, correct=TokenTruncated())) == ["correct is TokenTruncated(cap=2), not –"]


def test_command_prints_the_whole_card(capsys):
    assert main(["explain", "dapo"]) == 0
    text = capsys.readouterr().out
    for number, stage in enumerate(explain.STAGES, start=1):
        assert f"{number:>2} {stage}" in text
    assert "clip(ρ, 0.8, 1.28)" in text
    assert "epsilon_high" in text
    assert "clip_ratio_c 3.0" in text
    assert "No longer" not in text


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "gspo"])
def test_explain_and_the_page_agree_on_verls_dual_clip(name: str):
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| Dual clip |"))
    card = explain.card(name)
    assert card is not None
    ((_, _, [peer]),) = (each for each in explain.stages(card.value) if each[0] == "gate")
    on_page, explained = row.split("|")[-2], peer.verl
    assert ("**on**" in on_page) != ("not read" in on_page)
    assert ("is on by default" in explained, "is not read" in explained) == ("**on**" in on_page, "not read" in on_page)


def test_the_page_says_when_refilling_ends_and_where_surplus_groups_go():
    page = (ROOT / "docs" / "algorithms" / "dapo.md").read_text()
    assert f"| after as many prompts as `training.refill_rounds` = {TrainingOptions().refill_rounds} rounds" in page
    assert "| they are given up unread, and the next step begins with them, sampled by its own weights;" in page


def test_luspo_has_gspos_loss_at_verl():
    gates = [explain.stages(value)[5] for value in (GSPO, GSPO_TOKEN, LUSPO)]
    assert {stage for stage, _, _ in gates} == {"gate"}
    assert all("clip_ratio_c is not read" in peer.verl for _, _, peers in gates for peer in peers)


@pytest.mark.parametrize("card", explain.CARDS, ids=lambda card: card.name)
def test_no_algorithm_needs_two_losses_of_verl_at_once(card: explain.Card):
    named = {
        match
        for _, _, peers in explain.stages(card.value)
        for peer in peers
        for match in re.findall(r"^loss_mode (\w+)", peer.verl)
    }
    assert len(named) <= 1


def test_sapo_has_verls_sapo_and_nothing_of_vanilla():
    text = " ".join(peer.verl for _, _, peers in explain.stages(SAPO) for peer in peers)
    assert "loss_mode sapo" in text
    assert "vanilla" not in text


def test_the_band_is_explained_where_its_meaning_depends_on_the_length(capsys):
    named = {card.name for card in explain.CARDS if explain.what_the_band_means(card.value)}
    assert named == {"gspo", "gspo-token", "luspo"}
    # (0.05 / 4e-4)² tokens; 0.05/√3 is 0.0289 and 0.05/100 is 0.0005.
    text = " ".join(explain.what_the_band_means(GSPO))
    assert "as wide at about 15,600 tokens" in text
    assert "0.029 at 3 tokens, 0.005 at 100 tokens, 0.0005 at 10,000 tokens" in text
    assert "at about 2 tokens" in " ".join(explain.what_the_band_means(replace(GSPO, gate=Clip(0.03, 0.04))))
    with pytest.warns(UnusualChoice):
        wide = replace(GSPO, gate=Clip(0.2, 0.2))  # (0.05 / 0.2)² is less than any completion has
    text = " ".join(explain.what_the_band_means(wide))
    assert "0.029 at 3 tokens" in text
    assert "widen" not in text
    assert main(["explain", "gspo"]) == 0
    assert "15,600 tokens" in capsys.readouterr().out


def test_command_says_in_one_line_what_is_no_longer_dapo(capsys):
    assert main(["explain", "dapo", "--gate.high", "0.2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("No longer")]
    assert len(lines) == 1
    assert lines[0].startswith("No longer DAPO: gate.high is 0.2, not 0.28")


def test_command_recognises_another_name_and_forgives_spelling(capsys):
    assert main(["explain", "GSPO_Token"]) == 0
    assert "GSPO-token" in capsys.readouterr().out
    assert main(["explain", "grpo", "--kl.coefficient", "0.5"]) == 0
    assert "No longer GRPO: kl.coefficient is 0.5, not 0.04" in capsys.readouterr().out


def test_command_prints_the_table(capsys):
    assert main(["explain", "--all"]) == 0
    text = capsys.readouterr().out
    for card in explain.CARDS:
        assert f"\n{card.name} " in text
    assert "SequenceProductRatio" in text


def test_help_and_empty_lines_say_what_there_is(capsys):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: proximo COMMAND")
        assert "proximo explain NAME" in text
    for arguments in (["explain"], ["explain", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: proximo explain ")
        assert "(NAME | --all)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "gspoo"], "no algorithm is called 'gspoo', the nearest is 'gspo'"),
        (["explain", "--all", "dapo"], "explain --all takes nothing else"),
        (["trian"], "no command is called 'trian'"),
        (["explain", "dapo", "--gate.low", "-1"], "gate.low -1.0"),
        (["explain", "sapo", "--gate.high", "0.3"], "--gate.high"),
        (["explain", "dapo", "--gate.dual", "1.1"], "gate.dual is 1.1"),
    ],
)
def test_bad_input_exits_2_with_one_clear_error(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unusual_choice_is_said_on_stderr(capsys):
    assert main(["explain", "gspo", "--gate.low", "0.2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("unusual: gate Clip(low=0.2")
    assert captured.err.count("unusual") == 1


def test_tuples_and_wrappers_are_written_out():
    assert explain.choice(VAPO.extra) == "ValueLoss(coefficient=0.1, clip=0.2), PositiveNll(coefficient=0.1, above=0)"
    assert explain.choice(PPO.advantage) == "TokenWhitened(of=Gae(discount=1, decay=0.95), epsilon=1e-08)"
    assert explain.choice(TokenMean()) == "TokenMean()"
