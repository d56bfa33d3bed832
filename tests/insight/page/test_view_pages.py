"""The page of runs in a real browser: what is drawn is what the files say, while they grow; nothing else is asked."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from proximo.algorithms import GRPO, SAPO
from proximo.insight.folder import RunFolder
from proximo.insight.report import gather, render
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.system.sealing import sealed
from tests.insight.page.browser import PHONE, Served, Window, append, rows, served, until, write_run

pytestmark = pytest.mark.usefixtures("chromium")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two real ones."""
    root = tmp_path_factory.mktemp("runs")
    torch.set_default_dtype(torch.float32)
    small = RunConfig(
        steps=4,
        device="cpu",
        training=TrainingOptions(groups=4, learning_rate=3e-4),
        evaluation=EvaluationOptions(problems=8),
    )
    for name, algorithm in (("grpo", GRPO), ("sapo", SAPO)):
        config = replace(small, algorithm=algorithm)
        train(Run(config, root / name, ProgressLines()))
    torch.set_default_dtype(torch.float64)
    return root


@pytest.fixture(scope="module")
def page(runs):
    with served(runs) as made:
        yield made


def opened(window: Window, page: Served, chart: str, **state: str) -> dict:
    """The charts, once this one is drawn."""
    window.page.goto(page.address(**state))
    window.until("name => name in window.proximo.charts", chart)
    window.page.wait_for_selector(f"[data-chart='{chart}'] canvas")
    return window.charts()


def drawn(chart: dict, run: str, label: str | None = None) -> list[tuple[float, float]]:
    """The points of a line, without the places where only other lines have one."""
    [line] = [line for line in chart["lines"] if line["run"] == run and label in (None, line["label"])]
    return [(x, y) for x, y in zip(line["x"], line["y"], strict=True) if y is not None]


def logged(folder: Path, metric: str) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in rows(folder, "metrics") if row.get(metric) is not None]


def test_charts_are_drawn_with_the_run_s_values(window, page, runs):
    charts = opened(window, page, "outcome", run="grpo")
    folder = runs / "grpo"
    assert list(charts) == ["outcome", "held_out", "length", "entropy", "truncated"]
    assert len(logged(folder, "outcome")) == 4
    for name in ("outcome", "length", "entropy", "truncated"):
        assert drawn(charts[name], "grpo") == logged(folder, name)
    [held_out] = charts["held_out"]["lines"]
    assert drawn(charts["held_out"], "grpo") == logged(folder, "held_out/accuracy")
    assert held_out["low"] == [value for _, value in logged(folder, "held_out/low")]
    assert held_out["high"] == [value for _, value in logged(folder, "held_out/high")]
    assert charts["length"]["lines"][0]["low"] == [value for _, value in logged(folder, "length_p10")]
    assert charts["length"]["caps"] == [8]
    last = logged(folder, "outcome")[-1][1]
    assert window.page.inner_text("[data-chart=outcome] .legend") == f"{int(100 * last + 0.5)} %"
    assert has_ink(window, "outcome")


def has_ink(window: Window, chart: str) -> bool:
    """Whether the line's own colour is on the canvas."""
    script = """name => {
        const canvas = document.querySelector(`[data-chart='${name}'] canvas`);
        const wanted = window.proximo.charts[name].lines[0].colour.match(/\\w\\w/g).map((each) => parseInt(each, 16));
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const isIt = (at) => wanted.every((part, place) => Math.abs(data[at + place] - part) < 5);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) found += data[at + 3] > 250 && isIt(at);
        return found > 60;
    }"""
    return window.page.evaluate(script, chart)


def test_stability_shows_what_the_gate_did_on_one_axis(window, page, runs):
    charts = opened(window, page, "held_back", run="grpo", tab="stability")
    assert drawn(charts["held_back"], "grpo", "clipped low") == logged(runs / "grpo", "clip_low")
    assert drawn(charts["held_back"], "grpo", "clipped high") == logged(runs / "grpo", "clip_high")
    assert len(charts["held_back"]["lines"]) == 2
    for name in ("kl", "ratio_spread", "ratio_max", "ess", "sampler_gap"):
        assert drawn(charts[name], "grpo") == logged(runs / "grpo", name)
    assert drawn(charts["gradient_norm"], "grpo", "largest") == logged(runs / "grpo", "gradient_norm_max")
    assert drawn(charts["dead"], "grpo", "all solved") == logged(runs / "grpo", "dead_solved")
    assert "explained" not in charts
    window.page.goto(f"{page.origin}/#run=sapo&tab=stability")
    window.until("() => window.proximo.charts.held_back?.lines[0].run === 'sapo'")
    soft = window.charts()
    [line] = soft["held_back"]["lines"]
    assert line["label"] == "soft gate"
    assert line["y"] == [1 - value for _, value in logged(runs / "sapo", "gate")]
    assert "kl" not in soft


def test_runs_are_laid_over_one_another(window, page, runs):
    alone = opened(window, page, "outcome", run="sapo")["outcome"]["lines"][0]["colour"]
    window.page.get_by_label("show grpo").check()
    window.until("() => window.proximo.charts.outcome.lines.length === 2")
    charts = window.charts()
    for name in ("sapo", "grpo"):
        assert drawn(charts["outcome"], name) == logged(runs / name, "outcome")
    colours = {line["run"]: line["colour"] for line in charts["outcome"]["lines"]}
    assert colours["sapo"] == alone
    assert colours["grpo"] != alone
    assert "run=sapo&run=grpo" in window.page.url
    assert window.page.locator(".figures tbody tr").count() == 2
    window.page.get_by_label("show sapo").uncheck()
    window.until("() => window.proximo.charts.outcome.lines.length === 1")
    assert window.charts()["outcome"]["lines"][0]["colour"] == colours["grpo"]


def test_a_fork_begins_where_it_parts_from_its_parent(window, runs, tmp_path):
    shutil.copytree(runs / "grpo", tmp_path / "grpo")
    shutil.copytree(runs / "grpo", tmp_path / "fork")
    record = json.loads((tmp_path / "fork" / "run.json").read_text())
    (tmp_path / "fork" / "run.json").write_text(json.dumps(sealed(record | {"fork": {"of": "../grpo", "step": 3}})))
    page = window.serve(tmp_path)
    whole = logged(runs / "grpo", "outcome")
    charts = opened(window, page, "outcome", run="fork")
    assert drawn(charts["outcome"], "fork") == whole  # alone, it is shown from its beginning
    assert "from grpo at 3" in window.page.inner_text("li[data-run=fork]")
    window.page.get_by_label("show grpo").check()
    window.until("() => window.proximo.charts.outcome.lines.length === 2")
    assert drawn(window.charts()["outcome"], "fork") == [point for point in whole if point[0] >= 3]
    window.page.wait_for_selector(".parting")
    said = window.page.inner_text(".parting")
    assert "fork forks from grpo after step 3" in said
    assert "All numbers are the same up to step 4" in said
    assert drawn(window.charts()["outcome"], "grpo") == whole
    window.page.goto(page.address(run="fork", tab="config"))
    window.page.click("details.fork summary")
    assert "proximo fork" in window.page.inner_text("details.fork pre")
    assert "--at 4 --algorithm NAME" in window.page.inner_text("details.fork pre")


def test_the_axis_may_be_tokens_or_time(window, page, runs):
    opened(window, page, "outcome", run="grpo")
    tokens, seconds = [0.0], [0.0]
    for row in rows(runs / "grpo", "metrics"):
        tokens += [tokens[-1] + row["sampled_tokens"]] if "sampled_tokens" in row else []
    for row in rows(runs / "grpo", "timings"):
        seconds.append(seconds[-1] + sum(value for name, value in row.items() if name not in ("step", "tokens")))
    for name, places in (("tokens", tokens), ("time", seconds)):
        window.page.click(f"[data-axis={name}]")
        window.until("axis => window.proximo.charts.outcome.axis === axis", name)
        charts = window.charts()
        assert [x for x, _ in drawn(charts["outcome"], "grpo")] == pytest.approx(places[1:])
        assert [x for x, _ in drawn(charts["held_out"], "grpo")] == pytest.approx([0.0, places[-1]])
        assert [y for _, y in drawn(charts["outcome"], "grpo")] == [y for _, y in logged(runs / "grpo", "outcome")]
        assert f"x={name}" in window.page.url
    window.page.keyboard.press("x")
    window.until("() => window.proximo.charts.outcome.axis === 'step'")


def test_performance_stacks_the_phases(window, page, runs):
    charts = opened(window, page, "phases", run="grpo", tab="performance")
    timings = rows(runs / "grpo", "timings")
    phases = [name for name in timings[0] if name not in ("step", "tokens")]
    assert [line["label"] for line in charts["phases"]["lines"]] == phases
    sums = [0.0] * len(timings)
    for line in charts["phases"]["lines"]:
        sums = [total + row[line["label"]] for total, row in zip(sums, timings, strict=True)]
        assert line["y"] == pytest.approx(sums)
    assert drawn(charts["speed"], "grpo", "sampling") == [
        (row["step"], row["tokens"] / row["rollout"]) for row in timings
    ]
    assert "wasted" in charts


def test_the_settings_say_what_differs(window, page):
    window.page.goto(page.address(run="grpo") + "&run=sapo&tab=config")
    table = window.page.locator(".differences")
    table.wait_for()
    assert "algorithm.gate.tau_pos" in table.inner_text()
    assert "Exactly GRPO." in window.page.inner_text("main")
    assert "[algorithm.gate]" in window.page.inner_text("main")


def test_a_click_opens_the_step(window, page):
    opened(window, page, "outcome", run="grpo")
    box = window.page.locator("[data-chart=outcome] .u-over").bounding_box()
    window.page.mouse.move(box["x"] + box["width"] * 0.42, box["y"] + 30)  # of 0 to 4: at step 2
    assert window.page.inner_text("[data-chart=outcome] .at") == "step 2"
    assert window.page.locator("[data-chart=entropy] .u-cursor-x").is_visible()
    window.page.mouse.click(box["x"] + box["width"] * 0.42, box["y"] + 30)
    window.until("() => document.querySelector('.reader')")
    assert window.page.url.endswith("#run=grpo&step=2")
    window.page.click("[data-tab=stability]")
    window.until("() => 'held_back' in window.proximo.charts")
    assert window.page.url.endswith("#run=grpo&tab=stability")


def test_everything_can_be_done_with_keys(window, page):
    opened(window, page, "outcome", run="grpo")
    window.page.focus("[data-chart=outcome]")
    for _ in range(3):
        window.page.keyboard.press("ArrowRight")
    assert window.page.inner_text("[data-chart=outcome] .at") == "step 3"
    window.page.keyboard.press("Enter")
    window.until("() => location.hash.endsWith('step=3')")
    window.page.go_back()
    window.until("() => 'outcome' in window.proximo.charts")
    window.page.keyboard.press("2")
    window.until("() => 'held_back' in window.proximo.charts")


def test_a_stretch_can_be_looked_at_closely(window, page):
    whole = opened(window, page, "outcome", run="grpo")["outcome"]["range"]
    box = window.page.locator("[data-chart=outcome] .u-over").bounding_box()
    for back in (lambda: window.page.click(".whole"), lambda: window.page.keyboard.press("Escape")):
        window.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 30)
        window.page.mouse.down()
        window.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30, steps=4)
        window.page.mouse.up()
        window.page.wait_for_selector(".whole")
        for chart in window.charts().values():
            assert chart["range"] == pytest.approx([0.8, 2.4], abs=0.1)  # of 0 to 4
        back()
        window.page.wait_for_selector(".whole", state="hidden")
        assert {tuple(chart["range"]) for chart in window.charts().values()} == {tuple(whole)} == {(0, 4)}
    assert "step=" not in window.page.url


def test_the_secret_does_not_stay_in_the_address(window, page):
    opened(window, page, "outcome", run="grpo")
    assert page.token not in window.page.url
    window.page.reload()
    window.until("() => 'outcome' in window.proximo.charts")
    stranger = window.page.context.browser.new_context().new_page()
    stranger.goto(page.origin)
    stranger.wait_for_selector(".empty:not(.faint)")
    assert "open the address that `proximo view` printed" in stranger.inner_text("main")
    stranger.context.close()


def test_no_request_leaves_the_page(window, page):
    for tab in ("overview", "stability", "performance", "events", "config", "all"):
        window.page.goto(page.address(run="grpo", tab=tab))
        window.until("tab => document.body.dataset.tab === tab && document.getElementById('main').innerText", tab)
    asked = {urlsplit(url).path for url in window.requests}
    assert asked > {"/", "/page.js", "/page.css", "/api/runs", "/api/run", "/api/rows", "/api/health"}
    assert [url for url in window.requests if not url.startswith(f"{page.origin}/")] == []
    assert not any(page.token in url for url in window.requests if "#" not in url)


# Runs that are going on


def test_a_run_that_goes_on_is_followed(clocked, runs, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(runs / "grpo", live)
    (live / "result.json").unlink()
    (live / "lock").touch()
    page = clocked.serve(tmp_path)
    opened(clocked, page, "outcome")
    clocked.page.evaluate("() => { window.same = true; }")
    row = [row for row in rows(live, "metrics") if "outcome" in row][-1]
    text = json.dumps({**row, "step": 5, "outcome": 0.125, "skipped_updates": 1}) + "\n"
    with (live / "metrics.jsonl").open("a") as file:
        file.write(text[:50])
        file.flush()
        tick(clocked)
        assert len(drawn(clocked.charts()["outcome"], "live")) == 4
        file.write(text[50:])
    clocked.page.clock.fast_forward(2500)
    clocked.until("() => window.proximo.charts.outcome.lines[0].y.at(-1) === 0.125")
    assert drawn(clocked.charts()["outcome"], "live")[-1] == (5, 0.125)
    assert clocked.page.evaluate("() => window.same")
    asked = [url for url in clocked.requests if "file=metrics" in url]
    assert sum(url.endswith("from=0") for url in asked) == 1
    clocked.page.click("[data-tab=stability]")
    clocked.until("() => 'gradient_norm' in window.proximo.charts")
    assert clocked.charts()["gradient_norm"]["marks"] == [5]

    finding = {"step": 3, "kind": "finding", "rule": "a-rule", "severity": "failing", "message": "m", "show": "dead"}
    append(live, "events", finding, {"step": 2, "attempt": 2, "kind": "resumed", "message": "from step 2"})
    clocked.page.clock.fast_forward(2500)
    clocked.until("() => document.querySelector('[data-tab=events] .count.bad')")
    clocked.page.click("[data-tab=events]")
    assert clocked.page.locator(".findings article.bad a").get_attribute("href") == "#run=live&step=3&show=dead"
    assert "from step 2" in clocked.page.inner_text(".events")
    clocked.page.click("[data-tab=stability]")

    # It was stopped, went on from an earlier step, and its file is shorter.
    kept = [row for row in rows(live, "metrics") if row["step"] < 3]
    (live / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    clocked.page.clock.fast_forward(2500)
    clocked.until("() => window.proximo.charts.kl.lines[0].y.length === 2")


def test_a_chart_far_from_the_screen_gets_new_values_when_it_comes_near(clocked, runs, tmp_path):
    """A page of sixty charts would keep a browser busy with what nobody sees."""
    live = tmp_path / "live"
    shutil.copytree(runs / "grpo", live)
    (live / "result.json").unlink()
    (live / "lock").touch()
    opened(clocked, clocked.serve(tmp_path), "all:outcome", tab="all")
    row = [row for row in rows(live, "metrics") if "outcome" in row][-1]
    charts = clocked.page.evaluate(
        "() => [...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)"
    )
    far = [each for each in charts if each.removeprefix("all:") in row][-1]
    last = f"document.querySelector('[data-chart=\"{far}\"]')"
    before = clocked.page.evaluate(f"() => Number({last}.dataset.points)")
    append(live, "metrics", {**row, "step": 5, "outcome": 0.125})
    clocked.page.clock.fast_forward(2500)
    clocked.until("() => window.proximo.charts['all:outcome'].lines[0].y.at(-1) === 0.125")
    assert clocked.page.evaluate(f"() => Number({last}.dataset.points)") == before
    clocked.page.evaluate(f"() => {last}.scrollIntoView()")
    clocked.until(f"() => Number({last}.dataset.points) === {before + 1}")


def test_a_run_that_was_opened_early_gets_its_links(clocked, runs, tmp_path):
    live = write_run(tmp_path / "live", state="running")
    clocked.page.goto(clocked.serve(tmp_path).address(tab="events"))
    clocked.until("() => document.querySelector('.findings')?.innerText.includes('No steps yet')")
    shutil.copytree(runs / "grpo" / "rollouts", live / "rollouts")
    finding = {"step": 1, "kind": "finding", "rule": "a-rule", "severity": "failing", "message": "m", "show": "dead"}
    append(live, "events", finding)
    until(lambda: clocked.page.clock.fast_forward(2500) or clocked.page.locator(".findings a").count())
    assert clocked.page.locator(".findings a").get_attribute("href") == "#run=live&step=1&show=dead"


def test_an_address_that_means_nothing_or_names_no_run_is_shown_as_far_as_it_goes(window, page):
    opened(window, page, "outcome", run="grpo", tab="constructor", x="toString")
    window.page.evaluate("() => { location.hash = 'step=1' }")
    window.until("() => document.querySelector('.reader .jump')?.value === '1'")


def tick(window: Window) -> None:
    """Until the page has asked once more."""
    count = len(window.requests)
    window.page.clock.fast_forward(2500)
    window.until("() => true")
    while len(window.requests) == count:
        window.page.wait_for_timeout(20)
    window.page.wait_for_load_state("networkidle")


def test_nothing_is_asked_about_runs_that_have_ended_nor_while_nobody_looks(clocked, page, tmp_path):
    clocked.page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.isHidden === true })")
    opened(clocked, page, "outcome", run="grpo")
    clocked.page.wait_for_load_state("networkidle")
    before = len(clocked.requests)
    for _ in range(5):
        tick_quietly(clocked)
    later = clocked.requests[before:]
    assert later
    assert {url.rpartition("/")[2] for url in later} == {"runs?"}  # there may be a new one
    clocked.page.evaluate("() => { window.isHidden = true; }")
    before = len(clocked.requests)
    for _ in range(8):
        tick_quietly(clocked)
    assert clocked.requests[before:] == []


def tick_quietly(window: Window) -> None:
    window.page.clock.fast_forward(3000)
    window.page.wait_for_timeout(30)
    window.page.wait_for_load_state("networkidle")


# Runs of other kinds


HOSTILE = "<img src=x onerror=window.hacked=1>"


def test_names_and_messages_are_text(window, tmp_path):
    message = f"{HOSTILE}\u202egnp.exe\x1b[31m\x00" + "x" * 5000
    event = {"step": 0, "attempt": 1, "kind": HOSTILE, "message": message}
    finding = {**event, "kind": "finding", "rule": HOSTILE, "severity": "warning", "remedy": HOSTILE, "show": "dead"}
    metrics = [{"step": 0, "outcome": 0.5, "reward": 0.5, f"rewards/{HOSTILE}": 1.0, "rewards/b": 2.0, HOSTILE: 3.0}]
    write_run(tmp_path / HOSTILE.replace("/", ""), metrics, events=[event, finding])
    write_run(tmp_path / "'\"><script>hacked=1", metrics)
    page = window.serve(tmp_path)
    opened(window, page, "outcome")
    for box in window.page.locator("#runs input[type=checkbox]").all():
        box.check()
    window.until("() => window.proximo.charts.outcome.lines.length === 2")
    for key in "123456":
        window.page.keyboard.press(key)
        window.page.wait_for_timeout(50)
    window.page.click("[data-tab=events]")
    window.page.wait_for_selector(".findings article")
    text = window.page.inner_text("main")
    assert text.count(HOSTILE) >= 4
    assert "gnp.exe" in text
    assert not set(text) & set("\u202e\x1b\x00")
    counts = window.page.evaluate("() => [window.hacked, document.images.length, document.scripts.length]")
    assert counts == [None, 0, 1]
    assert window.page.locator(".findings a").count() == 0  # there are no rollouts to show


def test_long_names_that_differ_in_the_middle_are_told_apart_and_fit(window, tmp_path):
    names = [f"{'x' * 120}{place}{'y' * 120}" for place in (1, 2)]
    for name in names:
        write_run(tmp_path / name, [{"step": step, "outcome": 0.5} for step in range(3)])
    page = window.serve(tmp_path)
    window.page.goto(page.address() + "".join(f"&run={name}" for name in names))
    window.until("() => document.querySelectorAll('.figures tbody tr').length === 2")
    for place in (".figures th[scope=row]", "#runs .name", ".legend .entry bdi", ".lead bdi"):
        shown = window.page.locator(place).all_inner_texts()[:2]
        assert {next(letter for letter in text if letter.isdigit()) for text in shown} == {"1", "2"}, place
    for tab in ("overview", "config"):
        window.page.click(f"#tabs [data-tab={tab}]")
        window.until("tab => document.body.dataset.tab === tab && document.getElementById('main').innerText", tab)
        assert window.page.evaluate(
            "() => { const m = document.querySelector('main'); return m.scrollWidth <= m.clientWidth; }"
        )


def test_a_report_of_a_run_with_a_long_name_fits_a_phone(window, tmp_path):
    run = write_run(tmp_path / ("n" * 240), [{"step": step, "outcome": 0.5} for step in range(3)])
    append(run, "metrics", {"step": -1})  # a finding, which says where to look
    page = tmp_path / "report.html"
    page.write_text(render(gather(RunFolder(run))))
    window.page.set_viewport_size(PHONE)
    window.page.goto(page.as_uri())
    assert "n" * 240 in window.page.inner_text("code >> nth=0")
    assert window.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]


def test_numbers_of_other_stages_are_drawn_as_they_are(window, tmp_path):
    trained = [{"step": step, "loss": 2.0 - step, "gradient_norm": 1.0} for step in range(3)]
    run = write_run(tmp_path / "sft", [*trained, {"step": 3, "held_out/loss": 0.5}], state="finished")
    (run / "config.toml").write_text("[fit]\nepochs = 1.0\n")
    page = window.serve(tmp_path)
    charts = opened(window, page, "all:loss")
    assert "sft" in (about := window.page.inner_text("li.run .about"))
    assert "None" not in about
    assert window.page.inner_text("li.run .last") == "loss 0.5"
    assert window.page.locator("#tabs button").all_inner_texts() == [
        "Overview",
        "Events",
        "Config",
        "All numbers",
    ]
    assert "rollouts" not in window.page.inner_text(".hint")
    assert drawn(charts["all:loss"], "sft", "training") == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert drawn(charts["all:loss"], "sft", "held out") == [(3, 0.5)]
    assert set(charts) == {"all:loss", "all:gradient norm".replace(" ", "_")}


def test_the_step_whose_weights_a_stage_keeps_is_marked(window, tmp_path):
    """By the metric that decides: so far while it runs, then as its result says."""
    held = [(0, 0.9, 0.5), (2, 0.5, 0.6), (4, 0.6, 0.8), (6, 0.5, 0.8)]
    rows = [{"step": step, "held_out/loss": loss, "held_out/accuracy": pairs} for step, loss, pairs in held]
    config = '[loss]\nbeta = 0.1\ntype = "Dpo"\n[fit]\nepochs = 1.0\n'
    for name, metric, best in (("by-loss", "", None), ("by-pairs", 'metric = "accuracy"\n', None), ("done", "", 6)):
        run = write_run(tmp_path / name, rows, state="running" if best is None else "finished")
        (run / "config.toml").write_text(config + metric)
        if best is not None:
            (run / "result.json").write_text(f'{{"best_step": {best}}}')
    page = window.serve(tmp_path)
    for name, loss, pairs in (("by-loss", [2], []), ("by-pairs", [], [4]), ("done", [6], [])):
        window.page.goto(page.address(run=name))
        window.until("name => (window.proximo.charts['all:loss']?.lines ?? []).some((line) => line.run === name)", name)
        charts = window.charts()
        assert (charts["all:loss"]["marks"], charts["all:accuracy"]["marks"]) == (loss, pairs), name
        marked = window.page.inner_text(f"[data-chart='all:{'loss' if loss else 'accuracy'}']")
        assert "▲ the step whose weights are kept" in marked
        assert window.page.locator(".plot .note", has_text="▲").count() == 1


def test_a_dpo_run_is_judged_by_its_pairs(window, tmp_path):
    """From its first evaluation on, before any step: no empty chart of greedy answers."""
    first = {"step": 0, "held_out/loss": 0.69, "held_out/accuracy": 0.5}
    run = write_run(tmp_path / "dpo", [first], state="running")
    (run / "config.toml").write_text("[loss]\nbeta = 0.1\n[fit]\nepochs = 1.0\n")
    page = window.serve(tmp_path)
    charts = opened(window, page, "all:accuracy")
    assert "held_out" not in charts
    assert "accuracy of pairs" in window.page.inner_text("[data-chart='all:accuracy']")


def test_pairs_that_are_ties_before_the_first_update_are_not_drawn_as_wrong(window, tmp_path):
    rows = [
        {"step": step, "held_out/loss": 0.69, "held_out/accuracy": step / 4, "held_out/margin": step / 8}
        for step in range(3)
    ]
    run = write_run(tmp_path / "dpo", rows, state="finished")
    (run / "config.toml").write_text("[loss]\nbeta = 0.1\n[fit]\nepochs = 1.0\n")
    charts = opened(window, window.serve(tmp_path), "all:accuracy")
    assert drawn(charts["all:accuracy"], "dpo", "held out") == [(1, 0.25), (2, 0.5)]
    caption = window.page.inner_text("[data-chart='all:loss']")
    assert "of pairs 0.693 is chance" in caption


def test_a_run_that_is_not_there_is_named(window, tmp_path):
    write_run(tmp_path / "a", [{"step": 1, "outcome": 0.5}], state="finished")
    window.page.goto(window.serve(tmp_path).address(run="elsewhere"))
    window.until("() => document.getElementById('notice').innerText.includes('No run is called elsewhere')")


def test_of_ten_thousand_steps_the_spikes_stay(window, tmp_path):
    metrics = [{"step": step, "outcome": 0.5 + (step == 7777) / 4 - (step == 3333) / 4} for step in range(10_000)]
    write_run(tmp_path / "long", metrics, state="finished")
    page = window.serve(tmp_path)
    points = drawn(opened(window, page, "outcome")["outcome"], "long")
    assert len(points) <= 2000
    assert (7777, 0.75) in points
    assert (3333, 0.25) in points
    assert points[-1][0] == 9999
    assert [x for x, _ in points] == sorted({x for x, _ in points})


ODD = {
    "one": [1.0],
    "constant": [3.0, 3.0],
    "rounding": [1.0, 1.0000000000000002],
    "huge": [1e99, -1e99],
    "tiny": [1e-320, 2e-320],
    "beyond": [1e308, -1e308, 1.0],
    "missing": [None, 2.0, None],
    "words": ["2.0", True, 5.0],
}


def test_numbers_of_any_size_are_drawn(window, tmp_path):
    metrics = [{"step": step, "outcome": values[0]} for step, values in enumerate(ODD.values())]
    for name, values in ODD.items():
        for step, value in enumerate(values):
            metrics[step][name] = value
    run = write_run(tmp_path / "odd", metrics)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1e300, "one": 2}\n{"step": 0.5, "one": 2}\n{"step": 9, "one": 1e999}\n')
    charts = opened(window, window.serve(tmp_path), "all:one", tab="all")
    shown = {name: [y for _, y in drawn(charts[f"all:{name}"], "odd")] for name in ODD}
    expected = {"beyond": [1.0], "missing": [2.0], "words": [5.0]}
    assert shown == {name: expected.get(name, values) for name, values in ODD.items()}
    window.page.keyboard.press("1")
    window.until("() => 'outcome' in window.proximo.charts")


def test_a_server_that_has_gone_leaves_the_charts(clocked, page, runs, tmp_path):
    opened(clocked, page, "outcome", run="grpo")
    gone = [True]  # one route for both: taking it away while a request is on its way can leave that without an answer
    clocked.page.route("**/api/**", lambda route: route.abort() if gone else route.continue_())
    until(lambda: clocked.page.clock.fast_forward(11_000) or "still running" in clocked.page.inner_text("#notice"))
    assert "outcome" in clocked.charts()
    gone.clear()
    until(lambda: clocked.page.clock.fast_forward(11_000) or clocked.page.inner_text("#notice") == "")
    clocked.errors.clear()  # the browser says that it could not connect


def test_a_request_without_an_answer_is_given_up_and_made_again(clocked, page, runs, tmp_path):
    """As on a connection that was lost without a word."""
    clocked.page.add_init_script(
        "const timeout = AbortSignal.timeout; AbortSignal.timeout = () => timeout.call(AbortSignal, 2000)"
    )
    opened(clocked, page, "outcome", run="grpo")
    lost = [True]
    clocked.page.route("**/api/**", lambda route: None if lost else route.continue_())
    until(lambda: clocked.page.clock.fast_forward(11_000) or "still running" in clocked.page.inner_text("#notice"))
    lost.clear()
    until(lambda: clocked.page.clock.fast_forward(11_000) or clocked.page.inner_text("#notice") == "")


def test_a_folder_without_runs_says_how_to_start_one(clocked, tmp_path):
    page = clocked.serve(tmp_path)
    clocked.page.goto(page.address())
    clocked.until("() => document.getElementById('main').innerText.includes('proximo train')")
    write_run(tmp_path / "new", [{"step": 0, "outcome": 1.0}])
    until(lambda: clocked.page.clock.fast_forward(5000) or "outcome" in clocked.charts())
