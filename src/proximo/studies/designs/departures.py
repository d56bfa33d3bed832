"""Where studies are less than what was planned for them at first, and what follows from it.

These sentences stand on the pages beside what was noticed after the runs; no hash has them.
"""

DEPARTURES: dict[str, tuple[str, ...]] = {
    "dapo-ladder": (
        "The verdict is about the whole against GRPO. That each technique improves is not shown: of the five only "
        "dynamic sampling makes a difference that counts, by updates, added or taken away.",
        "Planned at first was a comparison by seconds too. It was not made: a run's seconds hang on what else its "
        "machine does.",
        "`+ filter` leaves out groups without an advantage and draws no others; it is not the paper's overlong filter.",
    ),
    "mixture": (
        "Planned at first were rates from 1e-3 to 3e-3, at which all arms collapse on copies of this length within "
        "four steps. The rates here are those between which they begin to.",
    ),
    "sapo": (
        "Planned at first were 60 steps, and both temperatures for positive advantages with all of those for negative "
        "ones. There are 30 steps, and 2 was tried with 2 only.",
        "That more than a twentieth of the ratios is further than 0.5 from 1 was planned and not measured; the spread "
        "of the ratio stands for it.",
    ),
    "value-length": (
        "Planned at first were copies of 4, 16 and 64 letters and 60 steps at each length. Chains took their place; "
        "values were fitted at two lengths, and PPO and GRPO had 40 steps at the shorter and 60 at the longer.",
    ),
    "overlong": (
        "Planned at first and not done: limits at three percentiles of the length, a penalty of twice the size, and "
        "the share of cut-off answers that would have been right.",
    ),
    "first-success": (
        "Planned at first were four models, with 0, 1, 10 and 30 % of the problems in reach of eight samples, and 150 "
        "steps. There is one model on two tasks, and 60 steps.",
    ),
    "recovery": (
        "Planned at first and not done: a mixture that collapses, forks 10 and 2 steps before the fall and 2 after it, "
        "a third of the rate, and routing replay.",
    ),
    "drift-lead": (
        "Planned at first and not done: runs of the mixture with the drift of their routes, and ten steps that say "
        "what is usual, in the place of six.",
    ),
    "sapo-sequence": ("Planned at first and not done: cosines between gradients in the place of gates.",),
    "dead-groups": (
        "Planned at first was to read the 15 runs of `proximo compare five` again; these are five new ones of GRPO.",
    ),
    "kl": ("Planned at first were four coefficients for DAPO too; it has two.",),
    "noisy-reward": ("Planned at first was noise on one side at 5, 10 and 20 %; it was run at 20 %.",),
}
"""Sentences by the name of a study."""
