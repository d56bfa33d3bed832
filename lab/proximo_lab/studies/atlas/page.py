"""Replication results: every claim with its verdict so far, as one page."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proximo.system.opening import read_json
from proximo_lab.studies.atlas.claims import CLAIMS, Claim
from proximo_lab.studies.designs import STUDIES
from proximo_lab.studies.page import signed, table
from proximo_lab.studies.study import Study, design_hash
from proximo_lab.studies.verdict import Difference, verdict
from proximo_lab.studies.wording import label, plain_words

PAGE = "index.md"
NOT_RUN = "not run yet"
NO_VERDICT = "not measured at this size"


@dataclass(frozen=True)
class Row:
    claim: Claim
    verdict: str
    measured: str
    command: str
    links: tuple[str, ...]
    contrasts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Contrasts on the claim by the name of the study."""

    @property
    def beside(self) -> str:
        """Text on what is known apart from the contrasts."""
        return self.claim.reason or (f"Elsewhere: {self.claim.measured}" if self.claim.measured else "")


def atlas(folder: Path) -> str:
    """The page; `folder` has the results and pages of the studies that were run."""
    rows = list(atlas_rows(folder))
    count = Counter(row.verdict.partition(":")[0] for row in rows)
    shown = [[_anchor(row.claim), row.claim.claim, row.claim.source, *_cells(row)] for row in rows]
    header = ("#", "claim", "source", "verdict", "what was found", "page and figure", "command")
    return "\n\n".join([
        "# Replication results",
        f"{len(rows)} claims of the papers behind these algorithms and of blog posts on them: "
        f"{', '.join(f'{number} {verdict}' for verdict, number in count.most_common())}. Models have about a million "
        "parameters; each verdict is one about that size. Claims that are *proven* or *proven false* are arithmetic "
        "and need no training. *Opposite effect*: the reverse of the claim was measured. A verdict of a study rests on "
        "paired seeds, with controls that came out as they must, and on what was fixed and hashed before the runs, "
        "except where a page says what came later; the [guide](../guides/studies.md) says how.",
        table(header, shown),
        "This page is made by `python -m proximo_lab.studies --publish docs/studies`.",
    ]) + "\n"  # fmt: skip


def atlas_rows(folder: Path) -> Iterator[Row]:
    for claim in CLAIMS:
        asked = [study for study in STUDIES if any(claim.number in each.claims for each in study.contrasts)]
        asked.sort(key=lambda study: study.name != claim.decides)  # its study first, the others as they were
        known = {study.name: measured for study in asked if (measured := _contrasts(claim, study, folder))}
        links = (f"[{claim.page.rpartition('/')[2].removesuffix('.md')}]({claim.page})",) if claim.page else ()
        links += tuple(f"[{name}]({name}.md) ([figure]({name}.svg))" for name in known)
        commands = "; ".join(f"`proximo study {study.name}`" for study in asked)
        if known:
            limits = next(study.limits for study in asked if study.name in known)
            verdict, measured = _answer(claim, known, limits)
            if claim.reason:  # what the study shows is less than what is claimed
                verdict, measured = NO_VERDICT, f"{claim.reason}. Near it: {measured}"
            yield Row(claim, verdict, measured, commands, links, known)
        elif claim.verdict:
            yield Row(claim, label(claim.verdict), claim.measured, f"`{claim.command}`", links)
        elif asked:
            yield Row(claim, NOT_RUN, "", commands, links)
        else:
            yield Row(claim, NO_VERDICT, claim.reason, "–", links)


def results(study: Study, folder: Path) -> dict[str, Any] | None:
    """The stored findings of a study whose runs are all done and whose design is still the same; else None."""
    try:
        stored = read_json(folder / f"{study.name}.json")
        is_whole = stored["hash"] == design_hash(study) and stored["complete"]
    except (OSError, ValueError, KeyError, TypeError):  # cut off, or another file under this name
        return None
    return stored if is_whole and "contrasts" in stored else None


def _contrasts(claim: Claim, study: Study, folder: Path) -> list[dict[str, Any]]:
    """Findings on a claim. Which contrasts answer it is taken from the study: it is no part of the design, and may have
    changed since the findings were stored."""
    stored = results(study, folder)
    contrasts = [] if stored is None else stored["contrasts"]
    return [
        result for result, contrast in zip(contrasts, study.contrasts, strict=False) if claim.number in contrast.claims
    ]


def _answer(claim: Claim, known: Mapping[str, list[dict[str, Any]]], limits: str) -> tuple[str, str]:
    """The verdict of the first contrast that asks for the claim, with its limits and whether others differ; the numbers
    of all."""
    asked = [each for contrasts in known.values() for each in contrasts]
    numbers = [
        (f"`{name}`: " if len(known) > 1 else "") + "; ".join(map(_numbers, shown))
        for name, contrasts in known.items()
        if (shown := [each for each in contrasts if each["mean"] is not None and each["low"] is not None])
    ]
    first, remarks = asked[0], [limits] if limits else []
    word = first["verdict"] if first["verdict"] == "no verdict" else _on_claim(claim, first)
    if word == "not detectable at this size" and _lacks_room(first):
        remarks.append("in the other arm there is no room for an effect that counts")
    elif word == "not detectable at this size":
        visible = first.get("visible", first["half"])  # pages from before shares had intervals of their own
        remarks.append(f"{signed(visible).lstrip('+')} {first['unit']} could have been seen")
    if len({each["verdict"] for each in asked}) > 1:
        remarks.append(f"the first of {len(asked)} contrasts, which differ")
    shown = label(word) + (f": {', '.join(remarks)}" if remarks else "")
    return shown, ". ".join(numbers) + (f". Elsewhere: {claim.measured}" if claim.measured else "")


def _lacks_room(contrast: dict[str, Any]) -> bool:
    return "room" in contrast and contrast["room"] < abs(contrast["counts"])


def _numbers(contrast: dict[str, Any]) -> str:
    interval = f"{signed(contrast['low'])} to {signed(contrast['high'])}, {contrast['seeds']} seeds"
    word = contrast["verdict"]
    if word == "not detectable at this size" and _lacks_room(contrast):
        word += " (no room)"
    return f"{plain_words(contrast['what'])}: {signed(contrast['mean'])} {contrast['unit']} ({interval}), {label(word)}"


def _on_claim(claim: Claim, contrast: dict[str, Any]) -> str:
    """The verdict on the claim; where it is that something is not needed, what the contrast says of a need."""
    if not claim.not_needed:
        return contrast["verdict"]
    ends, counts = (contrast["mean"], contrast["low"], contrast["high"]), contrast["counts"]
    sought, room = counts if claim.not_needed == "added" else -counts, contrast.get("room", math.inf)
    need = verdict(Difference((), *ends, visible=math.nan), sought, room=room)
    return {
        "holds here": "does not hold here", "does not hold here": "holds here", "contrary": "holds here"
    }.get(need, need)  # fmt: skip


def _anchor(claim: Claim) -> str:
    """Anchor of a claim, its number, to which other pages can link."""
    return f'<a id="claim-{claim.number}"></a>{claim.number}'


def _cells(row: Row) -> list[str]:
    return [f"**{row.verdict}**", row.measured or "–", ", ".join(row.links) or "–", row.command]
