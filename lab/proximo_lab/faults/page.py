"""docs/reliability.md from the results, and from nothing else."""

from collections.abc import Mapping
from typing import Any

from proximo_lab.faults.cases import ENDINGS, totals

TITLES = {
    "resume": "SIGKILL at random moments, resumed",
    "stages": "SIGKILL during fine-tuning, reward models and DPO, resumed",
    "saves": "saves: killed, disk full, read-only, disk errors",
    "damage": "damaged and foreign checkpoints",
    "signals": "SIGTERM and SIGINT",
    "ranks": "ranks that die, hang or cannot write",
    "numbers": "numbers that are not finite, spikes, memory, degenerate batches",
    "engines": "engines of a fleet",
    "flight": "SIGKILL of any process while sampling runs ahead",
    "nodes": "nodes, workers and the head of a cluster",
    "rewards": "reward functions",
    "judges": "judges behind a server",
    "environments": "environments and tools",
    "sandbox": "hostile programs and exploits of the grader",
    "inputs": "malformed and malicious inputs",
    "text": "hostile text, secrets, unusual environments",
    "fields": "config fields that nothing reads",
    "cost": "cost of safety",
}
"""Families in the order of the report."""

HEAD = """# Reliability

Real faults, injected into small runs on a CPU, and what happened. `make faults` writes this page from its own
results; `lab/proximo_lab/faults/results.json` has all details.

Each case ends in one of: **R** resumed, with the same bytes in metrics, ledger, rollouts, weights and optimizer as an
undisturbed run; **C** continued, with the fault counted and nothing else affected; **S** stopped, with an exit code
and one message that says what to do; **failed**; or **not run**, because this machine could not inject the fault.
"""

HOW = """
## How to reproduce

`make faults` runs everything; `python -m proximo_lab.faults resume sandbox` runs some families and keeps the results
of the others. Every family has controls that show that its faults really happen; each hostile program must first
print a new nonce, or it counts as not run. The moments of kills depend on a seed and on the machine's speed, so they
differ each time.
"""


def page(results: Mapping[str, Any]) -> str:
    families = {name: results["families"][name] for name in TITLES if name in results["families"]}
    parts = [HEAD, _made_with(families), _headline(families), _table(families), _gaps(families), _controls(families)]
    return "".join([*parts, HOW, _kinds(families)])


def _made_with(families: Mapping[str, Any]) -> str:
    days = sorted({family["date"] for family in families.values()})
    versions = sorted({family["versions"] for family in families.values()})
    missing = [TITLES[name] for name in TITLES if name not in families]
    text = f"\n{' to '.join(dict.fromkeys([days[0], days[-1]]))}, {'; '.join(versions)}.\n" if days else ""
    return text + (f"\nNot run at all: {'; '.join(missing)}.\n" if missing else "")


def _headline(families: Mapping[str, Any]) -> str:
    sums = totals(families)
    lines = [
        f"faults tried: {sums['cases']} cases of {sums['kinds']} kinds; survived "
        f"{sums['R'] + sums['C'] + sums['S']}, failed {sums['failed']}, not run {sums['not run']}"
    ]
    lines += [line for name, family in families.items() for line in _figures(name, family["figures"])]
    orphans = sum(family["orphans"] for family in families.values())
    lines.append(f"processes left behind after all of this: {orphans}")
    return "\n## Figures\n\n" + "".join(f"- {line}\n" for line in lines)


def _figures(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Lines, one or two, for each family that has figures of its own."""
    return [form.format(**figures) for form in FORMS.get(name, ())] if figures else []


FORMS = {
    "resume": (
        "resume points: {kills} SIGKILLs at random moments ({past_a_step} of them after a whole step of the "
        "attempt), {bit_equal} bit-equal; steps repeated after a kill: "
        "median {redone_median:g}, at most {redone_most}",
        "prompts drawn in these runs: {prompts}; skipped or repeated: {skipped_or_repeated}",
        "log rows that were readable before a kill: {rows}; lost: {rows_lost}",
    ),
    "stages": ("fine-tuning, reward models and DPO: {kills} SIGKILLs, {bit_equal} bit-equal",),
    "saves": ("checkpoints lost or incomplete: {lost}, of {saves} disturbed saves",),
    "signals": ("time from SIGTERM to the end: median {median_seconds:.2f} s, longest {longest_seconds:.2f} s",),
    "flight": (
        "sampling ahead on two ranks and two engines: {kills} SIGKILLs at random moments, {prompts} prompts drawn, "
        "{lost_or_repeated} lost or repeated; {resumes} times the command was repeated, with {groups_begun} groups "
        "that continued behind {tokens_continued} tokens",
    ),
    "rewards": ("completions that hostile reward functions left unscored in whole runs: {unscored}; trained: {zeros}",),
    "judges": (
        "completions that failing judges left unscored in whole runs: {unscored}; verdicts kept when a judge died: "
        "{kept}",
    ),
    "sandbox": (
        "hostile programs: {tried} tried, {ran} ran, {contained} contained; {bare} of {bare_tried} that are safe to "
        "try escape if there is no sandbox",
        "exploits of the grader: {exploits} tried, {exploits_ran} ran, {rewarded} rewarded",
    ),
    "inputs": (
        "malformed inputs: {tried} tried, {explained} explained by one message before training; tracebacks: "
        "{tracebacks}",
        "malicious model files and templates: {malicious} tried, canaries fired: {fired}",
    ),
    "fields":
    ("config fields: {fields} changed one by one, {alive} change the run, {listed} are listed as not expected "
               "to, {dead} dead",),
    "cost": (
        "time inside checkpoint, ledger, event and log code: {share:.2%} of the demo's {seconds:.0f} s "
        "({parts}); rollouts written for later reading: {rollouts:.2%}",
        "the demo's own reward needs no worker; one in a worker takes {worker_ms:.2f} ms a group more than in process, "
        "a program in the sandbox {sandbox_ms:.0f} ms",
        "a checkpoint of the demo: {save_ms:.0f} ms, {fsync_ms:.0f} ms of it waiting for the disk",
    ),
}  # fmt: skip


def _table(families: Mapping[str, Any]) -> str:
    head = ("family", "kinds", "cases", *ENDINGS, "seconds")
    rows = []
    for name, family in families.items():
        sums = totals({name: family})
        counts = [str(sums[ending] or "") for ending in ENDINGS]
        rows.append((TITLES[name], str(sums["kinds"]), str(sums["cases"]), *counts, f"{family['seconds']:.0f}"))
    sums = totals(families)
    counts = [f"**{sums[ending]}**" if sums[ending] else "" for ending in ENDINGS]
    seconds = sum(family["seconds"] for family in families.values())
    rows.append(("**all**", f"**{sums['kinds']}**", f"**{sums['cases']}**", *counts, f"{seconds:.0f}"))
    return "\n## Families\n\n" + _markdown(head, rows)


def _gaps(families: Mapping[str, Any]) -> str:
    lines = [line for family in families.values() for line in family["gaps"]]
    for word in ("failed", "not run"):
        for name, family in families.items():
            for kind, counts in family["kinds"].items():
                if counts[word]:
                    reasons = list(dict.fromkeys(detail.partition(": ")[2] for detail in counts["details"]))
                    lines.append(f"{word}: {kind} ({name}, {counts[word]}): {_one_line('; '.join(reasons[:3]))}")
    return "\n## Known gaps\n\n" + "".join(f"- {line}\n" for line in [*lines, *OUT_OF_REACH])


OUT_OF_REACH = (
    "Not tested: loss of power (only processes are killed, the disk keeps working), failures of a GPU, and runs on "
    "several machines.",
    "Not implemented, so not attacked: environments of other libraries. Not attacked here yet: "
    "environments of several turns, which have tests of their own; engines "
    "are attacked with a server of our own in vLLM's place. "
    "The page of `proximo view` is attacked by its own tests (test_view.py and test_damage.py), not here.",
)


def _controls(families: Mapping[str, Any]) -> str:
    lines = [f"{TITLES[name]}: {'; '.join(family['controls'])}" for name, family in families.items()]
    return "\n## Controls\n\n" + "".join(f"- {line}\n" for line in lines if not line.endswith(": "))


def _kinds(families: Mapping[str, Any]) -> str:
    """Every kind of fault with its counts, a paragraph for each family."""
    text = "\n## All kinds of faults\n"
    for name, family in families.items():
        kinds = [f"{kind} ({_counted(counts)})" for kind, counts in family["kinds"].items()]
        text += f"\n**{TITLES[name]}**: {_one_line('; '.join(kinds))}.\n"
    return text


def _counted(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{counts[ending]} {ending}" for ending in ENDINGS if counts[ending])


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(_one_line(cell) for cell in line) for line in (head, *rows)]
    lines.insert(1, " | ".join("---" for _ in head))
    return "".join(f"| {line} |\n" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
