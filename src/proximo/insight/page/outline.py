"""A step in outline, from a few columns of its file: what the page shows of a large step until the rest is computed."""

from typing import Any

import torch

from proximo.insight.folder import RunFolder
from proximo.insight.lens.columns import RolloutColumns, flat, offsets
from proximo.insight.lens.files import rollout_file
from proximo.insight.lens.layout import TokenLayout
from proximo.insight.page.lenses import numbers

PREVIEW = 160
"""Maximum characters of a prompt or an answer in a list."""
UNKNOWN = ("duplicate", "advantage_mean", "ratio_most", "blocked_share", "entropy_mean", "gap_most", "kl_mean")
"""Numbers that only the whole step has."""


def outline(run: RunFolder, number: int) -> dict[str, Any]:
    """Groups and completions with rewards, lengths and prompts; nothing that depends on an algorithm."""
    with rollout_file(run.step_file(number)) as file:
        return _outlined(RolloutColumns(file), number)


def _outlined(column: RolloutColumns, number: int) -> dict[str, Any]:
    sampled = column["sampled"] if "sampled" in column else column["mask"]
    layout = TokenLayout(torch.from_numpy(offsets(sampled)).diff())
    lengths = layout.count(flat(sampled).bool()).tolist()
    groups, prompts, answers, problems = (column[name].to_pylist() for name in ("group", "prompt", "answer", "problem"))
    columns = {
        "group": groups,
        "sibling": column["sibling"].to_pylist(),
        "fate": column["state"].to_pylist(),
        "truncated": column["truncated"].to_pylist(),
        "reward": numbers(torch.tensor(column["reward"].to_pylist(), dtype=torch.float64)),
        "outcome": numbers(torch.tensor(column["outcome"].to_pylist(), dtype=torch.float64)),
        "length": lengths,
        "size": layout.lengths.tolist(),
    }
    none = dict.fromkeys(UNKNOWN) | {"replies": 0, "failed": 0, "pushing": 0, "blocked": 0}
    rows = [
        {"row": row, **none, **{name: values[row] for name, values in columns.items()}} for row in range(len(groups))
    ]
    outlined = []
    for group in sorted(set(groups)):
        inside = [row for row in rows if row["group"] == group]
        first, scored = inside[0]["row"], [row["reward"] for row in inside if row["reward"] is not None]
        outlined.append(
            {
                "group": group,
                "problem": problems[first][:PREVIEW],
                "prompt": prompts[first][-PREVIEW:],
                "answer": (answers[first] or "")[:PREVIEW],
                "fate": "trained",
                "why": "",
                "reward": sum(scored) / len(scored) if scored else None,
                "blocked_share": None,
            }
        )
    return {"step": number, "rows": rows, "groups": outlined, "tokens": sum(layout.lengths.tolist())}
