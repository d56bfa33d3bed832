"""Nodes, workers and the head of a cluster, lost in the middle of their work.

Cases without Ray have the listener of a node as a process of this machine. Those with Ray start a cluster of several
nodes here, and are not run where there is no Ray: `PROXIMO_RAY_PYTHON` names a Python that has it.
"""

from pathlib import Path

from proximo_lab.faults.cases import Findings
from proximo_lab.faults.tested import Rule, run_tests

LONGEST = 1200
"""Seconds for one file: clusters take long to start, and to see that a node is lost."""
CONTROLS = {"test_a_function_on_a_node_says_what_it_says_here": "a function on a node answers as it does here"}
WORKERS = {
    "test_a_call_of_a_lost_node_is_made_on_another": Rule("a node is lost in the middle of a call", "C"),
    "test_a_call_that_takes_too_long_leaves_nothing_on_the_node": Rule("a call on a node that does not end", "C"),
    "test_places_without_a_node_are_left_out_and_none_is_an_error": Rule("fewer nodes than processes, or none", "S"),
    "test_who_does_not_know_the_token_is_not_let_in": Rule("a stranger asks a node to run something", "C"),
    "test_workers_end_when_the_trainer_is_killed": Rule("the trainer of workers on nodes is killed", "C"),
    "test_calls_of_a_node_that_ray_lost_are_made_on_another": Rule("a node of Ray with a worker is killed", "C"),
    "test_a_run_that_ray_ends_with_its_head_goes_on_with_the_same_command": Rule("the head of Ray is killed", "R"),
}
ENGINES = {
    "test_the_engine_of_a_node_that_is_lost_starts_again_on_another": Rule(
        "a node of Ray with an engine is killed", "C"
    )
}
RANKS = {
    "test_a_node_that_is_lost_starts_all_ranks_again_on_the_others": Rule("a node of Ray with a rank is killed", "R")
}


def run(folder: Path) -> Findings:
    findings = Findings()
    run_tests("rewards/test_elsewhere.py", WORKERS, CONTROLS, folder, findings, longest=LONGEST)
    run_tests("samplers/engines/test_on_ray.py", ENGINES, {}, folder, findings, longest=LONGEST)
    run_tests("distributed/test_on_ray.py", RANKS, {}, folder / "ranks", findings, longest=LONGEST)
    return findings
