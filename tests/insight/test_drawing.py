"""Charts and pages: coordinates by hand, labels apart, nothing but text from whatever is drawn."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximo.insight.charts.bars import bar_chart, interval_chart
from proximo.insight.charts.drawing import COLOURS, LINE, STRIPS, Axis, Series, line_chart
from proximo.insight.charts.pages import Html, anchor, number, page, section, table, text

Element = ElementTree.Element


def parsed(svg: str) -> Element:
    return ElementTree.fromstring(svg)


def found(svg: str | Element, tag: str, kind: str | None = None) -> list[Element]:
    root = parsed(svg) if isinstance(svg, str) else svg
    return [each for each in root.iter(tag) if kind is None or kind in each.get("class", "").split()]


def points(element: Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.get("points", "").split())]


def words(svg: str) -> list[str]:
    """All texts but those that wait for the pointer."""
    root = parsed(svg)
    waiting = {id(each) for strip in found(root, "g", "strip") for each in strip.iter("text")}
    return ["".join(each.itertext()) for each in root.iter("text") if id(each) not in waiting]


def labels(svg: str) -> list[tuple[str, float, float]]:
    return [(each.text or "", float(each.get("x", 0)), float(each.get("y", 0))) for each in found(svg, "text", "label")]


# By hand: 220 high, 30 above and 34 below, so that y runs from 186 up to 30. The room at the left is for six characters
# of 6.1 (`step` and two) and 8: 44.6. At the right it is for the label and 8.


def test_points_lie_where_they_are_by_hand():
    svg = line_chart("Outcome", [Series("outcome", [(0, 0.0), (5, 0.5), (10, 1.0)])])
    (line,) = found(svg, "polyline")
    right = 400 - (6.1 * len("1") + 8)
    middle = (44.6 + right) / 2
    expected = [(44.6, 186.0), (middle, 108.0), (right, 30.0)]
    assert points(line) == [(pytest.approx(x, abs=0.051), pytest.approx(y)) for x, y in expected]


def test_values_far_from_zero_have_an_axis_of_their_own():
    svg = line_chart("Length", [Series("length", [(0, 100.0), (1, 104.0)])], unit="tokens")
    (line,) = found(svg, "polyline")
    assert [y for _, y in points(line)] == [186.0, 30.0]  # from 100 to 104, a tick at each whole number
    assert {"100", "101", "102", "103", "104", "Lengthtokens"} <= set(words(svg))


def test_values_near_zero_begin_at_zero():
    svg = line_chart("x", [Series("x", [(0, 0.4), (1, 1.0)])])
    (line,) = found(svg, "polyline")
    # From 0 to 1 in quarters: 0.4 is 40 % of the way from 186 to 30.
    assert [y for _, y in points(line)] == [pytest.approx(186 - 0.4 * 156, abs=0.05), 30.0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.37, -2.0, 1e-9, 5e8])
def test_a_constant_is_a_level_line(value):
    svg = line_chart("x", [Series("x", [(0, value), (1, value), (2, value)])])
    (line,) = found(svg, "polyline")
    heights = {y for _, y in points(line)}
    assert len(heights) == 1
    assert 30 <= heights.pop() <= 186


def test_what_is_missing_is_a_gap():
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0]
    svg = line_chart("x", [Series("x", list(enumerate(values)))])
    assert [len(points(each)) for each in found(svg, "polyline")] == [2, 2]
    # Few points have dots, and a lone one is nothing else.
    assert len(found(svg, "circle", "dot")) == 5


def test_a_lone_point_between_many_is_a_dot():
    values = [float(step) for step in range(40)]
    values[19] = values[21] = math.nan
    svg = line_chart("x", [Series("x", list(enumerate(values)))])
    assert len(found(svg, "circle")) == 1
    assert [len(points(each)) for each in found(svg, "polyline")] == [19, 18]


def test_one_point_is_drawn_and_labelled():
    svg = line_chart("x", [Series("x", [(3, 1.25)])])
    (dot,) = found(svg, "circle")
    middle = (44.6 + 400 - 6.1 * 4 - 8) / 2
    assert float(dot.get("cx", 0)) == pytest.approx(middle, abs=0.1)
    assert [label for label, _, _ in labels(svg)] == ["1.25"]


@pytest.mark.parametrize("series", [[], [Series("x", [])], [Series("x", [(0, math.nan)])]])
def test_nothing_to_draw_is_said(series):
    svg = line_chart("Entropy", series)
    assert words(svg) == ["Entropy", "no values yet"]
    assert not found(svg, "line")


def test_a_band_goes_there_and_back():
    svg = line_chart("x", [Series("x", [(0, 0.5), (1, 0.5)], band=[(0, 0.0, 1.0), (1, 0.25, 0.75)])])
    (band,) = found(svg, "polygon", "band")
    right = 400 - (6.1 * 3 + 8)
    assert points(band) == [(44.6, 30.0), (right, 69.0), (right, 147.0), (44.6, 186.0)]


def test_faint_lines_have_the_colour_of_their_name():
    series = [Series("GRPO", [(0, 1.0), (1, 2.0)]), Series("DAPO", [(0, 1.0), (1, 3.0)])]
    svg = line_chart("x", series, faint=[Series("DAPO", [(0, 0.5), (1, 1.5)]), Series("else", [(0, 1), (1, 1)])])
    groups = [each for each in found(svg, "g") if found(each, "polyline", "seed")]
    assert [each.get("class") for each in groups] == ["s2", "other"]


def test_labels_at_close_ends_stay_apart_and_inside():
    series = [Series(f"run {index}", [(0, 0.0), (1, 1.0 - index / 1000)]) for index in range(7)]
    svg = line_chart("x", series)
    heights = [y for _, _, y in labels(svg)]
    assert len(heights) == 7
    assert all(below - above >= LINE - 0.11 for above, below in pairwise(heights))
    assert min(heights) >= 30
    assert max(heights) <= 220 - 34 + 4.01
    # In the order of the lines' ends, the highest first; the room for the longest is kept.
    assert [label for label, _, _ in labels(svg)] == [
        f"run {index} {1 - index / 1000:.3f}".rstrip("0").rstrip(".") for index in range(7)
    ]
    assert all(x + 6.1 * len(label) <= 400 + 2 for label, x, _ in labels(svg))


def test_labels_that_end_low_are_pushed_up():
    svg = line_chart("x", [Series(name, [(0, 1.0), (1, 0.0)]) for name in "abc"])
    assert [y for _, _, y in labels(svg)] == [164.0, 177.0, 190.0]


def test_more_lines_than_colours_are_dashed_and_the_drawing_grows():
    series = [Series(f"run {index}", [(0, 0.0), (1, float(index))]) for index in range(17)]
    svg = line_chart("x", series)
    kinds = [each.get("class", "") for each in found(svg, "g") if found(each, "polyline")]
    assert kinds[0] == "s1"
    assert kinds[COLOURS] == "s1 again"
    assert len(set(kinds)) == 2 * COLOURS
    assert parsed(svg).get("viewBox") == f"0 0 400 {30 + 34 + 13 * 17}"


AXES = [
    # low, high, step → labels of its ticks
    (0.0, 1.0, 0.25, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
    (0.0, 20.0, 5.0, ["0", "5", "10", "15", "20"]),
    (0.0, 0.06, 0.02, ["0.00", "0.02", "0.04", "0.06"]),
    (0.0, 4000.0, 1000.0, ["0", "1k", "2k", "3k", "4k"]),
    (0.0, 1.5e7, 5e6, ["0", "5M", "10M", "15M"]),
    (0.0, 3e-7, 1e-7, ["0", "1e-7", "2e-7", "3e-7"]),
    (0.9995, 0.9996, 0.00005, ["0.99950", "0.99955", "0.99960"]),
    (-1.0, 1.0, 0.5, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
]


@pytest.mark.parametrize(("low", "high", "step", "expected"), AXES)
def test_ticks_say_as_much_as_they_need(low, high, step, expected):
    axis = Axis(low, high, 0.0, 100.0, step)
    assert [axis.label(tick) for tick in axis.ticks()] == expected


def test_a_reading_is_finer_than_the_ticks():
    assert Axis(0.0, 1.0, 0.0, 1.0, 0.25).reading(0.84375) == "0.844"
    assert Axis(0.0, 40.0, 0.0, 1.0, 10.0).reading(35.25) == "35.2"
    assert Axis(0.0, 1e-6, 0.0, 1.0, 2.5e-7).reading(5.924e-9) == "5.92e-9"
    assert Axis(0.0, 2e7, 0.0, 1.0, 5e6).reading(14_512_345) == "14.5M"
    assert Axis(-1.0, 1.0, 0.0, 1.0, 0.5).reading(-1e-9) == "-1e-09"
    # A loss that has fallen from 30 is not 0 at its end.
    assert Axis(0.0, 30.0, 0.0, 1.0, 10.0).reading(0.05234) == "0.0523"
    assert Axis(0.0, 8e9, 0.0, 1.0, 2e9).reading(1.0612) == "1.06"


def test_whole_numbers_have_whole_ticks():
    svg = line_chart("x", [Series("x", [(0, 1.0), (1, 2.0), (2, 3.0)])])
    bottom = [
        each.text for each in found(svg, "text") if each.get("y") == "200.0" and each.get("text-anchor") == "middle"
    ]
    assert bottom == ["0", "1", "2"]


def test_values_under_the_pointer_are_the_runs():
    series = [Series("a", [(0, 0.25), (1, 0.5), (2, math.nan)]), Series("b", [(0, 1.0), (2, 0.75)])]
    svg = line_chart("x", series)
    said = [next(strip.iter("text")).text for strip in found(svg, "g", "strip")]
    assert said == ["step 0 · a 0.25 · b 1", "step 1 · a 0.5", "step 2 · b 0.75"]
    edges = [(float(each.get("x", 0)), float(each.get("width", 0))) for each in found(svg, "rect")]
    for (start, width), (following, _) in pairwise(edges):
        assert start + width == pytest.approx(following, abs=0.11)  # no gap that answers nothing


def test_long_runs_have_few_strips_and_keep_their_last():
    svg = line_chart("x", [Series("x", [(step, float(step)) for step in range(1000)])])
    said = [next(strip.iter("text")).text or "" for strip in found(svg, "g", "strip")]
    assert STRIPS / 2 < len(said) <= STRIPS
    assert said[-1].startswith("step 999 ")
    assert len(points(found(svg, "polyline")[0])) == 1000


def test_very_long_runs_lose_no_peak():
    values = [math.sin(step / 100) for step in range(20_000)]
    values[7777], values[12_345] = 5.0, -3.0
    (line,) = found(line_chart("x", [Series("x", list(enumerate(values)))]), "polyline")
    drawn = points(line)
    assert len(drawn) < 4 * 400
    # From −4 to 6 in steps of 2 or 2.5: both peaks are there, as far from each other as they should be.
    heights = [y for _, y in drawn]
    (whole,) = found(line_chart("x", [Series("x", [(0, 5.0), (1, -3.0)])]), "polyline")
    assert [min(heights), max(heights)] == [y for _, y in points(whole)]
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert drawn[0][0] == points(whole)[0][0]


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x>',
    "a&b",
    "\x1b[31m\x00",
    "\u202egnirts",
    "x" * 10_000,
    "line\nline",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name):
    series = [Series(name, [(0, 1.0), (1, 2.0)]), Series("other", [(0, 1.0), (1, 2.5)])]
    for svg in (
        line_chart(name, series, x=name[:40], unit=name),
        bar_chart(name, [(name, 1.0)], unit=name),
        interval_chart(name, [(name, 0.5, 0.4, 0.6)], unit=name),
    ):
        root = parsed(svg)  # well-formed: nothing broke out
        assert {each.tag for each in root.iter()} <= {"svg", "g", "text", "tspan", "line", "rect", "polyline", "circle"}
        assert not {"\x1b", "\x00", "\u202e"} & set("".join(root.itertext()))
        assert all(len(each.text or "") < 100 for each in found(root, "text", "label"))


anything = st.floats(allow_nan=True, allow_infinity=True)
lines = st.lists(st.lists(st.tuples(anything, anything), max_size=6), max_size=4)


@pytest.mark.slow("draws many pictures")
@given(lines)
def test_whatever_the_values_the_drawing_holds_them(given_lines):
    svg = line_chart("x", [Series(f"line {index}", each) for index, each in enumerate(given_lines)])
    root = parsed(svg)
    height = float(root.get("viewBox", "").split()[3])
    for x, y in _coordinates(root):
        assert -1 <= x <= 401
        assert 0 <= y <= height


def _coordinates(root: Element) -> Iterator[tuple[float, float]]:
    for line in root.iter("polyline"):
        yield from points(line)
    for dot in root.iter("circle"):
        yield float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))
    for each in root.iter("line"):
        yield float(each.get("x1", "nan")), float(each.get("y1", "nan"))
        yield float(each.get("x2", "nan")), float(each.get("y2", "nan"))


def test_bars_are_parts_of_a_whole():
    svg = bar_chart("Seconds by phase", [("update", 6.0), ("rollout", 3.0), ("write", 0.01)], unit="s")
    widths = [float(each.get("width", 0)) for each in found(svg, "rect", "bar")]
    room = 400 - (6.1 * len("rollout") + 8) - 6.1 * 14
    assert widths == [
        pytest.approx(room, abs=0.1),
        pytest.approx(room / 2, abs=0.1),
        pytest.approx(room / 600, abs=0.1),
    ]
    assert {"6 · 67%", "3 · 33%", "0.01 · < 1%"} <= set(words(svg))
    assert words(bar_chart("x", [("a", 0.0)])) == ["x", "no values yet"]


def test_intervals_lie_on_one_axis():
    svg = interval_chart("Accuracy", [("before", 0.25, 0.0, 0.5), ("after", 1.0, 0.75, 1.0)])
    left, right = 6.1 * len("before") + 10, 400 - 6.1 * 7
    ends = [(float(each.get("x1", 0)), float(each.get("x2", 0))) for each in found(svg, "line", "line")]
    middle = (left + right) / 2
    assert ends == [
        (pytest.approx(left, abs=0.06), pytest.approx(middle, abs=0.06)),
        (pytest.approx(left + 0.75 * (right - left), abs=0.06), pytest.approx(right, abs=0.06)),
    ]
    assert {"25.0%", "100.0%"} <= set(words(svg))


# Pages


def test_numbers_as_people_read_them():
    shown = [1234567, 1234567.8, 0.012345, 0.5, 12.0, -3.25, math.nan, None, "3", True, 10**400]
    assert [number(value) for value in shown] == [
        "1,234,567",
        "1,234,568",
        "0.0123",
        "0.5",
        "12",
        "-3.25",
        "–",
        "–",
        "–",
        "–",
        "–",
    ]


def test_text_is_escaped_once_and_html_is_left():
    assert text("<b>&\x1b") == "&lt;b&gt;&amp;\\x1b"
    assert text(text("<b>")) == "&lt;b&gt;"
    assert text(Html("<b>")) == "<b>"
    assert text(3) == "3"


def test_tables_escape_cells_and_put_numbers_right():
    html = table(["name", "value"], [["<i>", 0.5], ["b", None], [Html("<b>c</b>"), 12345]])
    rows = ElementTree.fromstring(html).findall(".//tr")
    assert [["".join(cell.itertext()) for cell in row] for row in rows] == [
        ["name", "value"],
        ["<i>", "0.5"],
        ["b", "–"],
        ["c", "12,345"],
    ]
    assert [cell.get("class") for cell in rows[1]] == [None, "number"]


def test_a_page_stands_alone():
    html = page("a <title>", [section("How to repeat it", "<p>yes</p>")])
    assert "<title>a &lt;title&gt;</title>" in html
    assert '<section id="how-to-repeat-it">' in html
    assert anchor("How to repeat it") == "how-to-repeat-it"
    assert "default-src &#x27;none&#x27;" in html or "default-src 'none'" in html
    assert "--s1:" in html  # its style is inside
    assert not re.search(r"<script|<link|@import|url\(|https?:", html)


def test_a_wide_chart_has_room_for_longer_names():
    lines = [Series(f"a value model, {number} steps", [(0, number), (1, number)]) for number in (2, 16)]
    assert "a value model, …" in str(line_chart("error", lines))
    assert "a value model, 16 steps" in str(line_chart("error", lines, width=800))
