"""A translated page keeps step with its original: the same headings, code blocks, tables, links, names and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRANSLATED = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/**/*.zh.md")])


def original_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def shape(text: str) -> dict[str, list[str]]:
    """Return what a translation must not change."""
    fence = re.compile(r"^```.*?^```", re.S | re.M)
    prose = fence.sub("", text)
    links = re.findall(r"\]\(([^)]+)\)", prose)
    return {
        "blocks": fence.findall(text),
        "levels": re.findall(r"^(#+ (?:\d+\.)?)", prose, re.M),
        "rows": re.findall(r"^ *(\| `[^|]*` \|)", prose, re.M),
        "items": re.findall(r"^(-|\d+\.) ", prose, re.M),
        # A page may link to a translation; an anchor on the page itself is a translated heading.
        "links": sorted("#" if link.startswith("#") else link.replace(".zh.md", ".md") for link in links),
        "names": sorted({re.sub(r"\s+", " ", name) for name in re.findall(r"`([^`]+)`", prose)}),
        "figures": sorted(re.findall(r"\d+(?:\.\d+)+%?", prose)),
    }


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda p: p.name)
def test_a_translation_has_the_shape_of_its_original(page: Path) -> None:
    original = original_of(page)
    assert shape(page.read_text("utf-8")) == shape(original.read_text("utf-8"))


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda p: p.name)
def test_a_translation_and_its_original_link_to_each_other(page: Path) -> None:
    original = original_of(page)
    assert f"[中文]({page.name})" in original.read_text("utf-8")
    assert f"[English]({original.name})" in page.read_text("utf-8")
