"""Lists on the command line: values up to the next flag, or with commas, as before."""

import pytest

from proximo.cli.arguments import take_list
from proximo.cli.run_folders import take_allowed


@pytest.mark.parametrize(
    ("arguments", "values", "rest"),
    [
        (["--steps", "1", "2", "--json"], ["1", "2"], ["--json"]),
        (["--steps", "1,2", "runs/a"], ["1", "2"], ["runs/a"]),
        (["--steps=1", "2"], ["1"], ["2"]),
        (["runs/a", "--steps", "1", "2"], ["1", "2"], ["runs/a"]),
        (["--steps", "all", "runs/a", "runs/b"], ["all"], ["runs/a", "runs/b"]),
        (["runs/a"], None, ["runs/a"]),
    ],
)
def test_values_come_with_spaces_or_commas(arguments: list[str], values: list[str] | None, rest: list[str]):
    assert take_list(arguments, "--steps", str.isdigit) == values
    assert arguments == rest


def test_fields_that_may_change_are_a_list(tmp_path):
    (tmp_path / "data").write_text("")
    file = str(tmp_path / "data")
    arguments = ["--allow-change", "steps", "training.learning-rate", "--allow-change", "seed", file, "--run", "runs/a"]
    assert take_allowed(arguments) == ["steps", "training.learning_rate", "seed"]
    assert arguments == [file, "--run", "runs/a"]
    arguments = ["--allow-change", "steps", "run.toml"]
    assert (take_allowed(arguments), arguments) == (["steps"], ["run.toml"])
