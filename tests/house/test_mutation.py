"""The planted faults fit the sources they are planted in; `make mutation` plants them, which takes half an hour."""

import pytest

from tests import ROOT
from tests.mutation.__main__ import FAULTS, ORDER

SOURCE = ROOT / "src" / "proximo"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.what}")
def test_each_fault_has_its_place(fault):
    text = (SOURCE / (fault.file if "/" in fault.file else f"losses/{fault.file}")).read_text()
    assert text.count(fault.right) == 1
    assert fault.wrong != fault.right


def test_the_tests_that_are_to_catch_them_are_there():
    assert [name for name in ORDER if not (ROOT / name).exists()] == []
