"""`python -m proximo_lab.parity`: measure, write docs/parity.md, and fail if something that should agree does not."""

import sys
from concurrent.futures import ThreadPoolExecutor

from proximo_lab.parity.environments import REQUIREMENTS, ROOT, prepared, report_of
from proximo_lab.parity.measure import TOLERANCE
from proximo_lab.parity.page import page


def main() -> int:
    for system in REQUIREMENTS:
        prepared(system)
    with ThreadPoolExecutor() as workers:
        reports = list(workers.map(report_of, REQUIREMENTS))
    target = ROOT / "docs" / "parity.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(reports))

    agreements = [row for report in reports for row in report["agreements"]]
    differences = [row for report in reports for row in report["differences"]]
    apart = [row for row in agreements if not max(row["value"], row["gradient"] or 0.0) <= TOLERANCE]
    for row in apart:
        print(f"parity: {row['ours']} against {row['theirs']}: value {row['value']:.1e}, gradient {row['gradient']}")
    for row in differences:
        share, typical, largest = row["share"], row["median"], row["largest"]
        print(f"{share:5.0%} of batches, median {typical:6.1%}, largest {largest:6.1%}  {row['of']:9}  {row['topic']}")
    print(
        f"parity: {len(agreements) - len(apart)} of {len(agreements)} comparisons agree to {TOLERANCE:g}; {target.name}"
    )
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
