"""Published measurements: the errors that the page shows, and the one that must be small."""

from pathlib import Path

import pytest

from proximo_lab.cluster_plan.published import BEGIN, END, Comparison, comparisons, qwen_7b, tables

PAGE = Path(__file__).parents[3] / "docs/scale-simulation.md"


@pytest.fixture(scope="module")
def found() -> tuple[Comparison, ...]:
    return comparisons()


@pytest.mark.slow("simulates clusters")
def test_staleness_is_within_8_percent_of_verls_table_and_fitted_to_none_of_its_rows(found):
    (table,) = [each for each in found if each.title == verl_title()]
    assert [row.published for row in table.rows] == [231.34, 171.30, 146.11, 150.63]
    assert not any(row.fitted for row in table.rows)
    assert all(abs(row.error) < 0.08 for row in table.rows)


def verl_title() -> str:
    return "verl, Qwen2.5-Math-7B on 64:64 H20, staleness"


@pytest.mark.slow("simulates clusters")
def test_the_page_shows_these_errors(found):
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert shown == tables(found).strip(), "write it again: python -m proximo_lab.cluster_plan.published PAGE"


@pytest.mark.slow("simulates clusters")
def test_a_row_says_its_error(found):
    line = next(line for line in tables(found).splitlines() if line.startswith("| 32:32"))
    row = next(row for each in found for row in each.rows if row.what.startswith("32:32"))
    assert f"{row.error:+.1%}" in line
    assert line.endswith("| fitted |")
    assert row.error == pytest.approx(row.predicted / 189.26 - 1)


def test_sizes_of_a_published_model():
    assert qwen_7b().parameters == pytest.approx(7.616e9, rel=1e-3)
    assert qwen_7b().kv_bytes(2) == 57344
