"""docs/parity.md, from what the workers measured."""

from typing import Any

from proximo_lab.parity.batches import MAX_ROWS, MAX_WIDTH
from proximo_lab.parity.measure import BATCHES, FIRST_SEED, TOLERANCE

TOLERANCE_SHOWN = f"{TOLERANCE:.0e}".replace("e-0", "e-")

HEAD = f"""# Parity with TRL and verl

Proximo's losses, gradients and advantages, held against the functions that TRL and verl themselves run.
This page is written by `make parity`, which makes an environment for each system under `.parity/`, calls
their functions and ours on the same random batches, and fails if a row of the first table is off by more
than {TOLERANCE_SHOWN}.

Measured with {{versions}}. Float64; {BATCHES} batches for each row, seeds {FIRST_SEED} to {FIRST_SEED + BATCHES - 1};
2 to {MAX_ROWS} rows, 1 to {MAX_WIDTH} positions, completions from one token up, a third of the batches with tool
tokens in the middle; groups of unequal size (equal where TRL needs it), about a quarter of them dead; log-ratios
from 0 to ±1.5. What stands off the mask is random too: nothing may read it.

How their code is called: TRL's trainers are made without `__init__` and given TRL's own config object, one
process to gather from, and log-probs instead of a model; then `_compute_loss` and
`_generate_and_score_completions` run as they are. verl's are plain functions, called with verl's own config
object. So a setting that is not named below is their default, with one exception: verl's dual clip cannot be
switched off, and is moved out of reach (c 1e9) unless a row says c 3.

## Agreement

Largest absolute differences over all batches. The value is the loss, or every entry of the advantages (then there
is no gradient to compare). The gradient is taken by the log-probs unless the row says otherwise.
"""

ROUNDING = """
What remains around 1e-8 against verl is verl's: it adds 1e-8 to the denominators of its row means and whitening.
"""

DIFFERENCES = f"""
## Known differences

Each of these is known and meant. The size is the norm of the difference over the larger of the two norms: of the
gradient by the log-probs, or of what the row names. "In 40 % of batches" counts those that differ by more than
{TOLERANCE_SHOWN}; the median is over these.
"""

NOT_COMPARED = """
## Not compared

- PPO and GSPO-token in TRL: version 1.16 no longer has either trainer. verl's forms are in the first table; where
  TRL's PPO used to put the terminal reward cannot be measured any more.
- Training loops, samplers and models: everything here starts from log-probs and rewards. Temperature, padding,
  dynamic sampling, the masking of truncated completions and the router's auxiliary loss are not reached.
- Supervised loss in TRL: computed inside the model's forward. verl's is in the first table.
- KL in the reward through verl's `apply_kl_penalty`: it sits in a module that needs packages which verl does not
  install by itself; `compute_rewards` of `core_algos.py` stands in.
- verl's token-sum aggregation, DPPO, DRO, OPO, ReMax, GDPO, pass@k and optimal-token-baseline have no counterpart
  here, nor have TRL's other preference losses. Proximo's BNPO (Beta normalisation), VAPO's length-adaptive λ and
  PositiveNll, ProcessNormalized and PromptMean have none there.
- Systems other than these two.
"""


def page(reports: list[dict[str, Any]]) -> str:
    packages = {name: version for report in reports for name, version in report["packages"].items()}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("trl", "verl", "torch"))
    text = HEAD.format(versions=versions)
    for report in reports:
        text += f"\n### {_titled(report)}\n\n" + _table(
            ("proximo", "theirs", "batches", "max |Δ value|", "max |Δ gradient|"),
            [_agreement(row) for row in report["agreements"]],
        )
    text += ROUNDING + DIFFERENCES
    for report in reports:
        text += f"\n### {_titled(report)}\n\n" + _table(
            ("topic", "proximo", "theirs", "measured", "why"),
            [_difference(row) for row in report["differences"]],
        )
    return text + NOT_COMPARED


def _titled(report: dict[str, Any]) -> str:
    return f"{report['system']} {report['packages'][report['system'].lower()]}"


def _agreement(row: dict[str, Any]) -> tuple[str, ...]:
    gradient = "—" if row["gradient"] is None else _small(row["gradient"])
    return row["ours"], row["theirs"], str(row["batches"]), _small(row["value"]), gradient


def _difference(row: dict[str, Any]) -> tuple[str, ...]:
    size = f"{row['of']}: in {row['share']:.0%} of batches, median {_percent(row['median'])}, at most "
    return row["topic"], row["ours"], row["theirs"], (size + _percent(row["largest"])).replace("%", " %"), row["why"]


def _small(number: float) -> str:
    shown = "0" if number == 0 else f"{number:.0e}".replace("e-0", "e-")
    return shown if number <= TOLERANCE else f"**{shown}**"


def _percent(share: float) -> str:
    """Two digits below 10 %, whole numbers above."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{share:.0%}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (head, *rows)]
    lines.insert(1, " | ".join("---" for _ in head))
    return "".join(f"| {line} |\n" for line in lines)
