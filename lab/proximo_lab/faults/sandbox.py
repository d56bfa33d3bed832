"""Hostile programs in the sandbox, exploits of its grader, and machines that cannot hold a program in."""

import json
import secrets
from pathlib import Path

from tests.processes.sandbox import payloads
from tests.processes.sandbox.captivity import World, gets_out_bare, left_behind, tried
from tests.processes.sandbox.payloads import PAYLOADS, Payload
from tests.tasks.exploits import EXPLOITS, PRIMES, SCRIPT

from proximo.processes.sandbox import Limits, NoSandbox, Sandbox, SandboxJob
from proximo.tasks import Code
from proximo.tasks.testing import read_tests
from proximo_lab.faults.cases import Case, Findings
from proximo_lab.faults.tested import Rule, run_tests

LIMITS = Limits(seconds=1.5, cpu_seconds=1, memory_mb=256, scratch_mb=8)
KINDS = {
    "a bomb: time, memory, disk, output, processes": payloads.BOMBS,
    "secrets and the run's files": payloads.SECRETS,
    "the network": payloads.NETWORK,
    "other processes": payloads.PROCESSES,
    "the kernel": payloads.KERNEL,
}
MECHANISMS = {
    "test_without_a_wall_around_files_it_refuses_and_says_what_is_missing": Rule("a machine without walls", "S"),
    "test_elsewhere_it_refuses": Rule("a machine without walls", "S"),
    "test_a_program_that_could_get_out_is_a_reason_to_refuse": Rule("a machine without walls", "S"),
    "test_without_landlock_a_root_of_its_own_is_enough": Rule("a machine with fewer walls", "C"),
    "test_without_namespaces_landlock_and_the_filter_hold_or_it_refuses": Rule("a machine with fewer walls", "C"),
    "test_bubblewrap_stands_in_for_a_root_of_its_own": Rule("a machine with fewer walls", "C"),
    "test_a_server_that_hangs_or_dies_is_an_error_and_is_replaced": Rule("a sandbox server that is killed", "C"),
    "test_programs_die_with_the_trainer": Rule("a trainer that is killed", "C"),
    "test_a_server_never_holds_what_its_programs_were_asked": Rule("what a program could find of those before", "C"),
    "test_programs_leave_nothing_for_the_next": Rule("what a program could find of those before", "C"),
}
ORDINARY = {"test_ordinary_programs_say_what_they_say_anywhere": "16 ordinary programs say what they say anywhere"}
GRADED = {
    "test_a_sandbox_that_dies_leaves_the_completion_unscored_and_is_replaced": Rule(
        "a sandbox server that is killed", "C"
    ),
    "test_a_program_that_fails_is_wrong_and_not_unscored": Rule("programs that fail by themselves", "C"),
    "test_expected_answers_never_enter_the_sandbox": Rule("what a program could find of its tests", "C"),
}
PAID = {
    "test_programs_of_a_group_are_judged_in_order": "right and wrong programs of a group are told apart",
    "test_a_grader_beside_the_program_would_have_paid": "8 exploits earn a reward of a grader in their own process",
}


def run(folder: Path, max_payloads: int | None = None) -> Findings:
    findings = Findings()
    try:
        _battery(findings, PAYLOADS[:max_payloads])
        _exploits(folder, findings, max_payloads)
    except NoSandbox as missing:
        findings.add("hostile programs", "all", "not run", str(missing))
        findings.gaps.append(f"no program was run: {missing}")
        return findings
    if max_payloads is None:
        run_tests("processes/sandbox/test_sandbox.py", MECHANISMS, ORDINARY, folder, findings)
        run_tests("tasks/test_code.py", GRADED, PAID, folder, findings)
    if left := left_behind():
        findings.add("processes of the sandbox left behind", "all", "failed", str(left))
    return findings


def _battery(findings: Findings, chosen: tuple[Payload, ...]) -> None:
    sandbox = Sandbox(LIMITS, workers=4)
    try:
        findings.gaps += [f"the sandbox is without {missing}" for missing in sandbox.missing]
        nonce = secrets.token_hex(8)
        control = sandbox.run(SandboxJob(f"print({nonce!r})"))
        assert control.stdout.decode().strip() == nonce, "the control did not run"
        findings.controls.append("a harmless program prints its nonce and ends by itself")

        def outcome(payload: Payload):
            with World() as world:
                return tried(sandbox, payload, world)

        outcomes = sandbox.each(outcome, chosen)
    finally:
        sandbox.close()
    for payload, result in zip(chosen, outcomes, strict=True):
        kind = next(kind for kind, group in KINDS.items() if payload in group)
        ended = "not run" if not result.ran else "C" if result.contained else "failed"
        findings.add(kind, payload.name, ended, result.detail)
    bare = [payload for payload in chosen if payload.bare]
    free = [payload for payload in bare if _bare(payload)]
    findings.figures |= {
        "tried": len(outcomes),
        "ran": sum(each.ran for each in outcomes),
        "contained": sum(each.ran and each.contained for each in outcomes),
        "bare_tried": len(bare),
        "bare": len(free),
    }
    held = [payload.name for payload in bare if payload not in free]
    if held:
        findings.gaps.append(f"refused here to everybody, so that being held says nothing: {', '.join(held)}")
    findings.controls.append(
        f"{len(free)} of {len(bare)} hostile programs that are safe to try get out without a sandbox"
    )


def _bare(payload: Payload) -> bool:
    with World() as world:
        return gets_out_bare(payload, world)


def _exploits(folder: Path, findings: Findings, max_payloads: int | None) -> None:
    """Try each in both forms; a right answer is paid, which shows that one could be."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = {10: 73, 100: 181, 1000: 1103}
    spoken = [{"input": str(n), "output": f"{answer}\n"} for n, answer in answers.items()]
    called = [{"arguments": [n], "result": answer} for n, answer in answers.items()]
    path = folder / "problems.jsonl"
    rows = [{"prompt": "?", "tests": spoken}, {"prompt": "!", "tests": called, "function": "solve"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sandbox = Code(str(path), held_out=0.0, limits=Limits(seconds=5.0, cpu_seconds=2), workers=2)._sandbox
    ran = paid = 0
    try:
        for function, tests, end in ((None, spoken, SCRIPT), ("solve", called, "")):
            form = read_tests(tests, function)
            assert form.passed(PRIMES + end, sandbox), "a right answer earns nothing"
            for exploit in EXPLOITS[:max_payloads]:
                begun = secrets.token_hex(8)
                program = f"import os\nos.write(2, {begun!r}.encode())\n{exploit.code.replace('TESTS', str(path))}{end}"
                watched = _Watched(sandbox)
                rewarded = form.passed(program, watched)
                did_run = bool(watched.output) and all(begun.encode() in output for output in watched.output)
                ran, paid = ran + did_run, paid + rewarded
                ended = "failed" if rewarded else "C" if did_run else "not run"
                what = f"an exploit of the grader: {'a function' if function else 'a script'}"
                findings.cases.append(Case(what, exploit.name, ended, "it was rewarded" if rewarded else ""))
    finally:
        sandbox.close()
    findings.figures |= {"exploits": 2 * len(EXPLOITS[:max_payloads]), "exploits_ran": ran, "rewarded": paid}
    findings.controls.append("the right answer is rewarded in both forms")


class _Watched(Sandbox):
    """A sandbox that keeps what its programs said on stderr."""

    def __init__(self, real: Sandbox) -> None:
        self._real = real
        self.output: list[bytes] = []

    def run_marked(self, job: SandboxJob):
        result, nonce = self._real.run_marked(job)
        self.output.append(result.stderr)
        return result, nonce
