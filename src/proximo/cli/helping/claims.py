"""The atlas as data of the package: every claim of the field with its verdict, for the page of `proximo view`, and the
verdict of every study, for the list of `proximo study`.

The results of studies are in the documentation, which an installed package does not have. `make pages` writes the data
anew from them; a test compares.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).parents[4] / "docs" / "studies"
"""Results of studies, in a checkout."""


def file() -> Path:
    return Path(__file__).with_name("claims.json")


def stored_claims() -> list[dict[str, Any]]:
    """The claims, each with number, claim, source, verdict, found and command; those that studies answer also have the
    contrasts, and what is known beside them."""
    return json.loads(file().read_text(encoding="utf-8"))


def gathered_claims() -> list[dict[str, Any]]:
    """The same from the studies of this checkout."""
    from proximo.studies.atlas.page import atlas_rows

    rows = []
    for row in atlas_rows(STUDIES):
        about = {"number": row.claim.number, "claim": row.claim.claim, "source": row.claim.source}
        said = {"verdict": row.verdict, "found": row.found, "command": row.command}
        said |= {"beside": row.beside} if row.contrasts else {}
        plain = {name: text.replace("`", "") for name, text in said.items()}  # the page shows plain text
        rows.append(about | plain | ({"contrasts": _contrasts(row.contrasts)} if row.contrasts else {}))
    return rows


SHOWN = ("what", "verdict", "mean", "low", "high", "unit", "counts", "seeds")


def _contrasts(known: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Differences with their intervals; those without one are left out."""
    return [
        {"study": name, **{each: contrast[each] for each in SHOWN}}
        for name, contrasts in known.items()
        for contrast in contrasts
        if contrast["mean"] is not None and contrast["low"] is not None
    ]


def verdicts_file() -> Path:
    return Path(__file__).with_name("verdicts.json")


def stored_verdicts() -> dict[str, str]:
    """Published verdicts by the name of the study."""
    return json.loads(verdicts_file().read_text(encoding="utf-8"))


def gathered_verdicts() -> dict[str, str]:
    """The same from the studies of this checkout."""
    from proximo.studies.atlas.page import results
    from proximo.studies.designs import STUDIES as DESIGNS

    known = {study.name: results(study, STUDIES) for study in DESIGNS}
    return {name: facts["contrasts"][0]["verdict"] for name, facts in known.items() if facts is not None}


def write_claims() -> None:
    verdicts_file().write_text(json.dumps(gathered_verdicts(), indent=1) + "\n", encoding="utf-8")
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in gathered_claims())
    file().write_text(f"[\n{rows}\n]\n", encoding="utf-8")
