"""A plugin for pytest that writes down how each case ended, one JSON row each."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=Path, help="where to write them")


class Counting:
    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One row for a case: its call, or whatever before or after that went wrong."""
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-400:]
            row = {"test": report.nodeid, "outcome": report.outcome, "reason": reason}
            with self.file.open("a") as rows:
                rows.write(json.dumps(row) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--cases")) is not None:
        config.pluginmanager.register(Counting(file))
