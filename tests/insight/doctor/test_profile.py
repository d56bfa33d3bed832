"""A run's profile in doctor, on the page and at the end of a run; one that cannot be read is damage."""

import json
from pathlib import Path

import pytest

from proximo.api.endings import _profile
from proximo.cli import main
from proximo.insight.folder import RunFolder
from proximo.insight.page import overview
from tests.insight.page.browser import write_run
from tests.runs.test_step_profile import PROFILE

SENTENCE = "steps 3 to 4: admission takes 20% of a step of 10.00 s. First: no more rows a step"


@pytest.fixture
def folder(tmp_path) -> Path:
    run = write_run(tmp_path / "run", [{"step": 1, "outcome": 0.5}])
    (run / "profile.json").write_text(json.dumps(PROFILE.to_dict()))
    return run


def test_doctor_page_and_the_end_of_a_run_name_the_largest_loss(folder, capsys):
    main(["doctor", str(folder)])
    printed = capsys.readouterr().out
    assert SENTENCE in printed
    assert "    admission                                 3.0000  30.0%" in printed
    main(["doctor", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["profile"]["seconds"] == pytest.approx(10.0)
    shown = overview.health(RunFolder(folder), {})["profile"]
    assert shown[0].startswith(SENTENCE)
    assert _profile(folder) == ["", *shown]


def test_a_profile_is_no_finding_and_changes_no_exit_status(folder, capsys):
    assert main(["doctor", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_broken_profile_is_damage(folder, capsys):
    (folder / "profile.json").write_text("{")
    main(["doctor", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["message"] for each in found["findings"]] == ["profile.json cannot be read"]
    assert found["profile"] is None
    assert overview.health(RunFolder(folder), {})["profile"] is None
    assert _profile(folder) == []


def test_a_profile_that_is_a_link_is_not_followed(folder, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere.json"
    (folder / "profile.json").rename(elsewhere)
    (folder / "profile.json").symlink_to(elsewhere)
    with pytest.raises(SystemExit):
        main(["doctor", str(folder)])
    assert "is a symbolic link and is not followed" in capsys.readouterr().err
    assert _profile(folder) == []
