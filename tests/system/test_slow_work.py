"""Lines about what takes long."""

import pytest

from proximo.system import slow_work
from proximo.system.slow_work import slow_work_told, told_while_slow


def test_nothing_is_told_of_what_is_quick():
    told: list[str] = []
    with slow_work_told(told.append):
        assert list(told_while_slow(range(1000), "rows read", 1000)) == list(range(1000))
    assert told == []


def test_slow_work_is_told_where_somebody_listens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_work, "PATIENCE", -1.0)
    told: list[str] = []
    with slow_work_told(told.append):
        list(told_while_slow(range(1000), "rows read", 1000))
    assert told == ["1 of 1,000 rows read"]
    list(told_while_slow(range(1000), "rows read"))
    assert len(told) == 1
