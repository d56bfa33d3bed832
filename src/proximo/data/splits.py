"""Training and held-out splits, decided by a hash of the prompt, so that adding rows moves no other row.

Only a file of which the hash holds out nothing is split anew when its rows change.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from proximo.data.rows import Mistakes, Prompt

ENOUGH = 10
"""Prompts of a file of which some can be held out although their hash holds out none."""
AGAIN = "by a second hash, as the first, by which runs hold out prompts, chooses none of these"
"""Words for a person on rows that were held out by the second hash."""


def stable_hash(*parts: object) -> int:
    """The same 64-bit number for the same parts, in every process and on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def prompt_key(prompt: Prompt) -> str:
    """A key that is equal for equal prompts, regardless of the order of a message's keys."""
    if isinstance(prompt, str):
        return json.dumps(prompt)
    return json.dumps([dict(sorted(message.items(), key=_role_and_content_first)) for message in prompt])


def _role_and_content_first(item: tuple[str, str]) -> tuple[bool, bool, str]:
    """Sort key that puts role and content first, the usual order, so that existing files keep their splits."""
    return item[0] != "role", item[0] != "content", item[0]


def held_out_hash(key: str) -> int:
    """The hash of a prompt's key by which it is held out, of 64 bits."""
    return stable_hash("held_out", key)


def second_hash(key: str) -> int:
    """The hash by which prompts are held out where the first chooses none."""
    return stable_hash("held_out again", key)


def is_held_out(key: str, share: float) -> bool:
    """Equal keys get equal answers, at any place of any file."""
    return held_out_hash(key) < share * 2**64


def held_out_keys(keys: Iterable[str], share: float) -> set[str]:
    """The keys that a share of a file holds out: those that their hash says. Where it says none of them, as for the
    training prompts of a run that held out the same share, the lowest of a second hash, if there are enough."""
    different = set(keys)
    chosen = {key for key in different if is_held_out(key, share)}
    if chosen or not share or len(different) < ENOUGH:
        return chosen
    return set(sorted(different, key=second_hash)[: number_again(len(different), share)])


def number_again(different: int, share: float) -> int:
    """Number of different prompts that the second hash holds out."""
    return min(max(1, round(share * different)), different - 1)


def chosen_again(held_out: Sequence["Located"], share: float | str) -> bool:
    """Tell whether held-out items were chosen by the second hash."""
    return not isinstance(share, str) and bool(held_out) and not any(is_held_out(each.key, share) for each in held_out)


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
        keys = [item.key for item in items]
        away = held_out_keys(keys, held_out)
        train = [item for item, key in zip(items, keys, strict=True) if key not in away]
        return train, [item for item, key in zip(items, keys, strict=True) if key in away]
    refuse_same(path, held_out, field)
    others = list(read(held_out, mistakes, field=f"{field}.held_out"))
    known, train = {item.key for item in others}, []
    for item in items:
        if item.key in known:
            mistakes.add(item.location, f"this prompt is also in {held_out}: remove one of them")
        else:
            train.append(item)
    return train, others


def refuse_same(path: str, held_out: str, field: str) -> None:
    """Refuse held-out data that are the training data."""
    if held_out == path:
        raise ValueError(
            f"{field}.held_out is {held_out!r}, which is trained on: give other data, or a share such as 0.1"
        )


def refuse_empty(train: int, kept: int, path: str, held_out: float | str, *, field: str = "data", remedy: str) -> None:
    """Refuse an empty training split, or an empty held-out split if one was asked for; `remedy` is the advice."""
    what = f"{field}.path is {path!r} and {field}.held_out {held_out}"
    if not train and held_out != 1:
        raise ValueError(f"{what}: no row is left for train, give more rows or a smaller share")
    if not kept and held_out != 0:
        raise ValueError(f"{what}: no row is left for held_out, give {remedy}")
