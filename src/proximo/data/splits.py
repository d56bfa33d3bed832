"""Training and held-out splits, decided by a hash of the prompt, so that adding rows moves no other row."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from proximo.data.rows import Mistakes, Prompt


def stable_hash(*parts: object) -> int:
    """The same 64-bit number for the same parts, in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def prompt_key(prompt: Prompt) -> str:
    """A key that is equal for equal prompts, regardless of the order of a message's keys."""
    if isinstance(prompt, str):
        return json.dumps(prompt)
    return json.dumps([dict(sorted(message.items(), key=_role_and_content_first)) for message in prompt])


def _role_and_content_first(item: tuple[str, str]) -> tuple[bool, bool, str]:
    """Sort key that puts role and content first, the usual order, so that existing files keep their splits."""
    return item[0] != "role", item[0] != "content", item[0]


def is_held_out(key: str, share: float) -> bool:
    """Equal keys get equal answers, at any place of any file."""
    return stable_hash("held_out", key) < share * 2**64


@runtime_checkable
class Located(Protocol):
    @property
    def location(self) -> str: ...

    @property
    def key(self) -> str:
        """Key of the item; items with equal keys stay on one side of a split."""
        ...


Item = TypeVar("Item", bound=Located)
Read_co = TypeVar("Read_co", bound=Located, covariant=True)


@runtime_checkable
class ReadsItems(Protocol[Read_co]):
    def __call__(self, path: str, mistakes: Mistakes, *, field: str) -> Sequence[Read_co]: ...


def read_splits(
    read: ReadsItems[Item], path: str, held_out: float | str, mistakes: Mistakes, *, field: str = "data"
) -> tuple[list[Item], list[Item]]:
    """Read training and held-out items. Held out is a share of the file, or a separate file without overlap."""
    items = read(path, mistakes, field=f"{field}.path")
    if not isinstance(held_out, str):
        kept = [is_held_out(item.key, held_out) for item in items]
        return (
            [item for item, away in zip(items, kept, strict=True) if not away],
            [item for item, away in zip(items, kept, strict=True) if away],
        )
    if held_out == path:
        raise ValueError(
            f"{field}.held_out is {held_out!r}, which is trained on: give other data, or a share such as 0.1"
        )
    others = list(read(held_out, mistakes, field=f"{field}.held_out"))
    known = {item.key for item in others}
    for item in items:
        if item.key in known:
            mistakes.add(item.location, f"this prompt is also in {held_out}: remove one of them")
    return [item for item in items if item.key not in known], others


def refuse_empty(train: int, kept: int, path: str, held_out: float | str, *, field: str = "data", remedy: str) -> None:
    """Refuse an empty training split, or an empty held-out split if one was asked for; `remedy` is the advice."""
    what = f"{field}.path is {path!r} and {field}.held_out {held_out}"
    if not train and held_out != 1:
        raise ValueError(f"{what}: no row is left for train, give more rows or a smaller share")
    if not kept and held_out != 0:
        raise ValueError(f"{what}: no row is left for held_out, give {remedy}")
