"""Texts of models, secrets, and odd surroundings: no terminal, no UTF-8, no home, no reader."""

from pathlib import Path

from proximo_lab.faults.cases import Findings
from proximo_lab.faults.tested import Rule, run_tests

TERMINAL = {
    "test_nothing_steers": Rule("hostile text, made visible", "C"),
    "test_errors_quote_inertly": Rule("hostile text in an error message", "C"),
    "test_the_live_view_shows_hostile_text_inertly": Rule("hostile text in the live view", "C"),
    "test_long_text_is_cut": Rule("ten megabytes of text", "C"),
    "test_progress_outlives_its_reader": Rule("a terminal that is gone", "C"),
    "test_secrets_by_hand": Rule("a secret in a text", "C"),
    "test_a_command_line_as_it_may_be_kept": Rule("secrets on the command line", "C"),
    "test_secrets_reach_neither_disk_nor_terminal": Rule("secrets on the command line", "S"),
    "test_a_run_folder_keeps_no_secret": Rule("a secret in the environment of a run", "C"),
}
ENVIRONMENT = {
    "test_a_reader_that_has_seen_enough": Rule("a reader that closes the pipe", "S"),
    "test_streams_that_were_never_open": Rule("streams that were never open", "C"),
    "test_a_narrow_dumb_terminal_without_colours_or_utf8": Rule("a dumb terminal, no colours, no UTF-8", "C"),
    "test_a_home_where_nothing_can_be_written": Rule("a home where nothing can be written", "C"),
    "test_a_run_without_utf8_writes_utf8": Rule("a locale without UTF-8", "C"),
    "test_a_run_on_a_narrow_terminal": Rule("a terminal of 40 columns", "C"),
    "test_a_missing_extra_names_the_install_command": Rule("an extra that is not installed", "S"),
}
CONTROLS = {"test_what_is_spelled_out_by_hand": "ordinary text and emoji are shown as they are"}


def run(folder: Path) -> Findings:
    findings = Findings()
    run_tests("cli/test_terminal.py", TERMINAL, CONTROLS, folder, findings)
    run_tests("cli/test_environment.py", ENVIRONMENT, {}, folder, findings)
    return findings
