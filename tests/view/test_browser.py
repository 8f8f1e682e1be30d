"""The live page in a real browser: a run is watched while it trains.

It needs Playwright for Python and the system's Chromium: `make test-browser` installs the first, and its first lines
say how to get the second. With AGENTRIG_SCREENSHOTS=DIR it writes a picture of every view there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrig.run.directory import RunDirectory
from agentrig.testing.run_directory import write_run
from agentrig.view import build_report, figures
from agentrig.view.reading import read_run, rollout_rows
from agentrig.view.watch.app import serving

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser")
axe = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed: make test-browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")

NAMELESS = """() => [...document.querySelectorAll('a, button, input:not([type=hidden]), select')].filter(e => {
  const label = e.labels && [...e.labels].map(l => l.textContent).join('');
  return !(e.getAttribute('aria-label') || label || e.textContent.trim() || e.title);
}).map(e => e.outerHTML)"""
"""Controls that a screen reader has no name for."""

LONG_NAME = "mini-sql-rft-then-grpo-with-a-learning-rate-of-1e-3-seed-0"

WIDE = "() => Math.max(0, document.documentElement.scrollWidth - window.innerWidth)"

BROKEN_RULES = """async () => {
  // A table's shadows are images, on which no contrast is measured.
  document.querySelectorAll('.scroll').forEach(e => e.style.background = 'none');
  // A step of a trace folds by its heading, and the link in it leads to what was said: Tab reaches both.
  const rules = {'nested-interactive': {enabled: false}};
  const result = await axe.run({rules, resultTypes: ['violations']});
  return result.violations.map(rule => [rule.id, rule.nodes.map(node => node.failureSummary + ' ' + node.html)]);
}"""
"""The rules of axe-core that a page breaks: contrast, names, headings, landmarks, …"""

CLIPPED = """() => [...document.querySelectorAll('.scroll:not(:has(.heat)), .tree, .scores')].filter(
  e => e.checkVisibility() && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)
).map(e => e.innerText.slice(0, 200))"""
"""Lists and tables whose end is out of sight."""

SMALL = """() => [...document.querySelectorAll('a:not(.skip), button, select, summary, input:not([type=checkbox])')]
  .filter(e => !e.closest('p, h3, details:not([open]) > :not(summary)') && e.offsetParent)
  .map(e => [e.getBoundingClientRect().height, e.outerHTML.slice(0, 120)]).filter(([height, _]) => height < 24)"""
"""Links and controls less than 24 px high; those in a sentence may be."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def picture(page: Any, name: str) -> None:
    """Write a picture of the whole page, if somebody asked for them."""
    if folder := os.environ.get("AGENTRIG_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def filled(page: Any) -> None:
    """Wait until the server has read what the page shows."""
    playwright.expect(page.locator("[data-part][data-empty], .reading")).to_have_count(0)


def faults(page: Any) -> list[Any]:
    """Return what is wrong with the open page: too wide, cut, too small, or a rule of axe-core that it breaks."""
    found = [found for what in (WIDE, CLIPPED, SMALL, TINY, UNEVEN, NAMELESS) if (found := page.evaluate(what))]
    page.evaluate(axe.AXE_SCRIPT)
    return found + page.evaluate(BROKEN_RULES)


@pytest.fixture(scope="module")
def mini_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with calls that were dropped, failed rollouts and tasks before and after, as a training writes it."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["algorithm.steps=2", "algorithm.tasks_per_step=8", "run.validation_tasks=8", "run.report_tasks=16"]
    subprocess.run(
        [sys.executable, "-m", "agentrig", "train", "mini", f"run.directory={folder}", "run.name=mini", *words],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, timeout=300,
    )  # fmt: skip
    return folder / "mini"


@pytest.fixture(scope="module")
def compared_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight runs, more than there are colours: seven that differ only in their seed, and one with a long name."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [write_run(folder / f"seed-{seed}", steps=6 + seed % 2, seed=seed) for seed in range(7)]
    long = folder / LONG_NAME
    return [*runs, write_run(long, steps=6, lr=1e-3, second_reward="spider-exec-strict")]


@contextlib.contextmanager
def watched_run(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a training with `--watch`; yields its process and the page's link."""
    words = [
        "train", "mini", "--watch", "--json", f"run.directory={folder}", "run.name=watched", "runners.n=1",
        "algorithm.steps=5", "algorithm.tasks_per_step=6", "algorithm.group_size=4", "run.validation_tasks=6",
        "run.report_tasks=8", 'run.block=["report"]',
    ]  # fmt: skip
    run = subprocess.Popen(
        [sys.executable, "-m", "agentrig", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=folder,
    )
    assert run.stderr is not None
    try:
        found = next(filter(None, (re.search(r"watching .*: (http\S+)", line) for line in run.stderr)))
        yield run, found[1]
    finally:
        run.terminate()
        run.communicate(timeout=60)


def test_a_run_is_watched_from_its_start_to_its_end(browser: Any, tmp_path: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(120_000)  # other tests run at the same time
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    with watched_run(tmp_path) as (run, link):
        page.goto(link)
        page.get_by_role("link", name="watched").click(timeout=240_000)  # the run has to start
        page.wait_for_selector(".live:not(.off)")
        seen = []
        for step in (1, 2, 3):  # they arrive without a reload
            page.wait_for_function(
                "n => Number(document.querySelector('.tiles dd')?.firstChild.textContent) >= n",
                arg=step,
                timeout=240_000,
            )
            seen.append(page.locator(".tiles dd").first.inner_text())
        assert page.locator("figure svg").count() >= 4
        assert run.wait(timeout=240) == 0

    # The server that came with the run has ended with it; another one shows the run that is there.
    assert all("net::ERR_" in text for text in wrong), "only that the server has gone"
    page.goto("about:blank")
    wrong.clear()
    command = [sys.executable, "-m", "agentrig", "watch", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        found = re.search(r"(http\S+)", server.stdout.readline())
        assert found is not None
        page.goto(found[1] + "run/watched/traces")
        page.locator(".score").first.click()
        page.wait_for_selector(".trace")
        assert page.get_by_text("Never shown to the agent").count() == 1
        assert page.locator(".tokens i[title^=p]").count() > 0
        first = page.url
        page.keyboard.press("j")
        page.wait_for_function("before => location.href !== before", arg=first)
        page.keyboard.press("k")
        page.wait_for_function("before => location.href === before", arg=first)
        page.get_by_role("button", name="compare").click()
        page.wait_for_selector("table.diff")
        shared = page.url
        other = context.new_page()
        other.goto(shared)  # a link is all that somebody at this machine needs
        assert other.locator("table.diff tr").count() == page.locator("table.diff tr").count()
        page.reload()
        assert page.locator("table.diff").count() == 1
        for path in ("", "run/watched", "run/watched/traces", shared.removeprefix(found[1])):
            page.goto(found[1] + path)
            assert page.locator("h1").count() == 1
            assert page.locator("main").count() == 1
            assert page.evaluate(NAMELESS) == []
            for width in (390, 768, 2560):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate(WIDE) <= 0, f"{path} at {width} px is wider than the window"
        page.set_viewport_size({"width": 1280, "height": 900})
        dark = browser.new_context(color_scheme="dark").new_page()
        dark.goto(found[1] + "run/watched")
        colors = [each.evaluate("getComputedStyle(document.body).backgroundColor") for each in (page, dark)]
        assert colors[0] != colors[1]
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
    finally:
        server.terminate()
        server.communicate(timeout=20)
    assert wrong == []
    context.close()


@pytest.fixture(scope="module")
def all_runs(mini_run: Path, compared_runs: list[Path]) -> Path:
    """A folder with a run that was trained, eight to compare, and one each that stopped, crashed and has just begun."""
    folder = compared_runs[0].parent
    shutil.copytree(mini_run, folder / "mini", symlinks=True)
    write_run(folder / "stopped", steps=3, ended=False)
    RunDirectory(folder / "stopped").write_json("error.json", {"error": "RunStopped", "message": "step 3: no triplets"})
    write_run(folder / "crashed", steps=3, ended=False)
    write_run(folder / "begun", steps=0, ended=False)
    return folder


def views(page: Any, link: str) -> dict[str, str]:
    """Return the addresses of the views of `all_runs`."""
    mini, long, begun = (f"{link}run/{name}" for name in ("mini", LONG_NAME, "begun"))
    page.goto(f"{mini}/traces")
    page.locator(".score").first.click()
    page.wait_for_selector(".trace")
    rollout = page.url
    page.get_by_role("button", name="compare").click()
    page.wait_for_selector("table.diff")
    compared = f"{link}compare?" + "&".join(f"run={name}" for name in (LONG_NAME, *(f"seed-{i}" for i in range(7))))
    return {
        "runs": link, "runs-found": f"{link}?text=seed&sort=gain", "runs-none": f"{link}?text=nothing",
        "run": mini, "run-long": long, "run-stopped": f"{link}run/stopped", "run-crashed": f"{link}run/crashed",
        "run-begun": begun, "run-chosen": f"{mini}?x=time&from=1&metric=algorithm/loss&metric=step_s",
        "why": f"{mini}/why", "checks": f"{mini}/checks",
        "before-and-after": f"{mini}/examples", "before-and-after-long": f"{long}/examples",
        "before-and-after-begun": f"{begun}/examples",
        "traces": f"{mini}/traces", "traces-found": f"{mini}/traces?score=wrong",
        "traces-none": f"{mini}/traces?text=nothing+like+it", "traces-begun": f"{begun}/traces",
        "rewards": f"{mini}/rewards?mode=train", "heat-map": f"{long}/rewards?mode=train",
        "rewards-begun": f"{begun}/rewards", "rollout": rollout, "two": page.url,
        "compare": compared, "compare-each": f"{compared}&each=1", "compare-two": f"{link}compare?run=stopped&run=mini",
        "missing": f"{link}run/nobody",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_every_view_fits_and_can_be_read(browser: Any, all_runs: Path, width: int, scheme: str) -> None:
    wrong: list[tuple[str, Any]] = []
    with serving(all_runs) as link:
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        for name, address in views(page, link).items():
            page.goto(address)
            filled(page)
            picture(page, f"{name}-{width}-{scheme}")
            wrong += [(name, found) for found in faults(page)]
        page.context.close()
    assert wrong == []


TINY = """() => [...document.querySelectorAll('figure svg[role=img] text')].filter(e => e.checkVisibility())
  .map(e => [parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.clientWidth / 620, e.textContent])
  .filter(([size, _]) => size < 11)"""
"""Words and numbers in a drawing that are less than 11 px high."""

UNEVEN = """() => {
  const controls = [...document.querySelectorAll('form.filter :is(button, select, input:not([type=checkbox]))')];
  const heights = new Set(controls.filter(e => e.checkVisibility()).map(e => e.offsetHeight));
  return heights.size > 1 ? [...heights] : [];
}"""
"""Heights of the controls of a form, if they differ."""

TAB_STOPS = """() => {
  const closed = e => e.closest('details:not([open]) > :not(summary)');
  const controls = 'a[href], button, select, textarea, summary, input:not([type=hidden]), [tabindex="0"]';
  return [...document.querySelectorAll(controls)].filter(
    e => e.tabIndex >= 0 && e.checkVisibility() && !closed(e)).length;
}"""
"""How many controls the Tab key should reach."""

FOCUSED = """() => {
  const e = document.activeElement, box = e.getBoundingClientRect();
  if (e === document.body) return null;
  const inside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  const place = [...document.querySelectorAll('*')].indexOf(e);
  return [place, inside && getComputedStyle(e).outlineStyle !== 'none', e.outerHTML.slice(0, 150)];
}"""
"""Which element has the keyboard, and whether that can be seen."""


def test_the_keyboard_reaches_every_control_of_every_view_and_shows_where_it_is(browser: Any, all_runs: Path) -> None:
    wrong: list[tuple[str, Any]] = []
    with serving(all_runs) as link:
        page = browser.new_context(viewport={"width": 1024, "height": 900}).new_page()
        for name, address in views(page, link).items():
            if name.startswith("traces-") or name.endswith("-long"):
                continue  # the same controls as in another view
            page.goto(address)
            filled(page)
            reached = {}
            for _ in range(page.evaluate(TAB_STOPS)):
                page.keyboard.press("Tab")
                if (focused := page.evaluate(FOCUSED)) is None:
                    break
                reached[focused[0]] = focused
            wrong += [(name, said) for _, seen, said in reached.values() if not seen]
            if len(reached) != page.evaluate(TAB_STOPS):
                wrong.append((name, f"{len(reached)} of {page.evaluate(TAB_STOPS)} controls were reached"))
        page.context.close()
    assert wrong == []


@pytest.mark.parametrize("names", [["mini"], ["mini", "seed-0", LONG_NAME]], ids=len)
def test_a_report_fits_and_can_be_read(browser: Any, all_runs: Path, tmp_path: Path, names: list[str]) -> None:
    path = build_report([all_runs / name for name in names], tmp_path / "report.html")
    for width, scheme in itertools.product((390, 1024, 1440), ("light", "dark")):
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.goto(path.as_uri())
        picture(page, f"report-{len(names)}-{width}-{scheme}")
        assert faults(page) == [], (width, scheme)
        page.context.close()


def test_a_verdict_that_names_a_long_folder_fits(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = f"Train for more steps: agentrig train --resume {'/a-long-folder' * 9}"
    monkeypatch.setattr("agentrig.view.page.verdict", lambda found: advice)
    page = browser.new_context(viewport={"width": 390, "height": 900}).new_page()
    page.goto(build_report([write_run(tmp_path / "run", steps=3)]).as_uri())
    assert page.locator(".why p").inner_text() == advice
    assert faults(page) == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_comparison_fits_and_each_curve_is_named(
    browser: Any, compared_runs: list[Path], width: int, scheme: str
) -> None:
    with serving(compared_runs[0].parent) as link:
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.goto(f"{link}compare?{'&'.join(f'run={run.name}' for run in compared_runs)}")
        cells = page.locator("table.stacked").first
        playwright.expect(cells.locator("tbody tr")).to_have_count(2)
        assert "seeds 0, 1, 2, 3, 4, 5, 6" in cells.inner_text()
        for figure in page.locator(".plots").first.locator("figure").all():
            box = figure.locator("svg[role=img]").bounding_box()
            assert figure.locator(".legend").bounding_box()["y"] < box["y"], "the legend is above the curves"
            numbers = figure.locator("svg .tag")
            named = figure.locator(".legend li:has(b)").all_inner_texts()
            assert sorted(numbers.all_text_contents()) == [str(i) for i in range(1, 9)]
            assert [text.split()[:2] for text in named] == [["1–7", "seed-0,"], ["8", LONG_NAME]]
            for number in numbers.all():  # `overflow: visible` would show it over what is beside the drawing
                at = number.bounding_box()
                assert at["x"] + at["width"] <= box["x"] + box["width"] + 1
        # on a phone a value stands below or behind the name of its run, and is never cut off
        hidden = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
        if width == 390:
            assert page.locator(".scroll:has(.cards)").evaluate_all(hidden) == 0
        page.get_by_role("link", name="a line for each run").click()
        playwright.expect(page.locator("table.stacked").first.locator("tbody tr")).to_have_count(8)
        page.get_by_label("x axis").select_option("time")
        page.wait_for_url(re.compile("each=1.*x=time"))
        page.context.close()


def lines_of(page: Any, chosen: str) -> list[int]:
    """Return on which line of its parent each element begins: 0 for the first."""
    middles = page.locator(chosen).evaluate_all(
        "es => es.filter(e => e.offsetParent).map(e => e.getBoundingClientRect()).map(b => (b.top + b.bottom) / 2)"
    )
    found = [0]
    for before, after in itertools.pairwise(middles):
        found.append(found[-1] + (after > before + 8))
    return found


FIRST_LINES = """row => [...row.cells].filter(cell => cell.checkVisibility() && cell.innerText.trim()).map(cell => {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT, node => node.data.trim() ? 1 : 2);
  const line = new Range();
  line.selectNodeContents(texts.nextNode());
  return line.getClientRects()[0].bottom;
})"""
"""Where the first line of text of each cell of a row ends."""


def test_what_belongs_together_is_on_one_line(browser: Any, tmp_path: Path) -> None:
    for name in (LONG_NAME, "mini-20261126-161302"):
        write_run(tmp_path / name, steps=2)
    with serving(tmp_path) as link:
        page = browser.new_context(viewport={"width": 1024, "height": 900}).new_page()
        page.goto(f"{link}run/{LONG_NAME}/traces")
        playwright.expect(page.locator(".live")).to_have_text("ended")
        assert lines_of(page, ".tools > :not(dialog)") == [0, 0, 0]
        page.goto(link)
        row = page.locator(".runs tbody tr", has_text=LONG_NAME)
        box, text = (row.locator(part).bounding_box() for part in ("input", "th a"))
        assert text["height"] == 48, "the name has two lines"
        assert abs(box["y"] + box["height"] / 2 - text["y"] - 12) < 4
        ends = row.evaluate(FIRST_LINES)
        assert max(ends) - min(ends) < 2, "every cell begins at the first line of the name"
        page.set_viewport_size({"width": 390, "height": 900})
        page.goto(f"{link}run/mini-20261126-161302/traces")
        playwright.expect(page.locator(".live")).to_have_text("ended")
        assert lines_of(page, "nav.top > a, .tools > *")[-1] == 1, "the bar at the top has two lines"
        picture(page, "one-line-390")
        page.context.close()


def test_the_keys_are_shown_with_a_question_mark(browser: Any, mini_run: Path) -> None:
    with serving(mini_run.parent) as link:
        page = browser.new_context().new_page()
        page.goto(f"{link}run/{mini_run.name}/traces")
        keys = page.get_by_role("dialog")
        page.locator("input[name=text]").press("?")
        assert keys.count() == 0, "it is typed into the search"
        page.locator("h1").click()
        page.keyboard.press("?")
        assert keys.locator("kbd").all_inner_texts() == ["j", "k", "/", "← →", "Enter", "+ - 0", "?"]
        page.keyboard.press("j")
        assert page.url.endswith("/traces"), "the other keys wait until it is closed"
        page.keyboard.press("Escape")
        assert keys.count() == 0
        page.get_by_role("button", name="keys").click()
        assert keys.count() == 1
        page.context.close()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("long") / "long", steps=20)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if its script does."""
    opened, wrong = browser.new_context(viewport={"width": 1280, "height": 900}).new_page(), []
    opened.set_default_timeout(8_000)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.context.close()
    assert wrong == []


def chart(page: Any, name: str) -> Any:
    return page.locator("figure", has=page.get_by_role("heading", name=name, exact=True)).locator(".chart")


def place(chart: Any, step: int) -> tuple[float, float]:
    """Where a training step is on the screen, once nothing above the curve can grow any more."""
    filled(chart.page)
    chart.scroll_into_view_if_needed()
    found: list[float] = chart.evaluate(
        """(element, wanted) => {
          const points = JSON.parse(element.dataset.points).lines.flatMap(line => line.points);
          const [_, x, y] = points.find(([step]) => step === wanted);
          const box = element.querySelector('svg').getBoundingClientRect();
          return [box.left + x * box.width / 620, box.top + y * box.width / 620];
        }""",
        step,
    )
    return found[0], found[1]


STEPS = """([id, from, to]) => {
  const lines = JSON.parse(document.getElementById(`chart-${id}`).dataset.points).lines;
  const steps = lines.filter(line => line.mode === 'train')[0].points.map(([step]) => step);
  return steps[0] === from && steps.at(-1) === to && steps.length === to - from + 1;
}"""
"""Whether a curve has the training steps between two."""


def test_a_curve_shows_the_values_of_a_step_and_leads_to_its_traces(page: Any, long_run: Path) -> None:
    _, rewards = figures.series(read_run(long_run), "reward")
    with serving(long_run) as link:
        page.goto(link)
        curve = chart(page, "reward")
        said = page.locator("figure:has(#chart-reward) output")
        assert "drag to zoom" in said.evaluate("e => getComputedStyle(e, '::before').content")
        page.mouse.move(*place(curve, 7))
        playwright.expect(said).to_contain_text(f"step 7: training, each step {rewards[6]:.4g}, mean of up to 5 steps")
        caption = page.locator("figure:has(#chart-reward) figcaption").bounding_box()
        assert said.bounding_box()["y"] < caption["y"], "the values are right below their curve"
        page.mouse.click(*place(curve, 7))
        page.wait_for_url("**/traces?mode=train&step=7")
        playwright.expect(page.get_by_role("heading", name="Step 7, train")).to_be_visible()
        page.go_back()
        # by keyboard
        curve = chart(page, "response tokens")
        curve.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        playwright.expect(page.locator("figure:has(#chart-response-tokens) output")).to_contain_text("step 2:")
        page.keyboard.press("Enter")
        page.wait_for_url("**/traces?mode=train&step=2")


def test_a_curve_is_zoomed_by_dragging_and_by_keys_and_the_link_has_it(page: Any, long_run: Path) -> None:
    with serving(long_run) as link:
        page.goto(link)
        curve = chart(page, "reward")
        (x, y), (to, _) = place(curve, 5), place(curve, 12)
        page.mouse.move(x - 3, y)
        page.mouse.down()
        page.mouse.move(x + 30, y)
        page.mouse.move(to + 3, y)
        page.mouse.up()
        page.wait_for_url(re.compile(r"from=.*to="))
        for name in ("reward", "time"):
            page.wait_for_function(STEPS, arg=[name, 5, 12])
        page.reload()
        page.wait_for_function(STEPS, arg=["reward", 5, 12])
        page.go_back()
        page.wait_for_url(re.compile(r"run/long$"))
        page.wait_for_function(STEPS, arg=["reward", 1, 20])
        page.go_forward()
        page.wait_for_url(re.compile(r"from="))
        page.wait_for_function(STEPS, arg=["reward", 5, 12])
        page.mouse.dblclick(*place(chart(page, "reward"), 7))
        page.wait_for_url(lambda address: "from=" not in address)
        page.wait_for_function(STEPS, arg=["reward", 1, 20])
        assert "traces" not in page.url, "a double click is no click"
        page.mouse.move(0, 0)
        chart(page, "reward").focus()
        page.keyboard.press("+")
        page.wait_for_url(re.compile(r"from=.*to="))
        page.wait_for_function(STEPS, arg=["reward", 6, 15])
        assert page.evaluate("document.activeElement.id") == "chart-reward", "the keyboard stays in the curve"
        page.get_by_role("button", name="whole x axis").click()
        page.wait_for_function(STEPS, arg=["reward", 1, 20])


def test_the_x_axis_and_further_metrics_are_chosen_and_stay_while_the_run_goes_on(
    page: Any, long_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(long_run, tmp_path / "goes-on", symlinks=True)
    with serving(run) as link:
        page.goto(link)
        page.get_by_label("x axis").select_option("time")
        page.wait_for_url(re.compile("x=time"))
        page.get_by_label("draw another metric").select_option("algorithm/weight_change")
        page.wait_for_url(re.compile("metric=algorithm"))
        playwright.expect(page.locator("figure h3").first).to_have_text("algorithm/weight_change")
        drawn = chart(page, "algorithm/weight_change")
        assert re.search(r"\d (s|min|h)$", drawn.locator("text").nth(-2).text_content())
        lines = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(lines + lines.splitlines()[-1].replace('"step": 20', '"step": 21') + "\n")
        page.wait_for_function("() => Number(document.querySelector('.tiles dd').firstChild.textContent) === 21")
        page.wait_for_function(STEPS, arg=["algorithm/weight_change", 1, 21])
        # Its form is sent at once, and the box goes: `uncheck` would wait for its new state.
        page.get_by_role("checkbox", name="algorithm/weight_change").click()
        page.wait_for_url(lambda address: "metric=" not in address)
        playwright.expect(chart(page, "algorithm/weight_change")).to_have_count(0)


def test_a_cell_of_the_tasks_by_step_leads_to_its_rollouts(page: Any, long_run: Path) -> None:
    files = [file for file in read_run(long_run).files if file.mode == "train"]
    rows = list(rollout_rows(files))
    with serving(long_run) as link:
        page.goto(link)
        page.get_by_role("link", name="rewards").click()
        page.locator("select[name=mode]").select_option("train")
        page.get_by_role("button", name="show").click()
        playwright.expect(page.locator(".reading")).to_have_count(0)
        heads = page.locator(".heat thead a").all_inner_texts()
        assert heads == [str(step) for step in range(1, 21)]
        wrong = sum(row["value"] == 0 for row in rows if row["step"] <= 5)
        first = page.locator(".histogram tbody tr").first
        assert first.locator("th").inner_text() == "0"
        assert first.locator("a").first.inner_text() == str(wrong)
        page.locator(".heat thead a").first.focus()
        page.keyboard.press("ArrowDown")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        cell = page.locator(":focus")
        of = [row for row in rows if (row["task_id"], row["step"]) == (min(row["task_id"] for row in rows), 4)]
        scored = [row["value"] for row in of if not row["failure"]]
        assert cell.get_attribute("title") == f"step 4: mean {sum(scored) / len(scored):.3g}, {len(of)} rollout"
        page.keyboard.press("Enter")
        page.wait_for_url("**/traces?*")
        assert page.locator(".score").count() == len(of)
        assert page.locator("td.n").first.inner_text() == "4", "rollouts of that step"
        page.go_back()
        first.locator("a").first.click()
        playwright.expect(page.get_by_role("heading", name=f"{wrong} rollouts")).to_be_visible()


def test_a_run_gets_tags_and_a_note_and_is_found_by_them(page: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, steps=2)
    with serving(tmp_path) as link:
        page.goto(f"{link}run/one")
        page.get_by_text("tags and note", exact=True).click()
        page.get_by_label("tags, with commas between them").fill("kept, <i>odd</i>")
        page.get_by_label("note", exact=True).fill("The first try.")
        (tmp_path / "one" / "log.jsonl").write_text("{}\n")
        before = page.evaluate("document.documentElement.dataset.refreshed")
        page.wait_for_function("n => document.documentElement.dataset.refreshed !== n", arg=before)
        page.get_by_role("button", name="save").click()  # what was written is still there
        playwright.expect(page.locator("#note output")).to_have_text("saved")
        playwright.expect(page.locator(".notes .tags li")).to_have_text(["kept", "<i>odd</i>"])
        page.get_by_role("link", name="kept").click()
        playwright.expect(page.locator("table.runs tbody th > a")).to_have_text(["one"])
        playwright.expect(page.locator("table.runs")).to_contain_text("The first try.")
        page.locator("select[name=tag]").select_option("")
        page.get_by_role("button", name="show").click()
        page.get_by_role("link", name="Run", exact=True).click()
        playwright.expect(page.locator("table.runs tbody th > a")).to_have_text(["one", "two"])
        page.get_by_role("link", name="Run", exact=True).click()
        playwright.expect(page.locator("table.runs tbody th > a")).to_have_text(["two", "one"])


def test_the_list_has_new_tags_at_once_and_keeps_what_was_chosen(page: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, steps=2)
    with serving(tmp_path) as link:
        page.goto(link)
        page.get_by_role("checkbox", name="compare two").check()
        page.wait_for_selector(".live:not(.off)")
        other = page.context.new_page()
        other.goto(f"{link}run/one")
        other.get_by_text("tags and note", exact=True).click()
        other.get_by_label("tags, with commas between them").fill("kept")
        other.get_by_role("button", name="save").click()
        playwright.expect(page.locator("table.runs .tags li")).to_have_text(["kept"])
        playwright.expect(page.locator("select[name=tag] option")).to_have_text(["any", "kept"])
        assert page.get_by_role("checkbox", name="compare two").is_checked()
        other.get_by_label("tags, with commas between them").fill("")
        other.get_by_role("button", name="save").click()
        playwright.expect(page.locator("table.runs .tags li")).to_have_count(0)
        playwright.expect(page.locator("select[name=tag] option")).to_have_text(["any"])


def test_the_page_says_without_a_reload_that_the_run_has_ended(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=2, ended=False)
    run = RunDirectory(tmp_path / "one")
    run.lock()
    with serving(tmp_path) as link:
        page.goto(f"{link}run/one")
        playwright.expect(page.locator(".live")).to_have_text("live")
        run.write_json("error.json", {"error": "RunStopped", "message": "step 3: no triplets"})
        run.release()
        playwright.expect(page.locator(".live")).to_have_text("ended")
        playwright.expect(page.locator(".pill")).to_have_text("stopped by an error")
        (tmp_path / "one" / "error.json").unlink()
        run.lock()  # it is resumed
        playwright.expect(page.locator(".live")).to_have_text("live")
        run.release()


def test_a_trace_is_a_waterfall_with_totals_that_folds(page: Any, long_run: Path) -> None:
    with serving(long_run) as link:
        page.goto(f"{link}run/long/traces?mode=train&step=1")
        page.locator(".score").first.click()
        page.wait_for_selector(".tree")
        rows = page.locator(".tree .row")
        calls = page.locator(".tree .row:has(.call)")
        n = calls.count()
        assert n >= 2
        playwright.expect(rows.first).to_contain_text(f"{60 * n} + {20 * n}")
        playwright.expect(calls.first).to_contain_text("60 + 20")
        bars = page.locator(".fall rect.call").evaluate_all(
            "all => all.map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
        )
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(bars)), "one after the other"
        inside = page.locator(".tree details").first.evaluate("e => e.clientWidth")
        assert bars[-1][1] - bars[0][0] > 0.9 * inside, "they fill the width"
        page.locator(".tree summary").nth(2).focus()
        page.keyboard.press("Enter")
        playwright.expect(calls.first).to_be_hidden()
        playwright.expect(calls.nth(1)).to_be_visible()
        page.keyboard.press("Enter")
        playwright.expect(calls.first).to_be_visible()
