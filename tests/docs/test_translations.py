"""A translated page keeps step with its original: the same headings, code blocks and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRANSLATED = sorted(ROOT.glob("docs/**/*.zh.md"))


def shape(text: str) -> dict[str, list[str]]:
    """Return what a translation must not change."""
    blocks = re.findall(r"^```.*?^```", text, re.S | re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return {
        "blocks": blocks,
        "levels": re.findall(r"^(#+ (?:\d+\.)?)", prose, re.M),
        "links": [link for link in re.findall(r"\]\(([^)]+)\)", prose) if "quickstart" not in link],
        "figures": sorted(re.findall(r"\d+(?:\.\d+)+%?", prose)),
    }


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda p: p.name)
def test_a_translation_has_the_shape_of_its_original(page: Path) -> None:
    original = page.with_name(page.name.replace(".zh.md", ".md"))
    assert shape(page.read_text("utf-8")) == shape(original.read_text("utf-8"))


def test_there_is_a_translation() -> None:
    assert [page.name for page in TRANSLATED] == ["quickstart.zh.md"]
