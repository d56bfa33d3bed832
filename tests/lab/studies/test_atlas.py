"""The atlas: every claim has a verdict with a command, or the reason why there is none."""

import html
import json
import re
from dataclasses import replace

import pytest

from proximo.insight.charts.drawing import NAME, short
from proximo_lab.studies.atlas.claims import CLAIMS
from proximo_lab.studies.atlas.page import NO_VERDICT, NOT_RUN, PAGE, atlas, atlas_rows
from proximo_lab.studies.designs import STUDIES
from proximo_lab.studies.study import design_hash
from proximo_lab.studies.wording import plain_words
from tests import ROOT

PAGES = ROOT / "docs/studies"


def test_every_claim_has_a_verdict_with_a_command_or_a_reason(tmp_path):
    assert [claim.number for claim in CLAIMS] == list(range(1, 58))
    for row in atlas_rows(tmp_path):
        claim = row.claim
        if row.verdict == NO_VERDICT:
            assert claim.reason, claim
        else:
            assert len(row.command) > 2, claim
            assert row.verdict == NOT_RUN or claim.measured, claim
        assert bool(claim.verdict) == bool(claim.measured) == bool(claim.command), claim


def test_every_contrast_answers_a_claim_that_exists():
    known = {claim.number for claim in CLAIMS}
    for study in STUDIES:
        asked = {number for contrast in study.contrasts for number in contrast.claims}
        assert asked, study.name
        assert asked <= known, study.name


def test_a_study_that_was_run_gives_its_claims_their_verdict(tmp_path):
    study = STUDIES[0]
    found = {
        "what": "it keeps more entropy",
        "claims": [19],
        "verdict": "not detectable at this size",
        "mean": 0.01,
        "low": -0.01,
        "high": 0.03,
        "half": 0.02,
        "unit": "nats",
        "seeds": 8,
    }
    facts = {"hash": design_hash(study), "complete": True, "contrasts": [found]}
    (tmp_path / f"{study.name}.json").write_text(json.dumps(facts))
    [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 19]
    assert row.verdict == "not detectable at this size: 0.02 nats could have been seen"
    assert row.measured == ("it keeps more entropy: +0.01 nats (−0.01 to +0.03, 8 seeds), not detectable at this size")
    assert row.links == (f"[{study.name}]({study.name}.md) ([figure]({study.name}.svg))",)
    # The word is the first contrast's, and is said to be where another one differs.
    other = found | {"what": "and learns more", "verdict": "holds here"}
    for more, said in (([found], ""), ([other], ", the first of 2 contrasts, which differ")):
        (tmp_path / f"{study.name}.json").write_text(json.dumps(facts | {"contrasts": [found, *more]}))
        [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 19]
        assert row.verdict == "not detectable at this size: 0.02 nats could have been seen" + said
    # Which contrasts answer a claim is the study's word: findings that were stored before it changed still count.
    (tmp_path / f"{study.name}.json").write_text(json.dumps(facts | {"contrasts": [found | {"claims": []}]}))
    [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 19]
    assert row.verdict.startswith("not detectable at this size")
    # Results of another design, or of some of the runs, are none.
    for wrong in ({"hash": "other"}, {"complete": False}):
        (tmp_path / f"{study.name}.json").write_text(json.dumps(facts | wrong))
        [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 19]
        assert row.verdict == NOT_RUN


def test_numbers_of_several_studies_say_whose_they_are(tmp_path):
    found = {"what": "b learns more", "claims": [57], "verdict": "holds here", "unit": "share", "seeds": 5}
    for study, low in zip([each for each in STUDIES if each.name.startswith("five-")], (0.1, 0.2, 0.3), strict=True):
        facts = {"hash": design_hash(study), "complete": True}
        contrast = found | {"mean": low + 0.1, "low": low, "high": low + 0.2, "half": 0.1, "counts": 0.02}
        (tmp_path / f"{study.name}.json").write_text(json.dumps(facts | {"contrasts": [contrast]}))
    row = list(atlas_rows(tmp_path))[56]
    assert row.measured.startswith(
        "`five-length`: b learns more: +0.2 share (+0.1 to +0.3, 5 seeds), reproduced. "
        "`five-chain`: b learns more: +0.3 share (+0.2 to +0.4, 5 seeds), reproduced. `five-mixture`: "
    )


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.01, 0.0, "reproduced"),  # nothing is lost without it
        (0.03, 0.05, "reproduced"),  # much is gained
        (-0.06, -0.03, "not reproduced"),  # much is lost
        (-0.03, 0.02, "not detectable at this size: 0.025 share could have been seen"),  # a loss is not excluded
    ],
)
def test_what_is_not_needed_may_be_left_out_without_a_loss(tmp_path, low, high, word):
    study = next(study for study in STUDIES if study.name == "kl")
    interval = {"mean": (low + high) / 2, "low": low, "high": high, "half": (high - low) / 2}
    found = {"what": "more without", "claims": [28], "verdict": "any", "unit": "share", "seeds": 5, "counts": 0.02}
    facts = {"hash": design_hash(study), "complete": True, "contrasts": [found | interval]}
    (tmp_path / "kl.json").write_text(json.dumps(facts))
    [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 28]
    assert row.verdict == word


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.2, 0.4, "reproduced"),  # five of eight fewer collapses with it are excluded
        (-0.9, -0.5, "not reproduced"),  # it saves most
        (-0.7, 0.03, "not detectable at this size: 0.5 share of the seeds could have been seen"),
        (0.6, 0.9, "reproduced"),  # it does harm
    ],
)
def test_what_is_not_needed_brings_nothing_where_it_is_added(tmp_path, low, high, word):
    study = next(study for study in STUDIES if study.name == "mixture")
    interval = {"mean": (low + high) / 2, "low": low, "high": high, "half": (high - low) / 2, "visible": 0.5}
    found = {"what": "rarer", "verdict": "any", "unit": "share of the seeds", "seeds": 8, "counts": -0.625}
    facts = {"hash": design_hash(study), "complete": True, "contrasts": [found | interval for _ in study.contrasts]}
    (tmp_path / "mixture.json").write_text(json.dumps(facts))
    [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 45]
    assert row.verdict == word


def test_a_claim_is_decided_by_the_study_that_was_made_for_it():
    [row] = [row for row in atlas_rows(PAGES) if row.claim.number == 11]
    assert next(iter(row.contrasts)) == "sapo"
    assert row.verdict.startswith("opposite effect")
    assert all(claim.decides in {"", *(study.name for study in STUDIES)} for claim in CLAIMS)


def test_what_a_verdict_leaves_open_is_said_beside_it():
    [row] = [row for row in atlas_rows(PAGES) if row.claim.number == 46]
    assert row.verdict.startswith("reproduced: after the fall, while from 4 steps before it")


def test_the_page_is_what_is_known():
    assert (PAGES / PAGE).read_text() == atlas(PAGES), (
        "make it anew: python -m proximo_lab.studies --publish docs/studies"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"hash": 1}', "\xff", "whole but for its findings"])
def test_a_damaged_file_is_a_study_that_was_not_run(tmp_path, text):
    study = STUDIES[0]
    facts = {"hash": design_hash(study), "complete": True}
    text = json.dumps(facts) if text.startswith("whole") else text
    (tmp_path / f"{study.name}.json").write_bytes(text.encode("latin-1"))
    [row] = [row for row in atlas_rows(tmp_path) if row.claim.number == 19]
    assert row.verdict == NOT_RUN


def test_no_verdict_without_an_interval():
    for row in atlas_rows(PAGES):
        if row.verdict.partition(":")[0] not in ("proven", "proven false", NO_VERDICT, NOT_RUN):
            assert re.search(r"[(][+−]?[0-9.]+ to [+−]?[0-9.]+", row.measured), row.claim


def test_a_smaller_gradient_is_no_verdict_on_its_noise():
    """The noise of a gradient is how little two halves of a step agree on it, whatever its norm."""
    asked = [each for study in STUDIES for each in study.contrasts if 51 in each.claims]
    assert asked
    assert {each.measure.unit for each in asked} == {"cosine"}


@pytest.mark.parametrize(
    "study", [each for each in STUDIES if (PAGES / f"{each.name}.md").exists()], ids=lambda each: each.name
)
def test_a_page_says_what_its_study_says(study):
    """Caveats and what was noticed afterwards are sentences of the study, which a page from earlier runs could lack."""
    page = (PAGES / f"{study.name}.md").read_text()
    for sentence in (*study.caveats, *study.afterwards):
        assert f"\n- {plain_words(sentence)}\n" in page, sentence
    assert design_hash(study) in page


@pytest.mark.parametrize("study", [each for each in STUDIES if len(each.arms) > 1], ids=lambda each: each.name)
def test_a_figure_names_its_arms_whole(study):
    drawn = (PAGES / f"{study.name}.svg").read_text()
    labels = re.findall(r'<text class="label"[^>]*>([^<]*) [^ <]*<', drawn)
    assert labels
    names = study.drawn or [arm.name for arm in study.arms]
    assert set(map(html.unescape, labels)) <= {
        short(name, 2 * NAME) for name in names
    }  # an arm without a curve has no label


def test_no_figure_without_the_number_of_seeds():
    for path in PAGES.glob("*.svg"):
        assert re.search(r"[0-9]+ seeds|seeds: [0-9]+", path.read_text()), path.name


def test_what_was_noticed_afterwards_changes_no_design():
    for study in STUDIES:
        assert design_hash(study) == design_hash(replace(study, afterwards=("something",)))
