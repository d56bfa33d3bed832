"""Frozen dataclasses to TOML and back, strictly.

A nested dataclass is a table. Where a field's type names several classes, the table says which one with
`type = "Clip"`, looked up among the classes of that field and nowhere else; where the field's union is open
(proximo/config/unions.py), `type = "path/to/file.py:Name"` takes a class from there. Defaults are written out, so
that a file says everything and loads back to an equal value. Reading finds all problems before it gives up.

None, which TOML lacks, is a key left out where the default is None, and the string "none" elsewhere.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from proximo.config.plugins import all_counted_from, counted_from, is_outside
from proximo.config.trust.permission import ANYTHING, CodePermission, of_file
from proximo.config.unions import (
    choices,
    classes,
    foreign_class,
    foreign_name,
    given_fields,
    is_choice,
    made,
    protocols,
    union_members,
)

T = TypeVar("T")

_BROKEN: Any = object()
"""Stands for a value whose problem is already noted."""

MAX_BYTES = 1_000_000
"""Bytes of a config; a real one has a few thousand."""
RUN_RECORD = "run.json"
"""The file next to a config.toml that makes it the record of a run."""
OF_COMMANDS = ("notify", "track")
"""Flags of commands that no config may have, since it may come from anyone; an address is not shown either."""
DEEPEST = 32
"""Tables within tables of a config; a real one has half a dozen."""
BARE_KEY = r"[A-Za-z0-9_-]+"
_KEY = rf"(?:{BARE_KEY}|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"


class ConfigError(ValueError):
    """Problems of a text: all of them, one to a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def dumps(value: Any, folder: str = "") -> str:
    """A dataclass as TOML, with every default written out. `folder`: the current one as seen from the file's, for paths
    in "file.py:Name", which `load` counts from there."""
    return "\n".join(table_lines(all_counted_from(folder, _plain(value, type(value), "")), "")).strip() + "\n"


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as tables, as `dumps` writes them."""
    return tomllib.loads(dumps(value))


Renew = Callable[[dict[str, Any]], dict[str, Any]]
"""Gives the fields of an earlier version's config the names that they have today."""


def load(
    path: str,
    kind: type[T],
    code: CodePermission | None = None,
    renew: Renew | None = None,
    words: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """The dataclass `kind` from a file; a ConfigError names the file and says what to do.

    `code` says which code that it names may be loaded; None: that of a user's own file, and of a file in a run folder
    what the user permits (config/trust/permission.py). `words`: short names at the top of the file, and the field that
    each stands for.

    A path in "file.py:Name" counts from the folder of this file, except in a run's own config.toml, whose paths count
    from the current folder, like those of the command that started it.
    """
    if not Path(path).is_file():
        raise ConfigError([f"{path}: there is no such file{', but a folder' * Path(path).is_dir()}"])
    with Path(path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError([f"{path}: more than {MAX_BYTES} bytes, which is no config; give a .toml file of settings"])
    try:
        text = data.decode("utf-8-sig")
        folder = Path(path).parent
        start = "" if (folder / RUN_RECORD).is_file() else str(folder)
        code = code or of_file(path)
        return loads(text, kind, path, finite=True, code=code, renew=renew, words=words, folder=start)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError([f"{path}:{line}: not UTF-8, {error.reason}; save the file as UTF-8"]) from None


def loads(
    text: str,
    kind: type[T],
    source: str = "config",
    *,
    finite: bool = False,
    code: CodePermission = ANYTHING,
    renew: Renew | None = None,
    words: Mapping[str, str] = MappingProxyType({}),
    folder: str = "",
) -> T:
    """The dataclass `kind` from TOML; `source` names the text in a ConfigError. `finite`: whether to refuse inf and
    NaN. `code`: which code that it names may be loaded. `folder`: what paths in "file.py:Name" count from; empty: the
    current folder."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"{source}: this is not TOML: {error}"]) from None
    if nested_beyond(data, DEEPEST):
        raise ConfigError([f"{source}: its tables are nested too deeply for any config"])
    lines = line_numbers(text)
    try:
        tables = data if renew is None else renew(data)
        _spell_out(tables, words, lines)
        code.admit(tables)
    except ValueError as error:
        raise ConfigError([f"{source}: {error}"]) from None
    reader = _Reader(lines, finite, code.load_class, folder)
    value = reader.table(tables, kind, "")
    if reader.problems:
        problems = sorted(reader.problems, key=lambda problem: problem[0])
        raise ConfigError([f"{source}:{line}: {what}" if line else f"{source}: {what}" for line, what in problems])
    return value


def _spell_out(tables: dict[str, Any], words: Mapping[str, str], lines: dict[str, int]) -> None:
    """Put each word's value where its field is; what is wrong with it is then told with the word's line."""
    for word in [word for word in words if word in tables]:
        *path, name = words[word].split(".")
        table = tables
        for each in path:
            inner = table.get(each)
            table[each] = table = inner if isinstance(inner, dict) else {}
        if name in table:
            raise ValueError(f"{word} and {words[word]} are the same field: give one of them")
        table[name] = tables.pop(word)
        lines[words[word]] = lines.get(word, 0)


def _container(kind: Any, *origins: type) -> Any | None:
    """The tuple or mapping among the options."""
    return next((o for o in union_members(kind) if o in origins or typing.get_origin(o) in origins), None)


def _value_kind(kind: Any) -> Any:
    """Type of the values of the mapping among the options; None where there is no mapping."""
    if Any in union_members(kind):
        return Any
    mapping = _container(kind, dict, Mapping)
    return None if mapping is None else (*typing.get_args(mapping), Any, Any)[1]


def _item_kinds(kind: Any, length: int) -> list[Any]:
    """The type of every item of a tuple; for `tuple[X, ...]` as many as there are items."""
    kinds = list(typing.get_args(kind))
    return [kinds[0]] * length if len(kinds) == 2 and kinds[1] is Ellipsis else kinds


def _scalar(value: Any, options: tuple[Any, ...]) -> Any:
    """The value as a field with these options holds it: an integer in a float's place becomes one."""
    for option in options:
        # A literal with its type, because Python holds True and 1 to be equal.
        if type(value) is option or (type(value), value) in [(type(it), it) for it in typing.get_args(option)]:
            return value
    if Any in options and type(value) in (bool, int, float, str):
        return value
    return float(value) if type(value) is int and float in options else _BROKEN


def _words(kind: Any) -> str:
    """Name, for the user, the values that a field accepts."""
    simple = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    simple |= {types.NoneType: '"none"', Any: "a string or a number"}
    words = []
    for option in union_members(kind):
        if typing.get_origin(option) is Literal:
            words += [inline(choice) for choice in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            first, *rest = typing.get_args(option)
            words.append(f"an array ({_words(first)} each)" if rest == [...] else f"an array of {1 + len(rest)}")
        elif option in simple:
            words.append(simple[option])
        else:
            words.append(f"a table with a type ({', '.join(choices(kind))})" if is_choice(kind) else "a table")
    return " or ".join(dict.fromkeys(words))


# Writing: a dataclass to plain tables, arrays and scalars, and these to text


def _plain(value: Any, kind: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and (type(value) in classes(kind) or protocols(kind)):
        return _plain_type(type(value), kind, path) | _plain_fields(value, path)
    if value is None and types.NoneType in union_members(kind):
        return "none"
    if isinstance(value, tuple) and (several := _container(kind, tuple)) is not None:
        kinds = _item_kinds(several, len(value))
        if len(kinds) == len(value):
            return [_plain(item, kinds[i], f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and (inner := _value_kind(kind)) is not None:
        return {key: _plain(item, inner, join(path, key)) for key, item in value.items()}
    if isinstance(value, list) and Any in union_members(kind):
        return [_plain(item, Any, f"{path}[{i}]") for i, item in enumerate(value)]
    if value == "none" and types.NoneType in union_members(kind):
        raise ValueError(f'{path} is the string "none", which would load as None: use another string')
    scalar = _scalar(value, union_members(kind))
    if scalar is _BROKEN:
        raise ValueError(f"{path} is {value!r}: must be {_words(kind)}")
    return scalar


def _plain_type(its_class: type, kind: Any, path: str) -> dict[str, str]:
    """Key by which a table says which class it is; nothing where there is no choice."""
    if its_class in classes(kind):
        return {"type": its_class.__name__} if is_choice(kind) else {}
    try:
        return {"type": foreign_name(its_class, kind)}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _plain_fields(value: Any, path: str) -> dict[str, Any]:
    items = {}
    for field, kind in given_fields(type(value)):
        item = getattr(value, field.name)
        # A default made by a factory is a piece, never None.
        if item is not None or field.default is not None:
            items[field.name] = _plain(item, kind, join(path, field.name))
    return items


def table_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Scalars before tables: TOML has no way back to the outer table."""
    later = {key: item for key, item in table.items() if isinstance(item, dict) or _is_tables(item)}
    for key, item in table.items():
        if key not in later:
            yield f"{_key(key)} = {inline(item)}"
    for key, item in later.items():
        inner = join(path, _key(key))
        for part in [item] if isinstance(item, dict) else item:
            yield from ("", f"[{inner}]" if isinstance(item, dict) else f"[[{inner}]]")
            yield from table_lines(part, inner)


def _is_tables(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(part, dict) for part in item)


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's escapes are JSON's, but for one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(BARE_KEY, name) else inline(name)


def shortened(data: Any) -> str:
    text = inline(data)
    return text if len(text) <= 60 else text[:57] + "..."


# Reading: tables to a dataclass; where each key of a text stands is found beside the parser, which does not say


@dataclasses.dataclass
class _Reader:
    lines: Mapping[str, int]
    finite: bool
    load: Callable[[str], type]
    folder: str
    problems: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def refuse(self, path: str, what: str) -> Any:
        """Note a problem with the line of the path, or of the nearest table around it."""
        nearest = path
        while nearest and nearest not in self.lines:
            nearest = nearest[: max(nearest.rfind("."), nearest.rfind("["), 0)]
        self.problems.append((self.lines.get(nearest, 0), what))
        return _BROKEN

    def value(self, data: Any, kind: Any, path: str) -> Any:
        options = union_members(kind)
        if data == "none" and types.NoneType in options:
            return None
        if isinstance(data, dict) and choices(kind):
            return self.table(data, kind, path)
        if isinstance(data, dict) and (inner := _value_kind(kind)) is not None:
            return {key: self.value(item, inner, join(path, key)) for key, item in data.items()}
        if isinstance(data, list) and Any in options:
            return [self.value(item, Any, f"{path}[{i}]") for i, item in enumerate(data)]
        if isinstance(data, list) and (several := _container(kind, tuple)) is not None:
            kinds = _item_kinds(several, len(data))
            if len(kinds) == len(data):
                return tuple(self.value(item, kinds[i], f"{path}[{i}]") for i, item in enumerate(data))
        scalar = _scalar(data, options)
        if scalar is _BROKEN:
            return self.refuse(path, f"{path} is {shortened(data)}: give {_words(kind)}")
        if self.finite and isinstance(scalar, float) and not math.isfinite(scalar):
            return self.refuse(path, f"{path} is {scalar}: give a finite number")
        return counted_from(self.folder, scalar) if isinstance(scalar, str) else scalar

    def table(self, data: dict[str, Any], field_kind: Any, path: str) -> Any:
        """An instance of one of the field's classes; `type` says which where there is a choice."""
        kind = self.named(data.get("type"), field_kind, join(path, "type"))
        if kind is _BROKEN:
            return _BROKEN
        before = len(self.problems)
        arguments = self.arguments({key: item for key, item in data.items() if key != "type"}, kind, path)
        if len(self.problems) > before:
            return _BROKEN
        try:
            return made(kind, field_kind, arguments)
        except ValueError as error:
            return self.refuse(path, f"{path or kind.__name__}: {error}")

    def named(self, name: Any, field_kind: Any, here: str) -> Any:
        """The class that `type` names."""
        ours = {kind.__name__: kind for kind in classes(field_kind)}
        assert len(ours) == len(classes(field_kind)), f"{here}: two classes share a name among {list(ours)}"
        if name is None and len(ours) == 1:
            return next(iter(ours.values()))
        if isinstance(name, str) and name in ours:
            return ours[name]
        if isinstance(name, str) and is_outside(name) and protocols(field_kind):
            try:
                return foreign_class(counted_from(self.folder, name), field_kind, self.load)
            except ValueError as error:
                return self.refuse(here, f"{here} is {shortened(name)}: {error}")
        problem = "is missing" if name is None else f"is {shortened(name)}"
        known = ", ".join(choices(field_kind))
        return self.refuse(here, f"{here} {problem}: give one of {known}{_nearest(name, list(ours))}")

    def arguments(self, data: dict[str, Any], kind: type, path: str) -> dict[str, Any]:
        known = {field.name: (field, field_kind) for field, field_kind in given_fields(kind)}
        for key in [key for key in data if key not in known]:
            if (here := join(path, key)) in OF_COMMANDS:
                self.refuse(here, f"{here} belongs to the command, and to no config: give it as `--{here}`")
                continue
            knows = ", ".join(known) or "no keys"
            problem = f"{here} = {shortened(data[key])} is unknown{_nearest(key, list(known))}"
            self.refuse(here, f"{problem}; {kind.__name__} knows {knows}")
        values = {}
        for name, (field, field_kind) in known.items():
            if name in data:
                values[name] = self.value(data[name], field_kind, join(path, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.refuse(path, f"{join(path, name)} is missing: give {_words(field_kind)}")
        return values


def _nearest(name: Any, names: list[str]) -> str:
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1)
    return f", perhaps {lowered[close[0]]}" if close else ""


def line_numbers(text: str) -> dict[str, int]:
    """Line of each key and table. Keys inside inline tables have none; the nearest table around them does."""
    lines: dict[str, int] = {}
    tables: dict[str, int] = {}
    header = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if match := re.match(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]", line):
            *outer, last = _names(match[2])
            header = ""
            for name in outer:
                header = join(header, name)
                header += f"[{tables[header]}]" if header in tables else ""
            header = join(header, last)
            if match[1] == "[[":
                tables[header] = tables.get(header, -1) + 1
                header += f"[{tables[header]}]"
            lines.setdefault(header, number)
        elif match := re.match(rf"\s*({_DOTTED})\s*=", line):
            lines.setdefault(join(header, ".".join(_names(match[1]))), number)
    return lines


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_KEY, dotted)]


def nested_beyond(data: Any, depth: int) -> bool:
    """Tell whether tables lie deeper than this. Counted, because Python's own limit differs between versions."""
    level = [data]
    for _ in range(depth):
        level = [item for value in level for item in _inside(value)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
