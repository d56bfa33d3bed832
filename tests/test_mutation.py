"""The planted faults fit the sources they are planted in; `make mutation` plants them, which takes half an hour."""

from pathlib import Path

import pytest

from tests.mutation.faults import FAULTS

SOURCE = Path(__file__).resolve().parents[1] / "src" / "proximo"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.what}")
def test_each_fault_has_its_place(fault):
    text = (SOURCE / (fault.file if "/" in fault.file else f"maths/{fault.file}")).read_text()
    assert text.count(fault.right) == 1
    assert fault.wrong != fault.right
