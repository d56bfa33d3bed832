"""Files of run folders are opened in one way: by the functions of system/opening.py, which trust nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_house import SOURCE, parsed

METHODS = {
    *("read_bytes", "read_text", "write_bytes", "write_text", "unlink", "rmdir", "mkdir", "touch"),
    *("symlink_to", "hardlink_to", "iterdir", "glob", "rglob"),
}
"""Methods of Path that follow links, or open whatever is there."""
FUNCTIONS = {
    "os": {
        "open",
        "truncate",
        "replace",
        "rename",
        "remove",
        "unlink",
        "rmdir",
        "mkdir",
        "makedirs",
        "symlink",
        "link",
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"},
    "glob": {"glob", "iglob"},
    "torch": {"load", "save"},
}
TABLES = {"ParquetFile": 0, "read_table": 0, "read_schema": 0, "read_metadata": 0, "write_table": 1}
"""Functions of pyarrow and the place of their file, which must be an open one and called so."""
TENSORS = {"load_file", "save_file", "safe_open"}

NAMES = re.compile("|".join(sorted({"open", "replace", "rename", *METHODS, *TABLES, *TENSORS, *FUNCTIONS})))

ELSEWHERE = {
    "data": "files that the user names",
    "distributed/jobs.py": "the package's own templates",
    "distributed/launching.py": "notes in a temporary folder of its own",
    "distributed/saving.py": "a checkpoint that is being written, in a folder that has just been made",
    "samplers/engines": "temporary folders of its own",
    "models": "folders of models",
    "processes/server.py": "a temporary folder of its own",
    "processes/tree.py": "the temporary folder of a server",
    "processes/worker.py": "/proc",
    "environments/worker.py": "/dev/null",
    "processes/sandbox": "the cage of a program",
    "runs/tracking/trackers": "a tracker's own file, in the tracker's own folder",
    "insight/page/files.py": "the page's own files",
    "system/machine.py": "/proc, and readings in the user's own cache",
    "config/plugins.py": "code that the user names",
    "serving/server.py": "the page's own files",
    "config/toml.py": "a config that the user names; bounded there",
    "system/version.py": "this package",
}
"""What is no run folder, with what it is; keep it short."""
LINES = {
    "cli/__init__.py": ("open(os.devnull",),
    "api/threads.py": ("folder.glob(",),
    "insight/charts/pages.py": ("(folder / name)",),  # our own styles
    "processes/forkserver.py": ("open(os.devnull",),
    "insight/doctor/damage.py": ("folder.rglob(",),  # stamps alone
    "insight/report/settings.py": ("details.run.path.iterdir()",),  # names and sizes alone
    "insight/page/bundle/writing.py": ("STATIC",),
    "system/locks.py": ("os.open(path.parent", "self.path.parent.rmdir()", "/proc/"),
    "system/scratch.py": ("tempfile.gettempdir()", "shutil.rmtree("),
    "runs/tracking/readings.py": ("path.read_text(",),  # /proc
    "system/memory.py": ("/proc/self/statm",),
    "learner/named_tensors.py": ("save_file(", "load_file(check_file("),
    "learner/footprint.py": ("Path(limit).read_text()",),  # /sys
    "runs/config_changes.py": ("glob.glob(",),
    "cli/commands/doctor.py": ("folder.glob(",),  # names alone
    "api/comparing.py": ("path.iterdir()",),  # names alone, here and below
    "api/validate.py": ("path.iterdir()",),
    "api/export/export.py": ("target.iterdir()",),
    "api/export/merging.py": ("folder.iterdir()",),
    "cli/commands/view.py": ("out.iterdir()", "out.rglob("),
    "insight/compare/comparison_folder.py": ("self.folder.iterdir()",),
    "runs/forking.py": ("folder.iterdir()",),
    "insight/folder.py": ("folder.iterdir()",),
    "system/folders.py": ("folder.rglob(", "os.open(path, os.O_RDONLY | FILE)", "path.rmdir()"),
    "system/opening.py": ("os.", "shutil.rmtree(path.name, dir_fd="),
}


def offences(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.walk(parsed(path)) if NAMES.search(text) else ():
        if isinstance(node, ast.Call) and _opens(node):
            yield f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"


def _opens(call: ast.Call) -> bool:
    match call.func:
        case ast.Name("open"):
            return True
        case ast.Name(name) if name in TENSORS:
            return True
        case ast.Attribute(ast.Name("pq"), name) if name in TABLES:
            place = TABLES[name]
            return len(call.args) <= place or not isinstance(each := call.args[place], ast.Name) or each.id != "file"
        case ast.Attribute(ast.Name(module), name) if module in FUNCTIONS:
            return name in FUNCTIONS[module]
        case ast.Attribute(_, "open"):
            return bool(call.args) and isinstance(call.args[0], ast.Constant)
        case ast.Attribute(_, "replace" | "rename"):
            return len(call.args) == 1 and not call.keywords
        case ast.Attribute(_, name):
            return name in METHODS
    return False


@pytest.mark.slow("reads the whole package")
def test_files_of_run_folders_are_opened_in_one_way():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if any(name == known or name.startswith(f"{known}/") for known in ELSEWHERE):
            continue
        wrong += [each for each in offences(path) if not any(known in each for known in LINES.get(name, ()))]
    assert wrong == [], "use system/opening.py: " + "\n".join(wrong)


def test_exceptions_are_needed():
    for name in ELSEWHERE:
        files = [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
        assert any(each for file in files for each in offences(file)), f"{name} needs no exception any more"
    for name, lines in LINES.items():
        found = list(offences(SOURCE / name))
        assert [line for line in lines if not any(line in each for each in found)] == [], name
