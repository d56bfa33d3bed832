import pytest

TORCHS_OWN = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.*torch.jit.script_method.*:DeprecationWarning",
)
"""Warnings that compiling gives from within torch, and that say nothing about what was compiled."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            for warning in TORCHS_OWN:
                item.add_marker(pytest.mark.filterwarnings(warning))
