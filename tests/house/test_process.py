"""Nothing belongs to the whole process: two runs in one process, also in two threads, must not know of each other.

Whoever adds state to a module gives it to the run, the model or the call instead; a cache of a pure function, or
something that is meant for the whole process, is listed here with its reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.test_house import FILES, SOURCE

PURE = "the same for equal arguments, whoever asks"
FILE = "what a file holds, by its path and when it was written"
COMPILED = "a compiled function, which keeps its graphs by what it is called with"
CLASSES = "classes of transformers, imported when they are asked for"
CACHES = {
    "insight/charts/pages.py:style": FILE,
    "insight/doctor/damage.py:_altered": FILE,
    "insight/doctor/damage.py:_complaint": FILE,
    "insight/doctor/damage.py:_complaints": FILE,
    "insight/doctor/damage.py:_is_of": FILE,
    "insight/doctor/damage.py:_lost": FILE,
    "insight/doctor/damage.py:_shorter": FILE,
    "insight/folder.py:_cached_step": FILE,
    "insight/lens/files.py:_large_is_intact": FILE,
    "insight/page/overview.py:_checked": FILE,
    "insight/page/timeline.py:_rows": FILE,
    "models/compiling.py:_compiled": COMPILED,
    "models/loading.py:_parsed": PURE,
    "models/packing/support.py:warn_of_fallback": "a warning is shown once in a process",
    "models/logprobs.py:_compiled_passes": COMPILED,
    "models/packing/attention.py:registered": "our attention is made known to transformers once in a process",
    "models/packing/support.py:_packed_classes": CLASSES,
    "models/routing.py:_router": CLASSES,
    "models/shipped/__init__.py:_known_complaints": FILE,
    "config/unions.py:_closed_fields": CLASSES,
    "planning/cards.py:_measured": "the limits of this machine, measured once",
    "samplers/embedded/cuda_graphs.py:_compiled_joined": COMPILED,
    "samplers/embedded/cuda_graphs.py:_compiled_layer": COMPILED,
    "samplers/embedded/cuda_graphs.py:compiled_draw": COMPILED,
    "samplers/embedded/fused.py:_classes": CLASSES,
    "samplers/rng.py:_root": PURE,
    "processes/sandbox/filtering.py:instructions": PURE,
    "environments/append_turn.py:without_marks": PURE,
    "environments/tool_calls.py:schema_of": "what a user's function says of itself; its module is loaded once",
    "tasks/arithmetic.py:_stream": PURE,
    "tasks/countdown.py:_stream": PURE,
    "tasks/draws.py:_permutation": PURE,
    "tasks/echo.py:_stream": PURE,
    "tasks/gym.py:_dataset": PURE,
    "tasks/gym_scoring.py:_dataset": PURE,
    "tasks/sorting.py:_stream": PURE,
    "tasks/chain.py:_stream": PURE,
    "config/trust/files.py:_installed": "where Python's packages are, which stays while a process runs",
    "environments/examples/python.py:_sandbox": "a sandbox that keeps nothing between two programs",
    "system/version.py:source_fingerprint": FILE,
}
OBJECTS = {
    "insight/page/lenses.py:_looks": "a cache of the viewer, by the step object that it holds",
    "insight/page/reader.py:_tables": "a cache of the viewer, by the file and when it was written",
    "insight/page/summaries.py:_summaries": "a cache of the viewer, by the step object that it holds",
    "models/tokens/template_bounds.py:_binding": "a lock around what transformers itself has once in a process",
    "models/tokens/template_bounds.py:_left": "a context variable: each thread has its own value",
    "models/torch_globals.py:_IN_USE": "a lock around what torch itself has once in a process",
    "config/plugins.py:_loading": "a lock around Python's own table of modules",
    "rewards/calling.py:_LOOPS": "the event loop of all `async def` reward functions, by the process",
    "rewards/calling.py:_STARTING": "a lock around the start of that loop",
    "rewards/grading.py:_CURRENT": "a context variable: each thread has its own value",
    "rewards/worker.py:calling": "a module of this package, in a reward function's own process",
    "processes/sandbox/kernel.py:_libc": "the C library",
    "config/trust/permission.py:ANYTHING": "has no fields",
    "config/trust/permission.py:_said": "what this process's command line permits",
}
CALLS = {
    "planning/published_shapes.py:manual_seed": "inside `guarded`",
    "cli/commands/replay.py:set_num_threads": "a command's own process",
    "cli/commands/view.py:set_num_threads": "a command's own process",
    "system/machine.py:set_flags": "called by commands, for their own process",
    "system/machine.py:set_num_threads": "called by commands, for their own process",
    "models/tiny.py:default_generator.manual_seed": "inside `guarded`",
    "models/torch_globals.py:cuda.manual_seed": "inside `guarded`",
    "models/torch_globals.py:cuda.set_rng_state": "inside `guarded`",
    "models/torch_globals.py:default_generator.manual_seed": "inside `guarded`",
    "models/torch_globals.py:fork_rng": "this is `guarded`",
    "models/torch_globals.py:set_rng_state": "inside `guarded`",
    "processes/worker.py:manual_seed": "a worker's own process",
}
"""What changes torch for the whole process."""

IMMUTABLE = {
    "JSONDecoder",
    "TypeVar",
    "compile",
    "fields",
    "get_args",
    "next",
    "replace",
    "schema",
    "tuple",
    "frozenset",
    "object",
    "machine",
    "range",
    "get_num_threads",
}
"""Functions whose result nobody can change."""
CHANGES = [
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "sort",
    "update",
]
TORCH = re.compile(
    r"\b(?:torch|sys\.modules\[.torch.\])\.(?:random\.|backends\.\w+\.)?((?:cuda\.|default_generator\.)?(?:fork_rng|manual_seed"
    r"|set_default_device|set_default_dtype|set_flags|set_num_threads|set_rng_state|use_deterministic_algorithms))\("
)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def called(node: ast.expr) -> str:
    """The last word of what is called; empty where it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def frozen_classes() -> set[str]:
    """Of the package: dataclasses whose values cannot be changed."""
    return {
        node.name
        for path in FILES
        if "frozen=True" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(each) and "frozen=True" in ast.unparse(each) for each in node.decorator_list)
    }


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of a module, with what they are first."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                yield target.id, node.value


def changed(tree: ast.Module) -> Iterator[str]:
    """Names that functions of a module assign into or call a changing method of."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (each for function in functions for each in ast.walk(function)):
        if isinstance(node, ast.Global):
            yield from node.names
        targets = (
            node.targets
            if isinstance(node, ast.Assign | ast.Delete)
            else [node.target]
            if isinstance(node, ast.AugAssign | ast.AnnAssign)
            else [node.func]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
            else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.value, ast.Name):
                yield target.value.id


def faults(text: str, frozen: set[str]) -> set[str]:
    """Names of a module that hold state."""
    tree = ast.parse(text)
    names = dict(assigned(tree))
    objects = {name for name, value in names.items() if called(value) and called(value) not in IMMUTABLE | frozen}
    nodes = ast.walk(tree) if "global " in text else ()  # looking through all takes seconds
    everywhere = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    return objects | everywhere | (names.keys() & set(changed(tree)))


def test_no_module_holds_state():
    frozen = frozen_classes()
    found = {f"{name_of(path)}:{name}" for path in FILES for name in faults(path.read_text(), frozen)}
    assert found == OBJECTS.keys()


def test_every_cache_is_of_a_pure_function():
    found = {
        f"{name_of(path)}:{node.name}"
        for path in FILES
        if "cache" in (text := path.read_text())  # only those are worth the seconds that reading all of them takes
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        for each in node.decorator_list
        if re.fullmatch(r"(functools\.)?(lru_)?cache(\(.*\))?", ast.unparse(each))
    }
    assert found == CACHES.keys()


def test_what_changes_torch_is_known():
    found = {f"{name_of(path)}:{match[1]}" for path in FILES for match in TORCH.finditer(path.read_text())}
    assert found == CALLS.keys()


def test_state_is_found():
    for text, names in {
        "_allowed = True\ndef allow():\n    global _allowed\n    _allowed = False": {"_allowed"},
        "TALLY = Tally()": {"TALLY"},
        "_WORKERS: dict[str, int] = {}\ndef worker(name):\n    return _WORKERS.setdefault(name, 1)": {"_WORKERS"},
        "SEEN = []\ndef see(it):\n    SEEN[0] = it": {"SEEN"},
        "NAMES = {'a': 1}\nPAIR = Pair(1)\ndef f():\n    names = {}\n    names['a'] = NAMES['a']": set(),
    }.items():
        assert faults(text, {"Pair"}) == names
