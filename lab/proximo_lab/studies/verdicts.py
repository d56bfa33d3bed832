"""The published verdict of every study, as data of the package: for the list of `proximo study`.

The results of studies are in the documentation, which an installed package does not have. `make pages` writes the data
anew from them; a test compares.
"""

import json
from pathlib import Path

STUDIES = Path(__file__).parents[3] / "docs" / "studies"
"""Results of studies, in a checkout."""


def file() -> Path:
    return Path(__file__).with_name("verdicts.json")


def stored_verdicts() -> dict[str, str]:
    """Published verdicts by the name of the study."""
    return json.loads(file().read_text(encoding="utf-8"))


def gathered_verdicts() -> dict[str, str]:
    """The same from the studies of this checkout."""
    from proximo_lab.studies.atlas.page import results
    from proximo_lab.studies.designs import STUDIES as DESIGNS

    known = {study.name: results(study, STUDIES) for study in DESIGNS}
    return {name: result["contrasts"][0]["verdict"] for name, result in known.items() if result is not None}


def write_verdicts() -> None:
    file().write_text(json.dumps(gathered_verdicts(), indent=1) + "\n", encoding="utf-8")
