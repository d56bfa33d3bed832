"""Locations of data: a file, a pattern of files, a folder, or a data set on the Hugging Face hub.

A data set on the hub is OWNER/NAME[@REVISION][:INSIDE], where INSIDE is a file, a pattern or a folder within it:
`openai/gsm8k`, `openai/gsm8k:main`, `openai/gsm8k@740312a:main/train-*.parquet`.
"""

import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from proximo.data.formats import FORMATS
from proximo.system.opening import blob_of

_HUB = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<inside>.+))?", re.ASCII)
SECONDS = 10.0
"""Seconds to wait for the hub to say which files a data set has."""
_DESCRIBING = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files that describe a data set next to its rows."""
TRAINING, TESTING = ("train", "training"), ("test", "testing", "validation", "valid", "val", "dev", "eval")
"""Words at the start of a file's name, or of its folder's, that name a split."""


@dataclass(frozen=True)
class HubData:
    """A data set on the hub."""

    repo: str
    revision: str | None
    inside: str
    """File, pattern or folder within it; empty: everything."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}{f':{self.inside}' if self.inside else ''}"


def hub_data(path: str) -> HubData | None:
    """The hub's data set that a path names; None for a path on this machine."""
    match = _HUB.fullmatch(path)
    if match is None or Path(path).exists() or Path(match["repo"]).suffix in FORMATS or glob.has_magic(match["repo"]):
        return None
    return HubData(match["repo"], match["revision"], match["inside"] or "")


def data_name(path: str) -> str:
    """A short name: `sums` for data/sums.jsonl, `gsm8k` for openai/gsm8k:main, `train` for train-*.parquet."""
    hub = hub_data(path)
    if hub is not None:
        return hub.repo.rpartition("/")[2]
    return Path(path).stem.rstrip("*-_.") or Path(path).parent.name or "data"


def data_files(path: str, field: str) -> list[str]:
    """The files that a path means, in order; ValueError names the field. A folder must hold one format and one
    split."""
    hub = hub_data(path)
    if hub is not None:
        root, names = _on_hub(hub, field)
        inside = _inside(names, hub.inside)
        files = {str(replace(hub, inside=name)): os.path.join(root, name) for name in inside}
        chosen = [files[name] for name in _one_kind(files, path, field)] or _refuse_none(path, field)
        return _without_strangers(chosen, field)
    if Path(path).is_dir():
        files = [str(file) for file in sorted(Path(path).rglob("*")) if _is_data(file.relative_to(path))]
        return _without_strangers(_one_kind(files, path, field) or _refuse_none(path, field), field)
    if glob.has_magic(path) and not Path(path).exists():
        return _without_strangers(sorted(glob.glob(path)) or _refuse_none(path, field), field)
    if not Path(path).exists():
        raise ValueError(f"{field} is {path!r}: there is no such file")
    return [path]


def _without_strangers(paths: list[str], field: str) -> list[str]:
    """The files of a folder, a pattern or a data set. A link there is nobody's wish, and may lead to a secret; only in
    a Hugging Face cache it leads to the file itself."""
    for path in paths:
        try:
            blob_of(Path(path))
        except OSError as error:
            raise ValueError(f"{field}: {error}") from None
    return paths


def split_patterns(path: str, field: str) -> tuple[str, list[str]]:
    """A path for training and those of test files, where a folder or data set has files that are named after splits,
    such as train-*.parquet and test-*.parquet; else the path as it is. The hub's revision is written out, so that a
    resume reads the same rows."""
    hub = hub_data(path)
    if hub is not None:
        root, names = _on_hub(hub, field)
        pinned, inside = replace(hub, revision=Path(root).name), _inside(names, hub.inside)
        if inside and (not hub.inside or all(name.startswith(f"{hub.inside}/") for name in inside)):
            train, tests = _split(inside, lambda name: str(replace(hub, inside=name)), path, field)
            return str(replace(pinned, inside=train or hub.inside)), [str(replace(pinned, inside=t)) for t in tests]
        return str(pinned), []
    if not Path(path).is_dir():
        return path, []
    names = [str(file.relative_to(path)) for file in sorted(Path(path).rglob("*")) if _is_data(file.relative_to(path))]
    train, tests = _split(names, lambda name: os.path.join(path, name), path, field)
    return os.path.join(path, train) if train else path, [os.path.join(path, pattern) for pattern in tests]


def _split(names: Sequence[str], shown: Callable[[str], str], path: str, field: str) -> tuple[str | None, list[str]]:
    """The pattern of the training files and those of test files; None where no name tells them apart."""
    train = sorted({_pattern(name) for name in names if _role(name) == "train"})
    tests = sorted({_pattern(name) for name in names if _role(name) == "test"})
    if len(train) > 1:
        folders = [str(PurePosixPath(pattern).parent) for pattern in train]
        choices = folders if len(set(folders)) == len(folders) and "." not in folders else train
        several = " or ".join(shown(pattern) for pattern in choices[:4])
        raise ValueError(f"{field} is {path!r}, which holds several data sets: give {several}")
    return (train[0], tests) if train else (None, [])


def _pattern(name: str) -> str:
    """`main/train-00000-of-00001.parquet` is one of `main/train-*.parquet`."""
    path = PurePosixPath(name)
    folder = path.parent if str(path.parent) != "." else None
    stem = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", path.stem)
    file = path.name if stem == path.stem else f"{stem}*{path.suffix}"
    return file if folder is None else f"{folder}/{file}"


def _role(name: str) -> str | None:
    """Split that a file's name says: `train`, `test` or None."""
    path = PurePosixPath(name)
    for part in (path.stem, *reversed(path.parent.parts)):
        word = re.split(r"[^a-z]", part.lower())[0]
        if word in TRAINING:
            return "train"
        if word in TESTING:
            return "test"
    return None


def _one_kind(files: Sequence[str] | dict[str, str], path: str, field: str) -> list[str]:
    """All files, where they are of one format and one split."""
    suffixes = sorted({Path(file).suffix for file in files})
    if len(suffixes) > 1:
        raise ValueError(f"{field} is {path!r}, which holds {' and '.join(suffixes)} files: give a pattern of one kind")
    roles = {role: file for file in files if (role := _role(file.removeprefix(path)))}
    if len(roles) > 1:
        shown = " or ".join(repr(roles[role]) for role in sorted(roles, reverse=True))
        raise ValueError(f"{field} is {path!r}, which holds training and test files: give one of them, {shown}")
    return list(files)


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.parts)
    return path.suffix in FORMATS and path.name not in _DESCRIBING and not hidden


def _inside(names: Sequence[str], inside: str) -> list[str]:
    if not inside:
        return list(names)
    return [name for name in names if name == inside or fnmatch(name, inside) or name.startswith(f"{inside}/")]


def _refuse_none(path: str, field: str) -> list[str]:
    raise ValueError(f"{field} is {path!r}: it holds no {', '.join(FORMATS)} file")


def _on_hub(hub: HubData, field: str) -> tuple[str, list[str]]:
    """The folder of a data set in the hub's local cache, with the wanted files in it, and the names of all of its data
    files. Files that the cache has are used without a connection."""
    # Imported late, because only data on the hub need it.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    wanted, pattern = str(hub), {"repo_id": hub.repo, "repo_type": "dataset", "revision": hub.revision}
    try:
        if not constants.HF_HUB_OFFLINE:
            info = HfApi().dataset_info(hub.repo, revision=hub.revision, timeout=SECONDS)
            names = [sibling.rfilename for sibling in info.siblings or () if _is_data(Path(sibling.rfilename))]
            return snapshot_download(**pattern, allow_patterns=_inside(names, hub.inside)), names
    except RepositoryNotFoundError:
        raise ValueError(
            f"{field} is {wanted!r}: there is no such file, and no such data set on the hub (or it needs a token)"
        ) from None
    except Exception:  # each HTTP library has errors of its own
        pass  # without a connection what the cache has is used
    try:
        root = Path(snapshot_download(**pattern, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ValueError(
            f"{field} is {wanted!r}: there is no such file, {why} and the cache does not hold this data set: download "
            "it first, or give a file"
        ) from None
    names = [str(file.relative_to(root)) for file in sorted(root.rglob("*")) if _is_data(file.relative_to(root))]
    return str(root), names
