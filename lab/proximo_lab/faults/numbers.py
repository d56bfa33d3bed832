"""Numbers that are not finite, spikes, memory that runs out, batches with nothing in them: five algorithms each."""

from pathlib import Path

from proximo_lab.faults.cases import Findings
from proximo_lab.faults.tested import Rule, all_but_last, first_word, run_tests

OUT_OF_MEMORY = Rule("out of memory", "C", first_word)
RULES = {
    "test_one_number_that_is_not_finite_changes_nothing": Rule("NaN, inf or -inf in one", "C", first_word),
    "test_a_reward_that_is_not_finite_leaves_its_completion_out_and_nobody_else": Rule(
        "NaN, inf or -inf in one: reward", "C"
    ),
    "test_a_finite_reward_whose_square_is_not_is_no_silent_success": Rule("a reward of 1e200", "C"),
    "test_what_is_masked_may_hold_anything": Rule("NaN, inf or -inf at a token that does not train", "C"),
    "test_the_controller_of_the_kl_does_not_take_what_is_not_finite": Rule("NaN for the KL controller", "C"),
    "test_the_value_models_own_update_is_guarded_too": Rule("NaN in a return of the value model", "C"),
    "test_the_next_update_is_as_if_the_skipped_one_had_never_been": Rule("an update after one that was skipped", "C"),
    "test_evidence_that_cannot_be_written_does_not_end_a_run": Rule("evidence that cannot be written", "C"),
    "test_a_spike_is_skipped_and_does_not_move_the_median": Rule("a gradient a million times as large", "C"),
    "test_a_skipped_spike_leaves_weights_and_optimizer_alone": Rule("a gradient a million times as large", "C"),
    "test_by_default_a_spike_is_applied_and_reported_once": Rule("a gradient a million times as large", "C"),
    "test_too_many_in_a_row_end_the_run": Rule("too many skipped updates in a row", "S"),
    "test_a_run_whose_gradients_break_skips_counts_keeps_evidence_and_ends": Rule(
        "too many skipped updates in a row", "S"
    ),
    "test_out_of_memory_in_an_update_halves_the_passes_and_changes_nothing_else": OUT_OF_MEMORY,
    "test_out_of_memory_before_the_updates": Rule("out of memory before the updates", "C"),
    "test_out_of_memory_in_the_references_pass": Rule("out of memory in the reference's pass", "C"),
    "test_a_run_that_runs_out_of_memory_goes_on_in_smaller_passes": Rule("out of memory in a whole run", "C"),
    "test_a_lowered_budget_outlives_a_new_plan_and_a_new_process": Rule("out of memory, then resumed", "C"),
    "test_gradients_of_passes_before_the_one_that_failed_are_dropped": Rule("out of memory in a second pass", "C"),
    "test_a_single_completion_that_does_not_fit_ends_in_a_hint": Rule(
        "a single completion that does not fit into memory", "S"
    ),
    "test_sampling_that_runs_out_of_memory_says_what_to_make_smaller": Rule("out of memory while sampling", "S"),
    "test_degenerate_batches_are_finite": Rule("degenerate batch", "C", all_but_last),
    "test_a_loss_of_nothing_is_zero": Rule("degenerate batch: no rows, no tokens", "C"),
    "test_dynamic_sampling_that_never_fills_ends_each_step_with_a_diagnosis": Rule(
        "dynamic sampling that never fills a step", "C"
    ),
}  # fmt: skip
GAP = (
    "numbers and memory: the faults are put into tensors, gradients and forward passes of a tiny learner from outside, "
    "and into three whole runs; running out of memory is an allocator's error, raised there, not a full machine"
)
CONTROLS = {"test_without_a_fault_the_same_update_is_applied": "without the fault the same update changes the weights"}


def run(folder: Path) -> Findings:
    findings = Findings(gaps=[GAP])
    run_tests("learner/test_limits.py", RULES, CONTROLS, folder, findings)
    return findings
