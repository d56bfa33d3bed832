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
    "token-mean": (
        "Planned at first and not done: a model that loops in a fifth of its answers, every arm at two rates (each has "
        "its tuned one), and limits of 64 and 256 tokens (they are 96 and 160).",
    ),
    "gspo-band": (
        "Planned at first and not done: copies of 8, 32 and 64 letters in the place of sums, the largest rate that "
        "does not collapse, and how far the gradients of a step's halves agree. So this study is about learning on "
        "short answers. It says nothing about steadiness: no arm is unsteady, and a smaller gradient is not a less "
        "noisy one.",
    ),
    "mixture": (
        "At 1e-3 GRPO collapses in 1 of 8 seeds, so that five fewer could not have been seen, and no control had to "
        "collapse: about collapses of GRPO and GSPO nothing follows from this study. In [another one](moe.md), at 3e-3 "
        "and with copies of 9 tokens, GRPO collapses in 8 of 8 seeds and GSPO in 2.",
        "Planned at first were copies of 32 letters and four rates from 1e-3 to 3e-3; these are 16 letters, 3e-4 and "
        "1e-3.",
        "GSPO's band on GRPO's tokens blocks 23 % of them, where on sequences it blocks 39 %: as a control of the "
        "step's size it is weaker than was planned.",
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
