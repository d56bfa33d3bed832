"""The page's figures and lists in a real browser: many runs, names, means, keys, phones, screen readers."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from proximo.algorithms import GRPO, SAPO
from proximo.runs.health import RULES
from tests.insight.page.browser import PHONE, VIEWPORT, Served, Window, served, write_run

pytestmark = pytest.mark.usefixtures("chromium")
AXE = Path(__file__).parent / "axe"
LONG = "a-long-experiment-with-many-words-in-its-name"
TABS = ("overview", "stability", "performance", "events", "config", "all")


def evaluation(step: int, share: float) -> Mapping[str, object]:
    values = {"accuracy": share, "outcome": share, "low": share - 0.05, "high": share + 0.05, "problems": 400}
    return {"step": step} | {f"held_out/{name}": value for name, value in values.items()}


def metrics(seed: int) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = [evaluation(0, 0.3)]
    for step in range(1, 31):
        up = step / 60 + 0.1 * seed + 0.04 * (step % 2)
        numbers = {
            "outcome": 0.2 + up,
            "reward": 0.2 + up,
            "entropy": 1 / step,
            "truncated": 0.0,
            "length": 9 + up,
            "length_p10": 5.0,
        }
        rows.append({"step": step, "sampled_tokens": 100, "completions": 8, "length_p90": 12.0, **numbers})
    return [*rows, evaluation(30, 0.8 + 0.02 * seed)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two algorithms with two seeds each, and a run of a stage."""
    root = tmp_path_factory.mktemp("runs")
    for name, algorithm in (("sapo", SAPO), ("grpo", GRPO)):
        for seed in (0, 1):
            folder = root / "compared" / f"{LONG}-{name}-seed-{seed}-of-the-first-week"
            timings = [{"step": step, "rollout": 1.0, "update": 0.5, "tokens": 100} for step in range(1, 31)]
            events = [{"step": 3, "attempt": 2, "kind": "resumed", "message": "from step 2"}] * (not seed)
            write_run(folder, metrics(seed), timings=timings, events=events, algorithm=algorithm, seed=seed)
    stage = write_run(root / "sft", [{"step": step, "loss": 2 / step} for step in (1, 2, 3)])
    (stage / "config.toml").write_text("[fit]\nepochs = 1.0\n")
    with (stage / "metrics.jsonl").open("a") as file:
        file.write("not a row\n")
    with served(root) as made:
        yield made


def name(algorithm: str, seed: int) -> str:
    return f"compared/{LONG}-{algorithm}-seed-{seed}-of-the-first-week"


def opened(window: Window, page: Served, *runs: str, **state: str) -> dict:
    window.page.goto(page.address(**state) + "".join(f"&run={run}" for run in runs))
    window.until("count => window.proximo.charts.outcome?.lines.filter((line) => line.run).length === count", len(runs))
    return window.charts()


ALL = [name("grpo", 0), name("grpo", 1), name("sapo", 0), name("sapo", 1)]


def test_seeds_share_a_colour_and_their_mean_is_drawn_over_them(window, page):
    chart = opened(window, page, *ALL)["outcome"]
    thin, bold = ([line for line in chart["lines"] if line["isMean"] is mean] for mean in (False, True))
    assert all(line["isThin"] for line in thin)
    assert [line["label"] for line in thin] == ["grpo-seed-0", "grpo-seed-1", "sapo-seed-0", "sapo-seed-1"]
    assert [line["label"] for line in bold] == ["grpo (2 seeds)", "sapo (2 seeds)"]
    colours = {line["label"]: line["colour"] for line in chart["lines"]}
    assert colours["grpo-seed-0"] == colours["grpo-seed-1"] == colours["grpo (2 seeds)"] != colours["sapo-seed-0"]
    first, second, mean = (next(line["y"] for line in chart["lines"] if label in line["label"])
                           for label in ("grpo-seed-0", "grpo-seed-1", "grpo (2"))  # fmt: skip
    assert mean == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert len(bold[0]["smooth"]) == 30
    assert bold[0]["smooth"][10] == pytest.approx(sum(mean[8:13]) / 5)
    assert {line["low"] is None for line in window.charts()["length"]["lines"]} == {True}  # bands are for one or two
    # The list and the tables name the same runs, whole in the tooltips.
    assert window.page.inner_text(f"li[data-run='{name('grpo', 1)}'] .name").strip() == "grpo-seed-1"
    assert window.page.locator(".figures th[scope=row]").first.get_attribute("title") == name("grpo", 0)
    assert window.page.locator("#runs .folder").first.inner_text() == "compared/"
    assert "Two seeds cannot decide" in window.page.inner_text(".seeds")
    window.until("() => document.querySelectorAll('.figures .word.good').length === 4")
    assert "+50.0 points (42.9 to 57.1) of held-out accuracy in 30 steps" in window.page.inner_text(".figures")
    box = window.page.locator("[data-chart=outcome] canvas").bounding_box()
    assert box["y"] < 420  # the table does not push the figures away


def test_one_run_begins_with_its_verdict_and_its_figures_can_be_read_closely(window, page):
    charts = opened(window, page, name("grpo", 0))
    window.until("() => document.querySelector('.lead .word')?.textContent === 'learned'")
    assert window.page.inner_text(".lead").endswith("of held-out accuracy in 30 steps; no warnings")
    assert "80.0% is greedy" in window.page.inner_text(".verdicts .note")
    assert charts["held_out"]["lines"][0]["smooth"] is None
    assert charts["length"]["lines"][0]["low"] == [5.0] * 30
    assert charts["held_out"]["lines"][0]["high"] == pytest.approx([0.35, 0.85])
    # What stays the same is one line, and can be drawn.
    assert "truncated" not in charts
    assert window.page.inner_text("[data-flat=truncated]").split("\n")[0].startswith("Truncated")
    window.page.click("[data-flat=truncated]")
    assert "truncated" in window.charts()
    for key, script in (
        ("l", "() => window.proximo.charts.entropy.isLog"),
        ("s", "() => window.proximo.charts.entropy.lines[0].smooth === null"),
        ("+", "() => window.proximo.charts.entropy.range[1] - window.proximo.charts.entropy.range[0] < 16"),
        ("-", "() => window.proximo.charts.entropy.range[1] === 30"),
        ("?", "() => document.querySelector('dialog.keys[open]')"),
    ):
        assert not window.page.evaluate(script.replace("() =>", "() => !!(") + ")"), key
        window.page.keyboard.press(key)
        window.until(script)
    assert "log=1" in window.page.url
    window.page.keyboard.press("Escape")
    window.until("() => !document.querySelector('dialog')")
    # Every figure says run, step and values; arrow keys move, and are announced.
    window.page.focus("[data-chart=outcome]")
    window.page.keyboard.press("ArrowRight")
    window.page.keyboard.press("ArrowRight")
    said = f"Task score, step 2: {name('grpo', 0)} 23 %"
    assert window.page.locator("[data-chart=outcome]").get_attribute("aria-label") == said
    assert window.page.inner_text("[aria-live=polite].unseen") == said
    window.page.keyboard.press("ArrowDown")
    assert window.page.evaluate("() => document.activeElement.dataset.chart") == "held_out"
    # The list of runs is one tab stop.
    window.page.focus("#runs li.chosen .name")
    window.page.keyboard.press("ArrowDown")
    assert window.page.evaluate("() => document.activeElement.dataset.key") == f"only {name('sapo', 1)}"
    assert window.page.locator("#runs .name[tabindex='0']").count() == 1
    window.page.keyboard.press("Enter")
    window.until("run => window.proximo.charts.outcome?.lines[0].run === run", name("sapo", 1))


def test_events_say_which_rules_passed_and_which_need_more(window, page):
    window.page.goto(page.address(run=name("grpo", 0), tab="events") + "&run=sft")
    window.until("() => document.querySelectorAll('.ruled').length === 2")
    first, stage = window.page.locator(".ruled").all()
    assert first.locator("summary").inner_text() == f"10 of {len(RULES)} rules passed"
    assert "without the metric" in first.locator("[data-rules=unmeasured]").inner_text()
    assert "Every row of metrics.jsonl (32)" in first.locator("[data-rules=rows]").inner_text()
    assert "about reinforcement learning" in stage.locator("[data-rules=none]").inner_text()
    assert "1 of 4 rows of metrics.jsonl cannot be read" in stage.locator("[data-rules=rows]").inner_text()
    assert "1 of the 4 rows of metrics.jsonl cannot be read" in window.page.inner_text(".findings")


def test_names_curves_and_ticks(window, page):
    """Functions without a page, in one that is open."""
    window.page.goto(page.address())
    script = """async () => {
        const names = await import("/static/figures/names.js");
        const curves = await import("/static/figures/curves.js");
        const ends = await import("/static/figures/ends.js");
        const arms = Array.from("abcdefghij", (name) => ({ name, arm: name, seed: 0 }));
        const short = (...all) => [...names.shortNames(all, 20).values()];
        return {
            both: short("runs/x-grpo-7b", "runs/x-sapo-7b"), seeds: short("a/grpo-seed-0", "a/grpo-seed-1"),
            rates: short("lr1e-4-b", "lr3e-4-b"), prefix: short("a", "a-b"), one: short("runs/" + "q".repeat(60)),
            inner: short("x".repeat(40) + "1" + "y".repeat(40), "x".repeat(40) + "2" + "y".repeat(40), "grpo"),
            aside: [[0, 2, 99], [0, 8, 7], [7, 8, 7], [0, 1, Infinity]].map((each) => ends.aside(...each)),
            arms: names.shownRuns(arms, arms.map(({ name }) => name)).map(({ shade, turn }) => [shade, turn]),
            middle: names.middle("abcdefghij", 5), spread: ends.spread([5, 5, 9], 3, 0, 10),
            fitting: [9, 30].map((most) => ends.fitting([
                { label: "grpo · clip low", line: "clip low" }, { label: "a long one", line: "a long one" }], most)),
            mean: curves.movingMean([1, null, 3, 8], 3),
            flat: [[2, 2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2, 3]].map((y) => curves.isFlat([{ y }])),
            ticks: [[0.001, 100], [0.1, 0.4], [2.6, 3.7]].map(([low, high]) => curves.logTicks(low, high)),
            windows: [19, 60, 900].map((points) => curves.windowOf(points)), own: curves.windowOf(60, 10),
        };
    }"""
    found = window.page.evaluate(script)
    assert found["both"] == ["grpo", "sapo"]
    assert found["seeds"] == ["seed-0", "seed-1"]
    assert found["rates"] == ["lr1e-4", "lr3e-4"]
    assert found["prefix"] == ["a", "a-b"]
    assert found["one"] == ["q" * 10 + "…" + "q" * 9]
    assert found["inner"] == ["…xxx1yyy…", "…xxx2yyy…", "grpo"]
    assert found["aside"] == pytest.approx([-2, -2.1, 2.1, 0])  # less than half of the way to the next evaluation
    assert len({tuple(each) for each in found["arms"]}) == 10  # two of ten have another's colour, and a dash
    assert sorted(turn for _, turn in found["arms"]) == [0] * 8 + [1] * 2
    assert found["middle"] == "ab…ij"
    assert found["spread"] == [4, 7, 10]
    assert found["fitting"] == [["clip low", "a long one"], ["grpo · clip low", "a long one"]]
    assert found["mean"] == [1, None, 5.5, 5.5]
    assert found["flat"] == [True, False, False]
    assert found["ticks"] == [[0.001, 0.01, 0.1, 1, 10, 100], [0.1, 0.15, 0.2, 0.3], [2.6, 2.8, 3, 3.2, 3.4, 3.6]]
    assert (found["windows"], found["own"]) == ([1, 5, 51], 11)


def test_the_last_tick_is_whole(window, tmp_path):
    """2000 at the right end, of a chart that needs no room for names there."""
    write_run(tmp_path / "long", [{"step": step, "outcome": step / 4000} for step in range(0, 2001, 50)])
    opened(window, window.serve(tmp_path), "long")
    script = """() => {
        const canvas = document.querySelector("[data-chart=outcome] canvas");
        const high = 20 * devicePixelRatio;
        const { data } = canvas.getContext("2d").getImageData(canvas.width - 1, canvas.height - high, 1, high);
        return data.some((part) => part > 0);
    }"""
    assert not window.page.evaluate(script)


def test_what_a_metric_means_is_told_when_it_is_known_only_after_its_numbers(window, page):
    """What metrics mean comes with the facts about a run, whose numbers may be drawn before."""
    held = []
    window.page.route("**/api/run?*", lambda route: held.append(route))
    window.deaf.callback(window.page.unroute, "**/api/run?*")  # the tab is also that of other tests
    window.page.goto(page.address(tab="all") + f"&run={name('grpo', 0)}")
    window.until("() => document.querySelector('[data-chart=\"all:entropy\"]')")
    assert window.page.locator("figure .note").count() == 0
    for route in held:
        route.continue_()
    window.until("() => document.querySelector('[data-chart=\"all:entropy\"] .note')")


SMALL = """() => [...document.querySelectorAll("button, select, summary, a[href], input[type=checkbox]")]
    .filter((each) => each.checkVisibility() && !each.closest("p, td"))
    .map((each) => [each, (each.closest("label") ?? each).getBoundingClientRect()])
    .filter(([, { width, height }]) => Math.min(width, height) < 24).map(([each]) => each.outerHTML.slice(0, 90))"""


def test_on_a_phone_nothing_is_wider_than_the_screen_and_targets_are_large(window, page):
    window.page.set_viewport_size(PHONE)
    opened(window, page, *ALL)
    assert not window.page.locator("#runs .runlist").is_visible()
    assert window.page.inner_text("#runs .fold").split("\n") == ["4 runs", "of 5"]
    window.page.click("#runs .fold")
    window.page.locator("#runs .runlist").wait_for()
    for tab in TABS:
        window.page.evaluate("tab => document.querySelector(`#tabs [data-tab=${tab}]`).click()", tab)
        window.until("tab => document.body.dataset.tab === tab && document.getElementById('main').innerText", tab)
        assert window.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], tab
        assert window.page.evaluate(SMALL) == [], tab


SERIOUS = """() => axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => [id, nodes.length, nodes[0].html.slice(0, 120), nodes[0].failureSummary]))"""


WHOLE = [(tab, scheme, wide) for wide in (VIEWPORT, PHONE) for tab in TABS for scheme in ("light", "dark")]


@pytest.mark.parametrize("pages", [WHOLE[:1], pytest.param(WHOLE[1:], marks=pytest.mark.scale)])
def test_axe_finds_nothing_serious(window, page, pages):
    opened(window, page, name("grpo", 0), name("sapo", 0))
    window.page.evaluate((AXE / "axe.min.js").read_text())
    for tab, scheme, wide in pages:
        window.page.set_viewport_size(wide)
        window.page.evaluate("tab => document.querySelector(`#tabs [data-tab=${tab}]`).click()", tab)
        window.until("tab => document.body.dataset.tab === tab && document.getElementById('main').innerText", tab)
        window.page.emulate_media(color_scheme=scheme)
        window.page.wait_for_timeout(50)  # the charts are drawn again in the other colours
        assert window.page.evaluate(SERIOUS) == [], (tab, scheme, wide)
    if len(pages) > 1:
        window.page.keyboard.press("?")
        assert window.page.evaluate(SERIOUS) == []


def drawn(window, page, run: str) -> dict:
    window.page.goto(page.address(run=run))
    window.until("() => Object.keys(window.proximo.charts).length > 1")
    window.until("() => !document.querySelector('#main').innerText.includes('being checked')")
    return window.charts()


def test_pairs_ranked_right_are_no_greedy_answers(window, page, tmp_path):
    """A stage's accuracy is of pairs: it has its own chart, with its own words."""
    rows = [{"step": step, "loss": 1 / (step + 1), "accuracy": 0.6 + step / 50} for step in range(1, 5)]
    held = [{"step": step, "held_out/loss": 0.7 - step / 50, "held_out/accuracy": 0.5 + step / 24} for step in (0, 4)]
    stage = write_run(tmp_path / "dpo", [held[0], *rows, held[1]])
    (stage / "config.toml").write_text("[fit]\nepochs = 1.0\n")
    page = window.serve(tmp_path)
    charts = drawn(window, page, "dpo")
    assert set(charts) == {"all:loss", "all:accuracy"}
    assert charts["all:accuracy"]["lines"][1]["y"][-1] == pytest.approx(0.5 + 4 / 24)
    window.until("() => document.getElementById('main').innerText.includes('share of the pairs')")
    shown = window.page.inner_text("#main")
    assert "greedy" not in shown
    assert "held-out loss" in window.page.inner_text(".figures")
    assert "0.7 → 0.62" in window.page.inner_text(".figures")


def test_rewards_that_are_no_shares_are_not_shown_as_percent(window, tmp_path):
    rows = [{"step": step, "outcome": -0.007 * step, "reward": -0.007 * step, "entropy": 1 / step} for step in (1, 2)]
    write_run(tmp_path / "judged", [row | {"solved_by_all": None} for row in rows])
    write_run(tmp_path / "exact", [row | {"outcome": 0.5 / row["step"], "solved_by_all": 0.1} for row in rows])
    page = window.serve(tmp_path)
    drawn(window, page, "judged")
    shown = window.page.inner_text("#main")
    assert "−0.014" in shown
    assert "%" not in shown
    assert "1 is correct" not in shown
    lasts = window.page.locator("#runs .last").all_inner_texts()
    assert sorted(lasts) == ["score 25 %", "score −0.014"]
    drawn(window, page, "exact")
    window.until("() => document.getElementById('main').innerText.includes('1 is correct')")
    assert "25 %" in window.page.inner_text(".figures")


def test_there_is_no_page_that_is_not_about_the_runs(window, page):
    opened(window, page, ALL[0])
    names = [each.get_attribute("data-tab") for each in window.page.locator("#tabs button").all()]
    assert names == list(TABS)


def test_axe_is_what_its_notice_says():
    digest = hashlib.sha256((AXE / "axe.min.js").read_bytes()).hexdigest()
    assert f"sha256 {digest}  axe.min.js" in (AXE / "NOTICE").read_text()
