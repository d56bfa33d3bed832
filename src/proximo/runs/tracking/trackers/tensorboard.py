"""TensorBoard: event files in the run folder; `tensorboard --logdir runs` shows all runs below a folder."""

import json
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from proximo.runs.tracking.tracker import Completion, TrackedRun

MESSAGES = ("event", "summary", "tensor", "types")
"""TensorBoard's protocol buffers."""


class TensorBoard:
    """Scalars, and texts in Markdown for the config, the events and the completions."""

    needs: ClassVar[tuple[str, ...]] = ("tensorboard",)
    package: ClassVar[str] = "tensorboard"

    def open(self, run: TrackedRun, key: str | None) -> str:
        messages = (import_module(f"tensorboard.compat.proto.{each}_pb2") for each in MESSAGES)
        self._event, self._summary, self._tensor, self._types = messages
        writing = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writing.EventFileWriter(str(run.place))
        if key is None:
            text = json.dumps({**run.config, "proximo": dict(run.facts)}, indent=2, default=str)
            self._text(0, "config", f"```\n{text}\n```")
        return key or run.name

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._write(step, [value(tag=name, simple_value=number) for name, number in values.items()])

    def event(self, step: int, severity: str, text: str) -> None:
        self._text(step, "tables/events", f"**{severity}** {text}")

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        columns = list(rows[0]) if rows else []
        lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row.values()] for row in rows)]
        self._text(step, "tables/completions", "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        if summary:
            self._text(0, "summary", f"```\n{json.dumps(dict(summary), indent=2)}\n```")
        self._writer.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        """A text as the text plugin reads it: a tensor with one string."""
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._write(step, [self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def _write(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))


def _cell(value: str | float | None) -> str:
    """A value inside a table of Markdown."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
