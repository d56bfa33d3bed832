"""The wheel: what it holds, what it says of itself, and that every extra can be asked for."""

import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import resources
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

import proximo
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built as `pip install .` builds it, without downloading the build tools."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    assert file.name == f"proximo-{proximo.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return Parser().parsestr(wheel.read(f"proximo-{proximo.__version__}.dist-info/METADATA").decode())


@pytest.mark.slow("builds the wheel")
def test_the_wheel_is_the_package_and_nothing_else(wheel):
    source = ROOT / "src"
    wanted = {
        str(file.relative_to(source))
        for file in (source / "proximo").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert {"proximo/py.typed", "proximo/models/weights/tiny-arithmetic/model.safetensors"} <= held
    assert {Path(name).suffix for name in held if "/static/" in name} >= {".html", ".js", ".css"}


@pytest.mark.slow("builds the wheel")
def test_the_wheel_is_quickly_fetched(wheel):
    """Its weights are numbers that half precision has, too: of four bytes at least one is zero, and takes no room."""
    packed = sum(each.compress_size for each in wheel.infolist())
    assert packed < 15_000_000
    for each in resources.files("proximo.models").joinpath("weights").iterdir():
        for name, tensor in load_file(str(each / "model.safetensors")).items():
            remedy = f"python -m proximo_lab.experiments.rounding {each}"
            assert torch.equal(tensor, tensor.half().float()), f"{name} is not rounded: {remedy}"


@pytest.mark.slow("builds the metadata")
def test_the_metadata_is_that_of_the_project(wheel, metadata):
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# Proximo" in metadata.get_payload()
    assert sorted(metadata.get_all("Provides-Extra", [])) == sorted(EXTRAS)
    folder = f"proximo-{proximo.__version__}.dist-info"
    assert "proximo = proximo.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_has_both_bounds(extra):
    for each in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if each.name == "proximo":
            assert each.extras <= set(EXTRAS), each
        else:
            operators = {bound.operator for bound in each.specifier}
            assert operators == {">=", "<"}, each


def test_the_changelog_has_this_version():
    assert f"\n## [{proximo.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_names_the_build_tool_that_pip_cannot_download():
    [tool] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    said = f"If pip cannot download its build tools, install `{Requirement(tool).name}` first and add `--no-build-iso"
    assert said in (ROOT / "README.md").read_text()
