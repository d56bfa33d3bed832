"""The page with a keyboard only: lists are one tab stop each, and what is closed gives the focus back."""

import pytest

from proximo.algorithms import GRPO
from tests.insight.page.browser import Window, served, write_run
from tests.insight.page.test_reader import answers, fixture_group
from tests.insight.page.test_reader_pages import opened, pressed
from tests.stored import Asked, store

pytestmark = pytest.mark.usefixtures("chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    store(root / "read", GRPO, [fixture_group(), *(Asked(answers(1.0, 0.0), problem=each) for each in "abc")])
    for name in ("one", "two"):
        write_run(root / name, [{"step": step, "outcome": step / 9, "length": 3, "loops": 0} for step in range(1, 9)])
    with served(root) as made:
        yield made


def focused(window: Window) -> str:
    """The run, group, row or text at the focus."""
    return window.page.evaluate("""() => { const { activeElement: at } = document;
        return at.dataset.key ?? at.dataset.row ?? at.closest("tr")?.dataset.group ?? at.textContent.slice(0, 30); }""")


def test_the_table_of_groups_is_one_tab_stop_in_which_arrows_lead_along_and_across(window, page):
    opened(window, page, run="read", step=0)
    stops = window.page.locator("table.groups [tabindex='0'], table.groups button:not([tabindex])")
    assert stops.count() == 1
    stops.focus()
    found = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft", "End", "Home"):
        window.page.keyboard.press(key)
        found.append(focused(window))
        assert stops.count() == 1
    assert found == ["0", "1", "5", "7", "5", "4", "9", "0"]  # rows; at last, the first group
    window.page.keyboard.press("ArrowDown")
    pressed(window, "Enter")
    assert "group=1" in window.page.url
    heights = "kind => document.querySelector(`.narrow .trained .cell.${kind}`).getBoundingClientRect().height"
    assert window.page.evaluate(heights, "down") < window.page.evaluate(heights, "up")  # without colours, too
    # Next to the open group the list is one stop, too, at that group.
    assert focused(window) == "1"
    assert stops.count() == 1
    window.page.keyboard.press("Tab")
    assert window.page.evaluate("() => !!document.activeElement.closest('.grouphead')")


@pytest.mark.parametrize("row", [None, 4])
def test_a_group_that_is_closed_gives_the_focus_back_to_its_line(window, page, row):
    opened(window, page, run="read", step=0, group=1, **({} if row is None else {"row": row, "token": 1}))
    pressed(window, "Escape")
    assert "group" not in window.page.url
    assert window.page.evaluate("() => document.activeElement.closest('tr')?.dataset.group") == "1"
    opened(window, page, run="read", step=0, group=2)
    window.page.focus(".reader [type=search]")
    window.page.evaluate("() => { location.hash = 'run=read&step=0' }")
    window.until("() => document.querySelector('.reader').dataset.shown === location.hash")
    assert window.page.evaluate("() => document.activeElement.type") == "search"  # who types is not disturbed


def test_escape_closes_the_keys_before_it_leaves_the_group(window, page):
    opened(window, page, run="read", step=0, group=1)
    pressed(window, "?")
    assert window.page.is_visible(".help dl")
    pressed(window, "Escape")
    assert not window.page.is_visible(".help dl")
    assert "group=1" in window.page.url
    pressed(window, "Escape")
    assert "group" not in window.page.url


def test_the_folded_list_of_runs_closes_with_escape_and_gives_the_focus_back(window, page):
    window.page.set_viewport_size({"width": 640, "height": 400})  # 1280 × 800 at 200 %
    window.page.goto(page.address(run="one"))
    window.until("() => 'outcome' in window.proximo.charts")
    for close in ("Escape", "Enter"):
        window.page.focus("#runs .fold")
        window.page.keyboard.press("Enter")
        window.page.focus("#runs .name[tabindex='0']")
        window.page.keyboard.press(close)
        assert window.page.get_attribute("#runs .fold", "aria-expanded") == "false"
        assert window.page.evaluate("() => document.activeElement.className") == "fold"


def test_the_figures_that_stay_the_same_are_one_tab_stop_and_the_keys_name_every_page(window, page):
    window.page.goto(page.address(run="one"))
    window.until("() => document.querySelectorAll('.flat button').length > 0")
    assert window.page.locator(".flat button:not([tabindex='-1'])").count() == 1
    window.page.keyboard.press("?")
    count = window.page.locator("#tabs button").count()
    assert f"1 to {count}" in window.page.inner_text("dialog.keys")
    window.page.keyboard.press("Escape")


def test_the_top_row_keeps_its_choices_together_when_it_is_zoomed(window, page):
    window.page.set_viewport_size({"width": 960, "height": 540})  # 1920 × 1080 at 200 %
    window.page.goto(page.address(run="one"))
    window.until("() => 'outcome' in window.proximo.charts")
    axis, options = (window.page.locator(name).bounding_box() for name in ("#axis", "#options"))
    assert axis["y"] + axis["height"] / 2 == pytest.approx(options["y"] + options["height"] / 2, abs=2)
    assert options["x"] + options["width"] > 900
    window.page.keyboard.press("4")
    assert window.page.locator("[data-help]").bounding_box()["x"] > 900


def test_a_step_that_is_opened_from_a_chart_has_the_focus(window, tmp_path):
    for step in range(3):
        store(tmp_path / "run", GRPO, [fixture_group()], step=step)
    with served(tmp_path) as made:
        window.page.goto(made.address(run="run", tab="all"))
        chart = window.page.locator("figure.plot").first
        chart.wait_for()
        chart.focus()
        window.page.keyboard.press("ArrowRight")
        window.page.keyboard.press("Enter")
        window.until("() => document.querySelector('.reader')?.dataset.shown")
        assert window.page.evaluate("() => !!document.activeElement.closest('.reader')")


def test_long_names_differ_in_the_menu_of_runs(window, tmp_path):
    names = [f"{'a-long-name-of-a-model-' * 3}{which}{'-with-many-settings' * 2}" for which in ("one", "two")]
    for name in names:
        store(tmp_path / name, GRPO, [fixture_group()])
    with served(tmp_path) as made:
        opened(window, made, run=names[0], step=0)
        found = window.page.locator("select[data-run] option").all_text_contents()
    assert len(set(found)) == 2
    assert all(len(each) <= 44 for each in found)
    assert all(which in each for which, each in zip(("one", "two"), sorted(found), strict=True))


def test_what_is_pushed_down_has_a_line_below_it(window, page):
    """So that it is told from what is pushed up without colours."""
    opened(window, page, run="read", step=0, group=0)
    shadow = "kind => getComputedStyle(document.querySelector(`.sibling .token.${kind}`)).boxShadow"
    assert window.page.evaluate(shadow, "down").count("inset") == 2
    assert window.page.evaluate(shadow, "up").count("inset") == 1
