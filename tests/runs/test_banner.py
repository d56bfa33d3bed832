"""The banner before a run: aligned, wrapped, and safe to print whatever a file says."""

import os
from pathlib import Path

import pytest

from proximo.runs import banner as banners
from proximo.runs.banner import NARROW, WIDE, banner, folder_lines, terminal_width


def test_labels_stand_in_one_column_and_empty_lines_are_left_out():
    lines = [("model", "tiny"), ("data", ""), ("algorithm", "GRPO\nclip 0.2")]
    assert banner(lines, 80) == ["model      tiny", "algorithm  GRPO", "           clip 0.2"]
    assert banner([], 80) == []


def test_long_texts_wrap_beside_the_label_and_keep_their_own_indentation():
    shown = banner([("prompt", "  def f():\n\n" + "word " * 30)], 60)
    assert shown[0] == "prompt    def f():"
    assert shown[1] == ""
    assert all(len(line) <= 60 and line.startswith("        word") for line in shown[2:])
    assert len(shown) == 5


def test_a_prompt_steers_no_terminal_and_forges_no_label():
    shown = banner([("prompt", "\x1b[2Jhidden\nmodel  another")], 80)
    assert shown == ["prompt  \\x1b[2Jhidden", "        model  another"]


@pytest.mark.parametrize(("columns", "width"), [(20, NARROW), (80, 80), (300, WIDE)])
def test_a_terminal_decides_the_width_within_limits(columns, width, monkeypatch):
    monkeypatch.setattr(banners.sys, "stderr", open_null := open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(banners.os, "get_terminal_size", lambda number: os.terminal_size((columns, 24)))
    assert terminal_width() == width
    open_null.close()


def test_what_goes_to_no_terminal_is_wide(capsys):
    assert terminal_width() == WIDE


def test_the_commands_name_the_folder_as_a_shell_reads_it():
    told = dict(folder_lines(Path("runs/my run")))
    assert told["run folder"] == "runs/my run"
    assert "proximo watch 'runs/my run'" in told["watch"]
    assert "proximo resume 'runs/my run'" in told["stop"]
