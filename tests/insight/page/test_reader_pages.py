"""The reader in a real browser: known clip states are coloured and explained, the lens recolours as the loss says,
and what a model wrote stays text."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import proximo
from proximo.algorithms import DAPO, GRPO, GSPO, SAPO, Algorithm
from proximo.insight.folder import RunFolder
from proximo.insight.lens.explanations import why
from proximo.insight.lens.lens import look
from proximo.insight.page import reader
from tests.fixture import GROUP, LOG_RATIO, MASK, OLD
from tests.insight.page.browser import VIEWPORT, Served, Window, served, until
from tests.insight.page.test_figures import AXE, PHONE, SERIOUS
from tests.insight.page.test_reader import ADVANTAGES, BY_HAND, answers, fixture_group, value_of
from tests.insight.test_turns import PIECES, TURNS
from tests.stored import UNSCORED, Asked, Said, store

pytestmark = pytest.mark.usefixtures("chromium")

NASTY = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "</div></article><iframe src='http://example.org/'></iframe>",
    "\x1b[31mred\x1b[0m",
    "nul\x00bell\x07",
    "\u202egnp.exe\u202c",
    "שלום",
    "\u2028line",
    "&lt;b&gt;",
    "javascript:alert(3)",
]
SHOWN = ["⟨ESC⟩[31mred⟨ESC⟩[0m", "nul⟨NUL⟩bell⟨BEL⟩", "⟨U+202E⟩gnp.exe⟨U+202C⟩", "⟨U+2028⟩line"]


MARKED = r"""# So
**bold** and `code` and <img src=x onerror=alert(6)>

- [a](javascript:alert(7))
- $\frac{1}{2} \le x^2$

| a | b |
|---|---|
| 1 | <b>2</b> |

```
<script>alert(8)</script>
```
and $\unknown{3}$"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    store(folder / "known", GRPO, [fixture_group()])
    store(folder / "known", GRPO, [fixture_group(), Asked(answers(1.0, 1.0))], step=1)
    damaged = [store(folder / "damaged", GRPO, [fixture_group()], step=step) for step in range(3)]
    damaged[1].step_file(1).write_bytes(b"PAR1 and nothing else")
    mixed = [
        Asked([*answers(1.0, 0.0, 0.0), Said(["yes ", "0"], 0.5, truncated=True)], prompt="Say a word", problem="a"),
        Asked(answers(1.0, 1.0, words="no"), prompt="Deny it", problem="b"),
        Asked(answers(UNSCORED, UNSCORED), problem="c"),
        Asked(answers(0.0, 0.0), problem="d", dropped=True),
    ]
    store(folder / "mixed", SAPO, mixed)
    nasty = Said(NASTY, 1.0, parts={"<b>part</b>": 1.0}, end="<end>")
    line = Said(["w" * 1_000_000], 0.0)
    many = Said([f"{place} " for place in range(9000)], 0.5)
    hostile = Asked([nasty, line, many], prompt="<svg onload=alert(4)>\u202e", answer="<i>x</i>", problem="<u>id</u>")
    store(folder / "<b>hostile", GSPO, [hostile])
    prompt = ({"role": "user", "content": "1 + 2? <script>alert(5)</script>"},)
    talks = [Said(PIECES, 1.0, turns=TURNS), Said([MARKED], 0.0)]
    store(folder / "played", GRPO, [Asked(talks, prompt=prompt, problem="sum")], step=1)
    return folder


@pytest.fixture(scope="module")
def page(root):
    with served(root) as made:
        yield made


def opened(window: Window, page: Served, **state: object) -> None:
    """The secret goes first: the reader has a `token` of its own."""
    if window.page.url == "about:blank":
        window.page.goto(page.address())
    window.page.evaluate(
        "hash => { location.hash = hash }", "&".join(f"{name}={value}" for name, value in state.items())
    )
    settled(window)


def settled(window: Window) -> None:
    """What the address says is shown."""
    window.until("() => document.querySelector('.reader')?.dataset.shown === location.hash")


def pressed(window: Window, *keys: str) -> None:
    for key in keys:
        window.page.keyboard.press(key)
        settled(window)


def tokens(window: Window) -> list[list[dict]]:
    """What each sibling's tokens say of themselves, and how they look."""
    return window.page.evaluate("""() => [...document.querySelectorAll(".sibling")].map((sibling) =>
        [...sibling.querySelectorAll(".text .token")].map((token) => {
            const style = getComputedStyle(token);
            return {
                text: token.textContent, state: token.dataset.state, value: Number(token.dataset.value),
                classes: [...token.classList], colour: style.backgroundColor, line: style.textDecorationLine,
                amount: Number(style.getPropertyValue("--v")), above: style.borderTopStyle,
            };
        }))""")


def of(found: list[list[dict]], name: str) -> list[list]:
    return [[token[name] for token in row] for row in found]


def test_known_clip_states_are_coloured_and_underlined(window, page):
    opened(window, page, run="known", step=0, group=0, channel="gate")
    found = tokens(window)
    assert of(found, "state") == {value_of(named)[0]: states for named, states in BY_HAND}["grpo"]
    colours = {
        token["state"]: {each["colour"] for row in found for each in row if each["state"] == token["state"]}
        for row in found
        for token in row
    }
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == 3  # open, high and low look different
    blocked = [[state != "open" for state in row] for row in of(found, "state")]
    assert [[line == "underline" for line in row] for row in of(found, "line")] == blocked
    legend = window.page.inner_text(".legend")
    assert "clipped high 2 · 20 %" in re.sub(r"\s+", " ", legend)
    assert "clipped low 2 · 20 %" in re.sub(r"\s+", " ", legend)


def test_channels_have_a_sign_a_scale_and_a_legend_with_numbers(window, page):
    opened(window, page, run="known", step=0, group=0, channel="advantage")
    found = tokens(window)
    assert [["up" in classes for classes in row] for row in of(found, "classes")] == [
        [True] * 4,
        [False] * 2,
        [False] * 3,
        [True],
    ]
    assert [["down" in classes for classes in row] for row in of(found, "classes")] == [
        [False] * 4,
        [True] * 2,
        [True] * 3,
        [False],
    ]
    assert {amount for row in of(found, "amount") for amount in row} == {1.0}
    assert "−0.866" in window.page.inner_text(".legend")
    assert "+0.866" in window.page.inner_text(".legend")
    pressed(window, "2")
    ratios = tokens(window)
    torch.testing.assert_close(torch.tensor(of(ratios, "value")[0]), LOG_RATIO[0].exp(), rtol=0, atol=1e-6)
    sizes = torch.tensor(of(ratios, "amount")[0])
    assert sizes.argsort().tolist() == LOG_RATIO[0].abs().argsort().tolist()
    assert window.page.locator(".legend .tick").count() == 2  # where the band ends
    pressed(window, "7")
    assert window.page.get_attribute("[data-channel=gap]", "aria-pressed") == "true"
    assert "channel=gap" in window.page.url


def test_pointing_at_a_token_says_its_numbers_and_why(window, page, root):
    opened(window, page, run="known", step=0, group=0)
    run = RunFolder(root / "known")
    seen = look(run.step(0), GRPO, run.config)
    for row, token in ((0, 0), (1, 1), (2, 2), (0, 3)):
        words = why(run.step(0), seen, row, token)

        def said(row: int = row, token: int = token, words: str = words) -> bool:
            """Pointed at again: a token that is drawn anew below a pointer at rest hears nothing of it."""
            window.page.hover(f"[data-row='{row}'] .text [data-token='{token}']")
            script = "words => document.querySelector('.card .words')?.textContent === words"
            return window.page.evaluate(script, words)

        until(said)
        card = window.page.inner_text(".card")
        assert f"token {token} of" in card
        assert f"row {row}" in card
    script = """() => [...document.querySelectorAll(".card .numbers tr")]
        .map((row) => [...row.cells].map((cell) => cell.textContent))"""
    numbers = dict(window.page.evaluate(script))
    assert numbers["old policy"] == "−0.7"
    assert numbers["before the update"] == "−1.1"
    assert numbers["ratio that is clipped"] == "0.6703"
    assert numbers["weight"] == "0.0625"
    window.page.mouse.move(5, 5)
    window.until("() => !document.querySelector('.card')")


def gradient_of(algorithm: Algorithm) -> torch.Tensor:
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    tensors: dict[str, Any] = {"old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK, "group": GROUP}
    loss, _ = proximo.policy_loss(replace(algorithm, kl=None), logprobs=logprobs, **tensors)
    return torch.autograd.grad(loss, logprobs)[0]


def test_the_lens_recolours_as_the_loss_says(window, page):
    opened(window, page, run="known", step=0, group=0, channel="gradient")
    own = {value_of(named)[0]: states for named, states in BY_HAND}
    for name, algorithm in (("grpo", GRPO), ("dapo", DAPO), ("gspo", GSPO), ("sapo", SAPO)):
        window.page.select_option(".lens select", name)
        window.until("name => document.querySelector('.lens select').dataset.lens === name", name)
        settled(window)
        found = tokens(window)
        assert of(found, "state") == own[name]
        expected = gradient_of(algorithm)
        for row, values in enumerate(of(found, "value")):
            torch.testing.assert_close(
                torch.tensor(values, dtype=torch.float64), expected[row, : len(values)], rtol=0, atol=1e-6
            )
            pushed = [("up" in each, "down" in each) for each in of(found, "classes")[row]]
            assert pushed == [(value < -1e-9, value > 1e-9) for value in expected[row, : len(values)].tolist()]
    # Against the run's own: stopped here alone, and moving here alone.
    window.page.select_option(".lens select", "gspo")
    window.until(
        "() => document.querySelector('.token.closes') !== null && document.querySelector('.token.opens') !== null"
    )
    assert of(tokens(window), "above") == [
        ["dotted", "none", "none", "none"],
        ["solid", "none"],
        ["dotted", "none", "none"],
        ["none"],
    ]
    window.page.hover("[data-row='1'] .text [data-token='0']")
    window.until("() => document.querySelector('.card .own.closes')?.textContent.startsWith('It flips. GRPO')")


def test_the_table_over_algorithms_leads_to_each(window, page):
    opened(window, page, run="known", step=0)
    window.page.click(".lenses summary")
    window.page.wait_for_selector("tr[data-as=gspo]")
    assert window.page.locator(".lenses tbody tr").evaluate_all("rows => rows.map((row) => row.dataset.as)") == [
        "grpo",
        "ppo",
        "dapo",
        "gspo",
        "sapo",
    ]
    cosine = float(window.page.get_attribute("tr[data-as=gspo] [data-name=cosine]", "data-value"))
    gradients = [gradient_of(each).flatten() for each in (GRPO, GSPO)]
    assert cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(*gradients, dim=0)), abs=1e-6)
    window.page.click("text=show 20 more algorithms")
    window.page.wait_for_selector("tr[data-as=gspo-product]")
    window.page.click("tr[data-as=cispo] .into")
    window.until("() => document.querySelector('.lens select').dataset.lens === 'cispo'")
    assert "as=cispo" in window.page.url


def test_hostile_text_is_text(window, page, root):
    dialogs: list[str] = []
    window.listen("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    opened(window, page, run="%3Cb%3Ehostile", step=0)
    assert "<svg onload=alert(4)>⟨U+202E⟩" in window.page.inner_text("tr.group .prompt")
    assert window.page.inner_text("tr.group .wanted") == "<i>x</i>"
    opened(window, page, run="%3Cb%3Ehostile", step=0, group=0)
    nasty, line, many = of(tokens(window), "text")
    for text in (*SHOWN, *NASTY[:3], *NASTY[-2:], "שלום"):
        assert text in nasty
    assert nasty[-1] == "◆"
    assert line == ["w" * 400 + "… (999,600 more characters)"]
    assert 0 < len(many) < 1000
    assert "<b>part</b>" in window.page.inner_text(".sibling header")
    assert (
        window.page.locator(".text .token").first.evaluate("token => getComputedStyle(token).unicodeBidi") == "isolate"
    )
    made = "main img, main iframe, main script, main i, main u, main b, main svg[onload], main a[href^=javascript]"
    assert window.page.locator(made).count() == 0
    pressed(window, "w")
    assert of(tokens(window), "text")[0][-1] == "<end>"
    window.page.click(".sibling:nth-child(3) button.more")
    assert len(of(tokens(window), "text")[2]) > 1000
    assert dialogs == []
    assert {url.split("/")[2] for url in window.requests if url.startswith("http")} == {f"127.0.0.1:{page.port}"}


def cells(window: Window) -> dict[str, list[int]]:
    """Rows that are shown and those that stand back, by group, in the order of the page."""
    script = """() => [...document.querySelectorAll("tr.group")].map((row) =>
        [row.dataset.group, [...row.querySelectorAll(".cell:not(.miss)")].map((cell) => Number(cell.dataset.row))])"""
    return dict(window.page.evaluate(script))


def test_filters_orders_and_search(window, page):
    opened(window, page, run="mixed", step=0)
    assert cells(window) == {"0": [0, 1, 2, 3], "1": [4, 5], "2": [6, 7], "3": [8, 9]}
    rows = window.page.locator("tr.group")
    assert "no signal: every reward is 1" in rows.nth(1).inner_text()
    assert "unscored" in rows.nth(2).inner_text()
    assert "dropped" in rows.nth(3).inner_text()
    assert window.page.get_attribute("tr[data-group='1']", "class") == "group dead"
    for show, expected in (
        ("truncated", {"0": [3]}),
        ("unscored", {"2": [6, 7]}),
        ("dead", {"1": [4, 5]}),
        ("duplicates", {"0": [0, 3]}),
    ):
        window.page.click(f"[data-show={show}]")
        window.until("show => location.hash.includes(`show=${show}`)", show)
        settled(window)
        assert cells(window) == expected
        window.page.click(f"[data-show={show}]")
        window.until("() => !location.hash.includes('show')")
        settled(window)
    # best and worst go by the mean that the table shows: 0, 0.375 and 1
    for show, order in (("longest", ["0"]), ("best", ["1", "0", "3"]), ("worst", ["3", "0", "1"])):
        window.page.select_option("[data-order]", show)
        window.until("show => location.hash.includes(`show=${show}`)", show)
        settled(window)
        assert list(cells(window))[: len(order)] == order
    window.page.click("[data-show=duplicates]")  # it stays the worst first
    window.until("() => location.hash.includes('show=duplicates+worst')")
    settled(window)
    assert cells(window) == {"0": [0, 3]}
    assert window.page.input_value("[data-order]") == "worst"
    opened(window, page, run="mixed", step=0, group=0, show="duplicates+worst")
    script = """() => [...document.querySelectorAll('.sibling')].map((each) =>
        [each.dataset.row, each.classList.contains('miss')])"""
    assert window.page.evaluate(script) == [["1", True], ["2", True], ["3", False], ["0", False]]
    opened(window, page, run="mixed", step=0)
    window.page.fill(".reader [type=search]", "DENY")
    window.until("() => location.hash.includes('find=DENY')")
    settled(window)
    assert cells(window) == {"1": [4, 5]}
    window.page.fill(".reader [type=search]", "yes 0")
    window.until("() => location.hash.includes('find=yes')")
    window.until("() => document.querySelectorAll('tr.group').length === 3")
    assert cells(window) == {"0": [0, 3], "2": [6], "3": [8]}
    assert window.page.locator("[data-order] option[value=kl]").is_disabled()  # no reference was stored


def test_keys_move_between_tokens_siblings_groups_and_steps(window, page):
    def place() -> dict[str, str]:
        return dict(each.split("=") for each in window.page.url.split("#")[1].split("&"))

    opened(window, page, run="known", step=1, group=0)
    pressed(window, "n")
    assert (place()["row"], place()["token"]) == ("0", "0")  # the first that is stopped
    pressed(window, "n")
    assert (place()["row"], place()["token"]) == ("1", "1")
    pressed(window, "p")
    assert (place()["row"], place()["token"]) == ("0", "0")
    pressed(window, "ArrowRight")
    assert (place()["row"], place()["token"]) == ("0", "1")
    assert window.page.evaluate("() => document.activeElement.dataset.token") == "1"
    pressed(window, "ArrowDown")
    assert (place()["row"], place()["token"]) == ("1", "1")
    pressed(window, "ArrowRight")
    assert (place()["row"], place()["token"]) == ("2", "0")  # on to the next sibling
    pressed(window, "5")
    assert place()["channel"] == "entropy"
    pressed(window, "a")
    assert place()["as"] == "ppo"
    pressed(window, "]")
    assert (place()["group"], "row" in place()) == ("1", False)
    pressed(window, "[")
    assert place()["group"] == "0"
    pressed(window, "<")
    assert (place()["step"], "group" in place()) == ("0", False)
    pressed(window, ">")
    assert place()["step"] == "1"
    assert "step=1" in window.page.url
    pressed(window, "]", "n")  # entropy by now: the largest first, where the log-prob is smallest
    assert (place()["group"], place()["row"], place()["token"]) == ("0", "0", "2")
    pressed(window, "Escape")
    assert "group" not in place()


def test_a_link_restores_everything(window, page):
    window.page.goto(page.address())
    link = "run=known&step=1&group=0&row=2&token=2&as=gspo&show=clipped&channel=ratio"
    other = window.page.context.new_page()
    other.goto(f"{page.origin}/#{link}")
    again = Window(other)
    settled(again)
    again.until("() => document.querySelector('.card .words')?.textContent.length > 5")
    assert other.locator(".token.picked").evaluate_all(
        "all => all.map((token) => token.closest('.sibling').dataset.row + ' ' + token.dataset.token)"
    ) == ["2 2"]
    assert other.get_attribute("[data-channel=ratio]", "aria-pressed") == "true"
    assert other.input_value("[data-order]") == "clipped"
    assert other.eval_on_selector(".lens select", "select => select.value") == "gspo"
    assert other.get_attribute("tr[data-group='0']", "class") == "group trained opened"
    assert "under GSPO" in other.inner_text(".card")
    other.close()


def test_the_same_problem_at_another_step(window, page):
    opened(window, page, run="known", step=0, group=0)
    window.until("() => document.querySelectorAll('.time').length === 2")
    window.page.click(".time[data-step='1']")
    window.until("() => location.hash.includes('step=1&group=0')")


def test_a_mistake_is_one_line_of_the_page(window, page):
    opened(window, page, run="known", step=0)
    window.page.evaluate("() => { location.hash = 'run=known&step=0&as=nothing' }")
    window.until(
        "() => document.querySelector('.reader [role=alert]').textContent.startsWith('no algorithm is called')"
    )
    window.errors.clear()  # the browser's own word about the answer's status
    window.page.evaluate("() => { location.hash = 'run=known&step=0' }")
    window.until("() => document.querySelector('.reader [role=alert]').textContent === ''")


def focused(window: Window) -> str:
    return window.page.evaluate(
        "() => document.activeElement.matches('.reader [type=search]') ? 'search' : "
        "document.activeElement.matches('.lens select') ? 'lens' : 'other'"
    )


def test_who_types_or_chooses_is_not_disturbed(window, page):
    opened(window, page, run="known", step=1, group=0, row=0, token=1)
    window.page.keyboard.press("/")
    for letter, found in (("0", "0"), ("n", "0n")):  # a letter that is a command elsewhere
        window.page.keyboard.type(letter)
        window.until("found => location.hash.endsWith(`find=${found}`)", found)
        settled(window)
        assert focused(window) == "search"
    assert "row=0&token=1&" in window.page.url
    window.page.focus(".lens select")
    window.page.select_option(".lens select", "gspo")
    window.until("() => document.querySelector('.lens select').dataset.lens === 'gspo'")
    settled(window)
    assert focused(window) == "lens"


def test_tokens_that_are_asked_for_later_have_their_values(window, page, monkeypatch):
    monkeypatch.setattr(reader, "BUDGET", 8)
    opened(window, page, run="known", step=0, group=0, channel="ratio")
    assert [len(row) for row in tokens(window)] == [2, 2, 2, 1]
    window.page.click(".sibling .more")
    window.until("() => document.querySelectorAll('.sibling:first-child .token').length === 4")
    values = of(tokens(window), "value")[0]
    torch.testing.assert_close(torch.tensor(values), LOG_RATIO[0].exp(), rtol=0, atol=1e-6)


def test_after_a_mistake_nothing_of_another_step_is_left_and_keys_lead_on(window, page):
    def left() -> list[object]:
        return window.page.evaluate("""() => [document.querySelector(".jump").value,
            document.querySelectorAll("tr.group").length, document.querySelectorAll(".sibling").length]""")

    opened(window, page, run="damaged", step=0, group=0, row=0, token=1, **{"pass": 0})
    assert left() == ["0", 1, 4]
    pressed(window, ">")
    assert "step-000001.parquet" in window.page.inner_text(".reader [role=alert]")
    assert left() == ["1", 0, 0]
    assert "pass" not in window.page.url
    pressed(window, ">")
    assert left() == ["2", 1, 0]
    assert window.page.inner_text(".reader [role=alert]") == ""
    pressed(window, "<", "<", "]")
    assert left() == ["0", 1, 4]
    opened(window, page, run="damaged", step=0, group=9)
    assert "group is 9" in window.page.inner_text(".reader [role=alert]")
    assert left() == ["0", 1, 0]
    window.errors.clear()  # the browser's own words about the answers' status


def test_an_episode_is_shown_in_turns_and_a_text_as_markdown_and_all_of_it_can_be_saved(window, page):
    dialogs: list[str] = []
    window.listen("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    opened(window, page, run="played", step=1, group=0)
    turns = window.page.locator(".sibling:first-child .text .turn")
    assert turns.evaluate_all("all => all.map((turn) => turn.dataset.role)") == ["assistant", "tool", "assistant"]
    first, tool, last = [re.sub(r"\s+", " ", text) for text in turns.all_inner_texts()]
    assert first.startswith("reply 1 of 2 makes 2 calls earned +0.25 add(1, 2)")
    assert tool.startswith("2 results of tools not sampled failed: raised")
    assert last.startswith("reply 2 of 2 earned +0.75 it is 3")
    states = of(tokens(window), "state")[0]
    assert [state == "outside" for state in states] == [False] * 3 + [True] * 5 + [False] * 3
    assert "1 + 2? <script>alert(5)</script>" in window.page.inner_text(".chat .turn")
    # One token of each completion is reached by Tab, and arrows lead on.
    assert window.page.locator(".text [tabindex='0']").count() == 2
    window.page.locator(".sibling:first-child .text [tabindex='0']").focus()
    settled(window)
    pressed(window, "End")
    assert window.page.evaluate("() => document.activeElement.dataset.token") == "10"
    assert window.page.locator(".sibling:first-child .text [tabindex='0']").count() == 1
    pressed(window, "?")
    assert window.page.is_visible(".help dl")
    pressed(window, "?", "m")
    prose = window.page.locator(".sibling:nth-child(2) .prose")
    made = "strong, code, li, math mfrac, math msup, td, pre"
    names = set(prose.locator(made).evaluate_all("all => all.map((each) => each.localName)"))
    assert names == {"strong", "code", "li", "mfrac", "msup", "td", "pre"}
    assert prose.locator("img, a, script, b").count() == 0
    assert "[a](javascript:alert(7))" in prose.inner_text()
    assert prose.locator("code.formula").inner_text() == r"\unknown{3}"  # what is not known stays as it is
    pressed(window, "m")
    for kind, begins in (("jsonl", b'{"step":1'), ("svg", b"<svg"), ("png", b"\x89PNG")):
        window.page.click(".save summary")
        with window.page.expect_download() as download:
            window.page.click(f"[data-save={kind}]")
        assert download.value.suggested_filename == f"step-1-group-0.{kind}"
        assert Path(download.value.path()).read_bytes().startswith(begins)
    opened(window, page, run="played", step=1, find="ADD(1, 2", all=1)
    window.until("() => document.querySelector('.found p')?.textContent.includes('in 1 step')")
    assert "assistant: add(1, 2)" in window.page.inner_text(".found li")
    window.page.click(".found li button")
    window.until("() => location.hash.includes('group=0&row=0')")
    assert dialogs == []


def test_the_reader_names_its_run_and_others_are_a_choice_away(window, page):
    opened(window, page, run="known", step=0, group=0)
    assert window.page.input_value(".which select") == "known"
    window.page.select_option(".which select", "damaged")
    window.until("() => location.hash.includes('run=damaged')")
    settled(window)
    assert window.page.input_value(".which select") == "damaged"
    window.page.click("#runs [data-run=known] .name")
    window.until("() => location.hash.includes('run=known')")
    settled(window)
    assert "step=0" in window.page.url
    assert window.page.locator("#runs .run.chosen").get_attribute("data-run") == "known"


def test_on_a_phone_the_card_is_a_sheet_and_everything_is_large_enough_to_touch(window, page):
    window.page.set_viewport_size({"width": 390, "height": 844})
    opened(window, page, run="known", step=0, group=0, row=1, token=1)
    box = window.page.locator(".aside").bounding_box()
    assert box["y"] + box["height"] == pytest.approx(844, abs=1)
    small = """() => [...document.querySelectorAll("main button, main select, main input, main summary")]
        .filter((each) => each.checkVisibility())
        .map((each) => [each.outerHTML.slice(0, 90), each.getBoundingClientRect()])
        .filter(([, box]) => box.width < 24 || box.height < 24).map(([html]) => html)"""
    assert window.page.evaluate(small) == []
    wide = "() => Math.max(document.querySelector('main').scrollWidth, document.querySelector('.body').scrollWidth)"
    assert window.page.evaluate(wide) <= 390
    window.page.click(".close")
    window.until("() => !location.hash.includes('token')")
    settled(window)
    assert not window.page.is_visible(".aside")
    opened(window, page, run="mixed", step=0)
    cell = window.page.locator("tr[data-group='0'] .cell").last.bounding_box()
    assert cell["x"] + cell["width"] <= 390  # the rewards are not cut off
    window.page.set_viewport_size(VIEWPORT)
    opened(window, page, run="known", step=0, group=0)
    assert window.page.locator(".sibling").first.bounding_box()["y"] < 480  # above the fold


def test_a_group_is_painted_in_slices_with_what_is_looked_at_first(window, page):
    window.page.goto(page.address())
    script = """async () => {
        const { paintAll } = await import("/static/reader/tokens.js");
        const at = (bottom) => ({ getBoundingClientRect: () => ({ bottom }) });
        const siblings = [-1, -1, 9, 9].map((bottom, row) => ({ row: { row }, root: at(bottom) }));
        const painted = [];
        const paint = ({ row }) => {
            painted.push(row.row);
            for (const end = performance.now() + 50; performance.now() < end;);
        };
        const done = paintAll(siblings, "3", paint, () => painted.length < 3);
        const atOnce = [...painted];
        await done;
        return [atOnce, painted];
    }"""
    assert window.page.evaluate(script) == [[3], [3, 2, 0]]  # and then it was no longer wanted


@pytest.mark.scale
def test_axe_finds_nothing_serious_in_the_reader(window, page):
    opened(window, page, run="played", step=1)
    window.page.evaluate((AXE / "axe.min.js").read_text())
    for state in ({}, {"group": 0, "row": 0, "token": 4}, {"group": 0, "text": "markdown"}, {"find": "3", "all": 1}):
        opened(window, page, run="played", step=1, **state)
        for scheme, wide in itertools.product(("light", "dark"), (VIEWPORT, PHONE)):
            window.page.emulate_media(color_scheme=scheme)
            window.page.set_viewport_size(wide)
            assert window.page.evaluate(SERIOUS) == [], (state, scheme, wide)
    window.page.set_viewport_size(VIEWPORT)
    window.page.emulate_media(color_scheme=None)
