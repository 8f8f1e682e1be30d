"""The built site works without a network: no page loads a script, a style, a font or an image from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = {**dict.fromkeys(("script", "img", "iframe", "source", "video"), "src"), "link": "href", "object": "data"}


class Page(HTMLParser):
    """What a page loads, and whether it has something that makes the theme load a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        address = given.get(LOADED.get(tag, ""), "")
        if re.match(r"(https?:)?//", address) and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(f"{tag} {address}")
        if "mermaid" in given.get("class", "").split():
            self.found.append("mermaid")  # its script is not in the theme


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """Yield `FILE: what` for everything that the pages and styles of a site load from another host."""
    for file in sorted([*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]):
        text = file.read_text("utf-8")
        found = (
            Page(text).found if file.suffix == ".html" else re.findall(r"(?:@import|url\(|href=)\W*https?:\S+", text)
        )
        yield from (f"{file.relative_to(site)}: {what}" for what in found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` has just built, or one built here in the same way."""
    if built := os.environ.get("AGENTRIG_SITE"):
        return (ROOT / built).resolve()
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 30
    assert list(loaded_from_elsewhere(site)) == []


def test_every_linked_anchor_exists(site: Path) -> None:
    """`mkdocs build --strict` checks that linked pages exist, but not their anchors."""
    for file in site.rglob("*.html"):
        text = file.read_text("utf-8")
        for link in re.findall(r'<a (?:class="[^"]*" )?href="([^":]*#[^"]+)"', text):
            path, _, anchor = link.partition("#")
            target = (file.parent / path / "index.html").resolve() if path else file
            if not target.is_file():
                target = (file.parent / path).resolve()
            assert f'id="{anchor}"' in target.read_text("utf-8"), f"{file.relative_to(site)} links to {link}"
