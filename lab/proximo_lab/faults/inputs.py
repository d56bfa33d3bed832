"""Configs, data, model folders and commands that are malformed or malicious: one message each, and nothing runs."""

from pathlib import Path

from proximo_lab.faults.cases import Findings
from proximo_lab.faults.tested import Rule, run_tests

MALFORMED = {
    "test_bad_configs": Rule("a malformed config", "S"),
    "test_bad_config_files": Rule("a config file that is none", "S"),
    "test_every_problem_of_a_config_is_told_at_once": Rule("a malformed config", "S"),
    "test_bad_data": Rule("a malformed file of problems", "S"),
    "test_bad_examples": Rule("a malformed file of examples", "S"),
    "test_bad_models": Rule("a malformed model folder", "S"),
    "test_what_is_no_model": Rule("what is no model", "S"),
    "test_bad_commands": Rule("a malformed command", "S"),
    "test_bad_run_folders": Rule("a run folder that cannot be", "S"),
}
ODD = {
    "test_an_empty_config_is_all_defaults": "a config of blank lines is read",
    "test_what_is_odd_and_allowed": "odd line ends, a byte order mark and repeated prompts are read",
}
CODE_ROWS = {"test_bad_rows_are_named": Rule("a malformed file of programs' tests", "S")}
MALICIOUS = {
    "test_pickles_are_never_opened": Rule("a pickle in a model folder", "S"),
    "test_a_pickle_that_calls_itself_safetensors_is_refused": Rule("a pickle in a model folder", "S"),
    "test_an_index_names_only_safetensors_beside_it": Rule("an index of weights that points elsewhere", "S"),
    "test_python_files_are_ignored": Rule("Python files in a model folder", "C"),
    "test_code_of_the_authors_is_refused_at_every_door": Rule("auto_map, at every loader", "S"),
    "test_everything_wrong_with_a_folder_is_told_at_once": Rule("several faults in a model folder", "S"),
    "test_what_the_hub_sends_is_looked_at_too": Rule("auto_map from the hub", "S"),
    "test_a_name_twice_is_refused": Rule("a malicious safetensors header", "S"),
    "test_what_passes_the_look_is_what_safetensors_reads": Rule("a malicious safetensors header", "S"),
    "test_a_template_that_reaches_out_is_refused": Rule("a chat template that reaches out", "S"),
    "test_the_worst_are_refused_when_the_tokenizer_loads": Rule("a chat template that reaches out", "S"),
    "test_an_endless_template_is_stopped": Rule("a chat template without an end", "S"),
    "test_what_a_template_makes_is_bounded_in_every_conversation": Rule(
        "a chat template that doubles what it has", "S"
    ),
    "test_what_a_template_makes_counts_together": Rule("a chat template that doubles what it has", "S"),
    "test_only_a_name_is_a_name_of_ours": Rule("a path in the place of a model's name", "C"),
}
CANARY = {
    "test_the_canary_works": "a pickle that is opened does fire its canary",
    "test_a_real_template_is_none_of_this": "a real chat template works",
}


def run(folder: Path) -> Findings:
    findings = Findings()
    run_tests("cli/test_bad_inputs.py", MALFORMED, ODD, folder, findings)
    run_tests("tasks/test_code.py", CODE_ROWS, {}, folder, findings)
    tried = [case for case in findings.cases if case.ended != "not run"]
    run_tests("models/test_loading.py", MALICIOUS, CANARY, folder, findings)
    malicious = [case for case in findings.cases[len(tried) :] if case.ended != "not run"]
    findings.figures = {
        "tried": len(tried),
        "explained": sum(case.ended == "S" for case in tried),
        "tracebacks": sum("Traceback" in case.detail for case in tried),
        "malicious": len(malicious),
        "fired": sum("canary" in case.detail for case in malicious),
    }
    return findings
