"""Bars of transformers in pipes and logs."""

import sys

import pytest
from transformers.utils import logging

from proximo.models import load_model, tiny_model
from proximo.models.adapters.files import save_model
from proximo.models.progress_bars import bars_for_terminals


@pytest.fixture
def bars():
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()


@pytest.mark.usefixtures("bars")
def test_models_are_read_and_written_without_bars_where_nobody_watches(tmp_path, capfd, monkeypatch):
    save_model(tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24), tmp_path)
    load_model(str(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bars_for_terminals():
        assert logging.is_progress_bar_enabled()
