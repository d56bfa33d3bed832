"""The diagrams of the algorithms' pages say what the algorithms' values are."""

import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from proximo.losses.pieces.gates import Clip, SoftGate
from tests import ROOT

IMAGES = ROOT / "docs/images"


@pytest.fixture(scope="module")
def diagrams() -> ModuleType:
    """The script that draws them, with its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/diagrams"))
        drawn = ModuleType("diagrams")
        drawn.__file__ = str(ROOT / "docs/diagrams/__main__.py")
        exec(compile((ROOT / "docs/diagrams/__main__.py").read_text(), drawn.__file__, "exec"), drawn.__dict__)
        sys.modules.pop("drawing", None)
        return drawn


@pytest.mark.parametrize("name", ["models", "gates", "chain", "lengths"])
def test_what_is_stored_is_what_is_drawn(diagrams: ModuleType, name: str):
    drawn, stored = (
        ElementTree.fromstring(text) for text in (getattr(diagrams, name)(), (IMAGES / f"{name}.svg").read_text())
    )
    for one, other in zip(drawn.iter(), stored.iter(), strict=True):
        assert (one.tag, one.text) == (other.tag, other.text)
        if points := one.get("points"):
            here, there = (
                torch.tensor([[float(v) for v in p.split(",")] for p in each.split()])
                for each in (points, other.attrib["points"])
            )
            assert torch.allclose(here, there, atol=0.11)  # a last digit may be rounded otherwise on another machine


def test_the_page_with_sliders_has_the_gates_gradients(window):
    """The page computes by itself: its formulas are held against autograd on ours."""
    window.page.goto((ROOT / "docs/algorithms/gates.html").as_uri())
    ratios = [0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.4]
    log_ratio = torch.tensor([ratios]).log().requires_grad_()
    for sign, tau in ((1.0, 1.5), (-1.0, 3.0)):
        for gate, script in (
            (Clip(0.2, 0.28), f"ratios => ratios.map(r => clip(r, {sign}, 0.2, 0.28))"),
            (SoftGate(1.5, 3.0), f"ratios => ratios.map(r => soft(r, {tau}))"),
        ):
            loss = gate(
                log_ratio, log_ratio, torch.full((1, len(ratios)), sign), torch.ones(1, len(ratios), dtype=torch.bool)
            )
            (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
            assert torch.allclose(torch.tensor(window.page.evaluate(script, ratios)), -sign * gradient[0])
    before = window.page.locator("#good .soft").get_attribute("d")
    window.page.locator("#positive").fill("4")
    assert window.page.locator("#good .soft").get_attribute("d") != before
    window.page.locator("#papers").click()
    assert window.page.locator("#good .soft").get_attribute("d") == before
    assert all(each.startswith("file:") for each in window.requests)
