"""The model card of a run, from the facts of its report."""

import json
from pathlib import Path

from proximo.algorithms import explain
from proximo.insight.reading import Row, is_number
from proximo.insight.report.run_details import RunDetails
from proximo.insight.report.settings import difference_lines
from proximo.system.safe_text import visible
from proximo.system.secrets import masked

MAX_TEXT = 500
VERSIONS = ("version", "torch", "transformers", "python")


def model_card(details: RunDetails, step: int | None) -> str:
    """README.md of a model, with the metadata that the hub reads; `step` is that of the checkpoint."""
    base = base_model(details.model)
    tags = ["proximo", *(["reinforcement-learning"] if details.config is not None else [])]
    head = ["---", "library_name: transformers"]
    head += [f"base_model: {json.dumps(base)}"] if base is not None and "/" in base else []
    head += ["tags:", *(f"- {tag}" for tag in tags), "---", ""]
    rows = [(name, value) for name, value in _choices(details, base, step) if value]
    table = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    body = [
        f"# {visible(details.run.name, MAX_TEXT)}",
        "",
        _sentence(details, base),
        "",
        *table,
        "",
        *_results(details, step),
    ]
    body += ["## Repeat it", "", "```sh", _again(details), "```", "", _versions(details), ""]
    return masked("\n".join([*head, *body]))


def base_model(model: str | None) -> str | None:
    """The name of a model without the path on the machine where it was trained."""
    if model is None or not (Path(model).is_absolute() or Path(model).exists()):
        return model
    return Path(model).name


def _sentence(details: RunDetails, base: str | None) -> str:
    how = details.algorithm_name or " ".join(details.command) or "a run"
    return f"`{visible(base or 'A model', MAX_TEXT)}` trained by {how} with Proximo."


def _choices(details: RunDetails, base: str | None, step: int | None) -> list[tuple[str, str]]:
    config, tokens = details.config, details.generated
    of = "" if config is None else f" of {config.steps}"
    changes = "; ".join(difference_lines(details))
    rows = [
        ("base model", base or ""),
        ("algorithm", f"{details.algorithm_name or ''}{f' ({changes})' if changes else ''}"),
        ("task and data", "" if config is None else explain.choice(config.task)),
        ("steps", f"{details.steps_done if step is None else step}{of}"),
        ("tokens generated in training", "" if tokens is None else f"{tokens:,}"),
    ]
    if config is not None:
        training = config.training
        rows += [
            ("a step", f"{training.groups} prompts × {training.group_size} completions"),
            ("learning rate", f"{training.learning_rate:g}"),
            ("adapter", "" if config.adapter is None else explain.choice(config.adapter)),
            ("seed", str(config.seed)),
        ]
    return rows


def _results(details: RunDetails, step: int | None) -> list[str]:
    """Held-out results before training and of this checkpoint, with their intervals."""
    wanted = details.steps_done if step is None else step
    before = next((row for row in details.evaluations if row["step"] == 0), None)
    after = next((row for row in reversed(details.evaluations) if row["step"] == wanted and wanted > 0), None)
    rows = [(name, row) for name, row in (("before", before), ("after", after)) if row is not None]
    if not rows:
        return []
    lines = [
        f"| {name} | {_share(row)} | {_number(row.get('outcome'))} | {row.get('problems', '')} |" for name, row in rows
    ]
    missing = [] if after is not None else ["", "This checkpoint was not evaluated."]
    head = "| | accuracy (95 % interval) | mean task score | problems |"
    title = ["## Held-out results", "", head, "|---|---|---|---|"]
    return [*title, *lines, *missing, ""]


def _share(row: Row) -> str:
    if not is_number(row.get("accuracy")):
        return ""
    around = (
        f" ({row['low']:.1%} to {row['high']:.1%})" if is_number(row.get("low")) and is_number(row.get("high")) else ""
    )
    return f"{row['accuracy']:.1%}{around}"


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) and is_number(value) else ""


def _again(details: RunDetails) -> str:
    """The command, with the config that lies next to the card."""
    return f"proximo {' '.join(details.command or ('train',))} proximo.config.toml --run runs/again"


def _versions(details: RunDetails) -> str:
    names = {"version": "Proximo"}
    versions = [f"{names.get(name, name)} {details.record[name]}" for name in VERSIONS if details.record.get(name)]
    return f"Versions: {', '.join(versions)}." if versions else ""


def _cell(value: str) -> str:
    return visible(value, MAX_TEXT).replace("|", "\\|").replace("\n", " ")
