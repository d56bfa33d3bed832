"""Nothing belongs to the whole process: two runs in one process, also in two threads, must not know of each other.

Whoever adds state to a module gives it to the run, the model or the call instead; what is meant for the whole process
is listed here with its reason. A cache is of a function of its arguments alone.
"""

import ast
import builtins
import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.house.test_house import FILES, SOURCE, parsed

FIXED = {"None", "bool", "bytes", "float", "frozenset", "int", "object", "str", "tuple", "type", "Path", "Stamp"}
"""Types of a cache's arguments, besides frozen classes: whoever is equal stays equal."""
STAMPS = {"Stamp", "bytes", "int", "tuple"}
"""Types that tell a file that was written again from what it was."""
BY_IDENTITY = {"environments/append_turn.py:without_marks": "a copy of a tokenizer, which nobody changes"}
OBJECTS = {
    "insight/page/lenses.py:_looks": "a cache of the viewer, by the step object that it holds",
    "insight/page/reader.py:_tables": "a cache of the viewer, by the file and when it was written",
    "insight/page/summaries.py:_summaries": "a cache of the viewer, by the step object that it holds",
    "data/row_copies.py:_digests": "digests of files that were read, by the state they were in",
    "data/rows.py:_last": "a cache of the rows of the file that was read last, by when it was written",
    "models/tokens/deadlines.py:_watch": "the thread that watches all deadlines, each of the thread that set it",
    "models/tokens/template_bounds.py:_binding": "a lock around what transformers itself has once in a process",
    "models/tokens/template_bounds.py:_left": "a context variable: each thread has its own value",
    "models/torch_globals.py:_IN_USE": "a lock around what torch itself has once in a process",
    "config/plugins.py:_loading": "a lock around Python's own table of modules",
    "rewards/calling.py:_LOOPS": "the event loop of all `async def` reward functions, by the process",
    "rewards/calling.py:_STARTING": "a lock around the start of that loop",
    "rewards/grading.py:_CURRENT": "a context variable: each thread has its own value",
    "rewards/judges/verdicts.py:_DECODER": "keeps nothing of what it decodes",
    "rewards/worker.py:calling": "a module of this package, in a reward function's own process",
    "processes/sandbox/kernel.py:_libc": "the C library",
    "system/phases.py:_NOTHING": "a context in which nothing happens",
    "system/memory.py:_ALONE": "a lock around the process's limit of memory",
    "config/trust/permission.py:ANYTHING": "has no fields",
    "config/trust/permission.py:_command_line": "what this process's command line permits",
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

KEEPING = {"ParamSpec", "TypeVar", "compile", "replace"}
"""Functions that make what nobody can change: a pattern, and what is as frozen as its model."""
CHANGES = {
    name
    for kind in (list, set, dict, deque, OrderedDict)
    for name in dir(kind)
    if not any(hasattr(other, name) for other in (object, tuple, frozenset, MappingProxyType))
}
"""Methods that change what they are called on."""
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


def stays(kind: str, frozen: set[str]) -> bool:
    """Whether what is called makes something that nobody can change."""
    built_in = getattr(builtins, kind, None)
    return kind in KEEPING | frozen or (isinstance(built_in, type) and built_in.__hash__ is not None)


def is_fixed(value: Any) -> bool:
    """Whether a value is compared by what it holds, so that nothing in it can change."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_fixed, value))
    return isinstance(value, type) or type(value).__hash__ not in (None, object.__hash__)


def frozen_classes() -> set[str]:
    """Of the package: dataclasses whose values cannot be changed."""
    return {
        node.name
        for path in FILES
        if "frozen=True" in path.read_text()
        for node in ast.walk(parsed(path))
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


def faults(text: str, tree: ast.Module, frozen: set[str]) -> set[str]:
    """Names of a module that hold state."""
    names = dict(assigned(tree))
    objects = {name for name, value in names.items() if (kind := called(value)) and not stays(kind, frozen)}
    nodes = ast.walk(tree) if "global " in text else ()  # looking through all takes seconds
    everywhere = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    return objects | everywhere | (names.keys() & set(changed(tree)))


@pytest.mark.slow("reads the whole package")
def test_no_module_holds_state():
    frozen = frozen_classes()
    found = {f"{name_of(path)}:{name}" for path in FILES for name in faults(path.read_text(), parsed(path), frozen)}
    others = found - OBJECTS.keys()
    assert [each for each in others if not is_fixed(value_of(each))] == []
    assert OBJECTS.keys() <= found


def value_of(place: str) -> Any:
    """What a module's name is once it is imported."""
    file, _, name = place.partition(":")
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return getattr(import_module(f"proximo.{module}"), name)


def cached(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if any(re.fullmatch(r"(functools\.)?(lru_)?cache(\(.*\))?", ast.unparse(e)) for e in node.decorator_list):
                yield node


def impure(function: ast.FunctionDef, frozen: set[str]) -> bool:
    """Whether equal arguments may mean something else later: they can change, or are a file without its stamp."""
    every = [*function.args.args, *function.args.kwonlyargs, *filter(None, (function.args.vararg, function.args.kwarg))]
    names = [
        {part.id for part in ast.walk(each.annotation) if isinstance(part, ast.Name)} if each.annotation else {""}
        for each in every
    ]
    held = set().union(*names)
    return not held <= FIXED | frozen or ("Path" in held and not any(each & STAMPS for each in names))


@pytest.mark.slow("reads the whole package")
def test_every_cache_is_of_a_pure_function():
    frozen = frozen_classes()
    found = {
        f"{name_of(path)}:{each.name}": impure(each, frozen)
        for path in FILES
        if "cache" in path.read_text()  # only those are worth the seconds that reading all of them takes
        for each in cached(parsed(path))
    }
    assert len(found) > 30
    assert {name for name, is_impure in found.items() if is_impure} == BY_IDENTITY.keys()


def test_an_impure_cache_is_found():
    for parameters, is_impure in {
        "": False,
        "size: int, *stamp: int": False,
        "path: Path, stamps: tuple[Stamp, ...]": False,
        "path: Path, is_ordered: bool": True,
        "model: PreTrainedModel": True,
        "rows: list[int]": True,
        "self": True,
    }.items():
        [function] = cached(ast.parse(f"@lru_cache(maxsize=1)\ndef f({parameters}):\n    pass"))
        assert impure(function, set()) is is_impure, parameters


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
        assert faults(text, ast.parse(text), {"Pair"}) == names
