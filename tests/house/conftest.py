from collections.abc import Iterator

import pytest

from tests.house.test_house import parsed


@pytest.fixture(scope="package", autouse=True)
def sources_are_forgotten() -> Iterator[None]:
    """After the last rule: a million nodes would be in the way of the garbage collector."""
    yield
    parsed.cache_clear()
