"""The page as a folder of files: it opens from disk, runs nothing of what models wrote, and requests nothing else."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from proximo.algorithms import GRPO
from proximo.cli import main
from proximo.insight.folder import RunFolder
from proximo.insight.page import reader
from proximo.insight.page.bundle.answers import of_step
from proximo.insight.page.bundle.writing import evenly, write_bundle
from proximo.insight.page.scripts import one_script
from tests.insight.page.browser import PHONE, VIEWPORT, write_run
from tests.insight.test_turns import PIECES, TURNS
from tests.stored import Asked, Said, store

EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
NAME = "<img src=x onerror=alert(3)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    said = [Said([EVIL, " -->", "\u2028"], 1.0, parts={EVIL: 1.0}), Said(PIECES, 0.0, turns=TURNS)]
    for step in (1, 2, 3):
        store(folder / NAME, GRPO, [Asked(said, prompt=EVIL, answer=EVIL, problem=EVIL)], step=step)
    write_run(folder / "plain", [{"step": 1, "outcome": 0.5}], events=[{"step": 1, "kind": EVIL, "message": EVIL}])
    return folder


def test_modules_become_one_script_in_which_each_runs_once_after_what_it_imports():
    modules = {
        "/a/app.js": 'import { two as zwei } from "./b/b.js";\nimport Three from "../c.js";\nexport const x = zwei;\n',
        "/a/b/b.js": 'import { one } from "../../d.js";\nexport async function two() {}\nexport class K {}\n',
        "/c.js": 'import { one } from "./d.js";\nconst three = 3;\nexport { three as default };\n',
        "/d.js": "export const one = 1;\n/*\nexport function none() {}\n*/\n",
    }
    script = one_script(modules, "/a/app.js")
    assert re.findall(r"^modules\['(.*)'\] =", script, re.MULTILINE) == ["/d.js", "/a/b/b.js", "/c.js", "/a/app.js"]
    assert "const { two: zwei } = modules['/a/b/b.js'];" in script
    assert "const Three = modules['/c.js'].default;" in script
    assert "return { two, K };" in script
    assert "return { default: three };" in script
    with pytest.raises(AssertionError, match=r"import each other: x\.js -> y\.js -> x\.js"):
        one_script({"x.js": 'import { y } from "./y.js";', "y.js": 'import { x } from "./x.js";'}, "x.js")


def test_some_steps_are_chosen_evenly():
    assert evenly(list(range(1, 101))) == [1, 15, 29, 43, 58, 72, 86, 100]
    assert evenly([3, 7]) == [3, 7]
    assert evenly([3]) == [3]
    assert evenly([]) == []


def test_a_bundle_says_of_a_token_what_the_server_says(root):
    run = RunFolder(root / NAME)
    told = of_step(run, 2, "gspo")["why"]
    for row, token in ((0, 1), (1, 0), (1, 4)):
        asked = {"step": "2", "as": "gspo", "row": str(row), "token": str(token)}
        words, turn, own = (told["sentences"][place] for place in told["rows"][row][token])
        assert {"words": words, "own": own, **({"turn": turn} if turn else {})} == reader.why(run, asked)


def test_a_bundle_is_whole_or_not_there(root, tmp_path):
    def fails(steps: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_bundle(out, [root], fails)
    assert not list(tmp_path.iterdir())
    out.mkdir()  # an empty one may be there
    write_bundle(out, [root], lambda _: [])
    assert (out / "index.html").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "x"], "--steps x: give all, or numbers and ranges"),
        (["--steps", "5-2"], "--steps 5-2: give all"),
        (["--port", "1", "--fast"], "takes no --fast"),
        (["nowhere"], "there is no folder nowhere"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(SystemExit):
        main(["view", "--static", "out", *arguments])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bundle_opens_from_disk_and_hostile_texts_run_nothing(window, root, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["view", "--static", str(out), str(root), "--steps", "1,3"]) == 0
    assert "2 runs, rollouts of 2 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["view", "--static", str(out), str(root)])
    assert "not empty" in capsys.readouterr().err
    dialogs: list[str] = []
    page = window.page
    window.listen("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto((out / "index.html").as_uri())
    window.until("() => document.querySelectorAll('#runs .run').length === 2")
    for width in (1280, 1181, 1024, 800):
        page.set_viewport_size({"width": width, "height": 800})
        cut = "() => [...document.querySelector('.top').children].map((each) => each.getBoundingClientRect().right)"
        assert max(page.evaluate(cut)) <= width
    page.set_viewport_size(PHONE)
    page.click(".copy summary")
    assert page.locator(".copy > div").bounding_box()["x"] >= 0
    assert page.evaluate("() => document.querySelector('.copy > div').getBoundingClientRect().right") <= PHONE["width"]
    page.click(".copy summary")
    page.set_viewport_size(VIEWPORT)
    assert "rollouts of 2 of 3 steps: 1, 3" in page.locator(".copy ul").text_content()
    address = f"run={json.dumps(NAME)[1:-1]}".replace(" ", "%20").replace("<", "%3C").replace("=x", "%3Dx")

    def opened(rest: str) -> None:
        page.evaluate("hash => { location.hash = hash }", f"{address}&{rest}")
        window.until("() => document.querySelector('.reader')?.dataset.shown === location.hash")

    opened("step=3&group=0&row=0&token=0&as=dapo")
    assert EVIL in page.inner_text(".sibling:first-child .text")
    assert page.locator(".turn").count() == 3
    window.until("() => document.querySelector('.card .words')?.textContent.length > 5")
    window.until("() => document.querySelectorAll('.time').length === 2")
    opened("step=2")
    assert "step 2 is not in this copy, which has steps 1, 3" in page.inner_text("[role=alert]")
    opened("step=1&find=ADD(1, 2&all=1")
    window.until("() => document.querySelectorAll('.found li').length === 2")
    page.evaluate("hash => { location.hash = hash }", "run=plain&tab=events")
    window.until("() => document.body.dataset.tab === 'events' && document.querySelector('main').innerText.length > 20")
    assert page.locator("img, iframe, body script").count() == 0
    assert dialogs == []
    assert window.requests
    assert all(url.startswith((out.as_uri(), "blob:")) for url in window.requests)
