"""docs/performance.md is written from the stored readings, and from nothing else."""

import json
from pathlib import Path

import pytest

from proximo_lab.bench.page import SECTION, filled, markdown, section_text, work_of
from proximo_lab.bench.readings import Reading, current, read_results
from proximo_lab.bench.running import main

ROOT = Path(__file__).parents[3]
GPU = "NVIDIA H200"


def reading(
    name: str, date: str, figures=None, ratios=None, *, device: str = GPU, table: str = "rollout", **stored
) -> Reading:
    around = {"device": device, "cores": 2, "clock": "ticks", "versions": {"torch": "2.11", "trl": None}}
    row = {"name": name, "figures": figures or {}, "ratios": ratios or {}, "verdicts": [], "note": "", "refused": False}
    return Reading(table, date, {**row, "details": {}, "around": around | stored.pop("around", {}), **stored})


def test_the_page_is_what_the_command_writes():
    page, readings = (ROOT / "docs/performance.md").read_text(), read_results(ROOT / "benchmarks/results")
    assert page == filled(page, readings), "run `proximo bench page`"
    sections = [(table, place, bool(ablated)) for table, place, ablated in SECTION.findall(page)]
    assert len(sections) == page.count("<!-- bench end -->")
    assert {(each.table, each.section, each.is_ablation) for each in readings} <= set(sections)


def test_the_newest_reading_counts_and_the_newest_with_each_peer():
    old = reading("a", "2026-01-01", ratios={"× TRL best": "2", "× TRL static": "3"})
    newer = reading("a", "2026-01-02", ratios={"× TRL best": "4"})
    alone, other = reading("a", "2026-01-03"), reading("a", "2026-01-01", device="aarch64")
    assert current([old, other, newer, alone]) == [old, other, newer, alone]
    lost = reading("a", "2026-01-01", ratios={"× TRL best": "2"})
    assert current([lost, newer, alone]) == [newer, alone]
    assert current([alone, reading("a", "2026-01-04")])[0].date == "2026-01-04"


def test_a_section_has_rows_columns_targets_and_versions():
    verdict = {"what": "tok/s", "value": 8.0, "bound": 9.0, "at_least": True, "reached": False}
    rows = [
        reading("later", "2026-01-02", {"ours s": "2"}, note="no memory", refused=True, around={"commit": "abc1234"}),
        reading("medium", "2026-01-01", {"ours s": "1"}, {"× TRL best": "5"}, verdicts=[verdict]),
    ]
    assert section_text(rows).splitlines() == [
        "| row | work | ours s | × TRL best | target | reached | note | when |",
        "|---|---|---|---|---|---|---|---|",
        "| medium | Qwen3-0.6B, 16×16, P=512, R=512 | 1 | 5 | tok/s ≥ 9 | NO, 8 |  | 2026-01-01 |",
        "| later |  | 2 |  |  |  | refused: no memory | 2026-01-02 abc1234 |",
        "",
        "- 2026-01-01, 2026-01-02: NVIDIA H200; ticks; torch 2.11.",
    ]


def test_seconds_of_a_cpu_are_left_out_except_of_a_start():
    rows = [reading("c-tiny", "2026-01-01", {"ours s": "1"}, {"× TRL best": "2"}, device="aarch64")]
    assert "ours s" not in section_text(rows)
    start = [reading("tiny, cold", "2026-01-01", {"imports s": "3"}, device="aarch64", table="start")]
    assert "| imports s |" in section_text(start)
    both = [*rows, reading("c-tiny", "2026-01-01", device="x86_64")]
    assert section_text(both).splitlines()[0].endswith("| machine | when |")


def test_what_a_stored_workload_was():
    shape = {"name": "Qwen3-8B"}
    stored = {"shape": shape, "groups": 8, "siblings": 16, "prompt": 4096, "adapter": {"rank": 16}}
    lengths = {"tokens": 128_000, "longest": 3_000, "limit": 4_096, "rows": 128}
    row = reading("any", "2026-01-01", details={"workload": stored | {"completion": lengths}})
    assert work_of(row) == "Qwen3-8B, LoRA of rank 16, 8×16, P=4,096, R=1,000 on average, 4,096 at most"
    assert work_of(reading("medium-4b train", "2026-01-01")).startswith("Qwen3-4B, 16×16")
    assert work_of(reading("medium-4bit", "2026-01-01")) == ""


def test_text_between_tables_stays():
    page = "# A\n<!-- bench rollout on NVIDIA H200 -->\nold\n<!-- bench end -->\ntext\n"
    page += "<!-- bench rollout on CPU, ablated -->\n<!-- bench end -->\nend\n"
    off = reading("x", "2026-01-01", ratios={"times as long": "3"}, device="arm", around={"options": {"ablate": True}})
    written = filled(page, [reading("a", "2026-01-01", {"ours s": "1"}), off])
    assert "old" not in written
    assert "| a | 1 | 2026-01-01 |" in written
    assert "| x | 3 | 2026-01-01 |" in written
    assert written.endswith("<!-- bench end -->\nend\n")
    assert filled(written, [reading("a", "2026-01-01", {"ours s": "1"}), off]) == written
    with pytest.raises(ValueError, match="section for table 'speed': there are rollout, train"):
        filled("<!-- bench speed on CPU -->\n<!-- bench end -->", [])


def test_a_bar_in_a_cell_does_not_end_it():
    assert markdown([["row", "empty", "a"], ["x|y", "", "1"]]) == "| row | a |\n|---|---|\n| x\\|y | 1 |"


def test_the_command_writes_the_page(tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    stored = reading("a", "", {"ours s": "1"}).stored
    (results / "rollout-h200-20260102.json").write_text(json.dumps({"table": "rollout", "rows": [stored]}))
    page.write_text(f"<!-- bench rollout on {GPU} -->\n<!-- bench end -->\n")
    assert main(["page", "--page", str(page), "--results", str(results)]) == 0
    assert "| a | 1 | 2026-01-02 |" in page.read_text()
    (results / "other.json").write_text("{}")
    assert main(["page", "--page", str(page), "--results", str(results)]) == 2
    assert main(["page", "--page", str(tmp_path / "none"), "--results", str(results)]) == 2
    said = capsys.readouterr().err
    assert "other.json is no results file" in said
    assert "none is not there" in said
