"""The live page in a real browser: a run is watched while it trains.

It needs Playwright for Python and the system's Chromium: `make test-browser` installs the first, and its first lines
say how to get the second. With AGENTRIG_SCREENSHOTS=DIR it writes the pictures of the docs there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrig.view.watch.app import serving

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")

NAMELESS = """() => [...document.querySelectorAll('a, button, input, select')].filter(e => {
  const label = e.labels && [...e.labels].map(l => l.textContent).join('');
  return !(e.getAttribute('aria-label') || label || e.textContent.trim() || e.title);
}).map(e => e.outerHTML)"""
"""Controls that a screen reader has no name for."""

WIDE = "() => document.documentElement.scrollWidth - window.innerWidth"


CLIPPED = """() => [...document.querySelectorAll('.columns .scroll, .scroll:has(.list), .tree, .scores')].filter(
  e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1).map(e => e.innerText.slice(0, 200))"""
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
    """Write a picture for the docs, if somebody asked for them."""
    if folder := os.environ.get("AGENTRIG_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


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
        picture(page, "watch-run")
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
        picture(page, "watch-traces")
        page.locator(".score").first.click()
        page.wait_for_selector(".trace")
        assert page.get_by_text("Never shown to the agent").count() == 1
        assert page.locator(".tokens i[title^=p]").count() > 0
        picture(page, "watch-rollout")
        first = page.url
        page.keyboard.press("j")
        page.wait_for_function("before => location.href !== before", arg=first)
        page.keyboard.press("k")
        page.wait_for_function("before => location.href === before", arg=first)
        page.get_by_role("button", name="compare").click()
        page.wait_for_selector("table.diff")
        picture(page, "watch-two")
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_every_view_fits_and_can_be_read(browser: Any, mini_run: Path, width: int, scheme: str) -> None:
    wrong: list[tuple[str, Any]] = []
    with serving(mini_run.parent) as link:
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        run = f"{link}run/{mini_run.name}"
        page.goto(f"{run}/traces")
        page.locator(".score").first.click()
        page.wait_for_selector(".trace")
        rollout = page.url
        page.get_by_role("button", name="compare").click()
        page.wait_for_selector("table.diff")
        for address in (link, run, f"{run}/examples", f"{run}/traces", rollout, page.url):
            page.goto(address)
            playwright.expect(page.locator("[data-part][data-empty]")).to_have_count(0)
            for what in (WIDE, CLIPPED, SMALL):
                found = page.evaluate(what)
                wrong += [(address.removeprefix(link), found)] if found else []
        page.context.close()
    assert wrong == []


def test_the_keys_are_shown_with_a_question_mark(browser: Any, mini_run: Path) -> None:
    with serving(mini_run.parent) as link:
        page = browser.new_context().new_page()
        page.goto(f"{link}run/{mini_run.name}/traces")
        keys = page.get_by_role("dialog")
        page.locator("input[name=text]").press("?")
        assert keys.count() == 0, "it is typed into the search"
        page.locator("h1").click()
        page.keyboard.press("?")
        assert keys.locator("kbd").all_inner_texts() == ["j", "k", "/", "?"]
        page.keyboard.press("j")
        assert page.url.endswith("/traces"), "the other keys wait until it is closed"
        page.keyboard.press("Escape")
        assert keys.count() == 0
        page.get_by_role("button", name="keys").click()
        assert keys.count() == 1
        page.context.close()
