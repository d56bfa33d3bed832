"""Code that a config names is loaded in known places, and texts of configs are read with a word on whose they are."""

import ast
from collections.abc import Iterator

from tests.house.test_house import FILES, SOURCE, parsed

LOADS = {
    "config/unions.py": "asks its caller's `load`, which is that of the config's reader",
    "config/trust/permission.py": "asks first",
    "runs/tracking/trackers/__init__.py": "named on the command line",
    "environments/starts.py": "of a config that was admitted",
    "environments/tool_calls.py": "of a config that was admitted",
    "environments/multi_turn.py": "of a config that was admitted",
    "rl/schedules.py": "of a config that was admitted",
}
"""Files that load classes and functions by name, and why they may."""
OWN = {"insight/compare/worker.py": "a config that the comparison has just written"}
"""Files that read a config's text without saying whose it is."""


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for path in FILES:
        if name in path.read_text():
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                    yield path.relative_to(SOURCE).as_posix(), node


def test_code_is_loaded_in_known_places():
    found = {file for name in ("load_class", "load_function") for file, _ in calls(name)}
    found |= {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if "plugins.load" in path.read_text()
    }
    found -= {"config/plugins.py", "config/toml.py"}
    assert found - {"insight/folder.py"} == set(LOADS)


def test_texts_of_configs_say_whose_they_are():
    found = {
        file
        for name in ("loads", "loads_run")
        for file, call in calls(name)
        if ast.unparse(call.func) in ("toml.loads", "loads_run")
        and not any(each.arg == "code" for each in call.keywords)
        and len(call.args) < 3
    }
    assert found == set(OWN)
