import pytest

TORCHS_OWN = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.*torch.jit.script_method.*:DeprecationWarning",
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "ignore:Synchronization debug mode is a prototype feature",
)
"""Warnings from within torch, while it compiles or is asked where it waits. They say nothing of what was computed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            for warning in TORCHS_OWN:
                item.add_marker(pytest.mark.filterwarnings(warning))
