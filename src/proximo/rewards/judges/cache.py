"""Verdicts on disk, by the hash of what was asked. A lost step gets the same scores when it is repeated.

Each process appends to a file of its own, by one system call a verdict, and reads those of all others when it starts:
there is nothing to lock, on any file system, and what a crash leaves at the end of a file is skipped.
"""

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proximo.system.lines import JsonLines
from proximo.system.opening import make_folder, names


def key_of(question: Mapping[str, Any]) -> str:
    """SHA-256 of what a verdict depends on."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


class Verdicts:
    """Scores by key."""

    def __init__(self, folder: Path | None) -> None:
        """Read a folder's verdicts; with None they are known to this process only."""
        self.folder = folder
        self._complaint, self._was_told = "", False
        self._scores: dict[str, float] = {}
        self._lock = threading.Lock()
        self._file: JsonLines | None = None
        self._unwritten: list[dict[str, Any]] = []
        for path in [folder / name for name in names(folder)] if folder is not None else ():
            if path.suffix == ".jsonl":
                self._read(path)

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> float | None:
        return self._scores.get(key)

    def add(self, key: str, score: float, more: Mapping[str, Any]) -> None:
        """Write a score before it is used. Where that fails, as on a full disk, it is kept in memory."""
        with self._lock:
            self._scores[key] = score
            if self.folder is None:
                return
            self._unwritten.append({"key": key, "score": score, **more})
            try:
                self._write(self.folder)
            except OSError as error:
                self._complaint = f"verdicts cannot be written to {self.folder}: {error.strerror or error}"

    def _write(self, folder: Path) -> None:
        """Append what is not written yet; a run's folder is made when the run starts, and not before."""
        if self._file is None and folder.parent.is_dir():
            make_folder(folder)
            self._file = JsonLines(folder / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl")
        if self._file is not None:
            self._file.append(*self._unwritten)
            self._unwritten.clear()

    def take_complaint(self) -> str:
        """Say once why verdicts are not written; empty where they are."""
        with self._lock:
            complaint = "" if self._was_told else self._complaint
            self._was_told = self._was_told or bool(complaint)
        return complaint

    def _read(self, path: Path) -> None:
        for row in JsonLines(path).readable():
            if isinstance(row.get("key"), str) and isinstance(row.get("score"), int | float):
                self._scores[row["key"]] = float(row["score"])
