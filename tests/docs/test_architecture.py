"""The picture of docs/architecture.md is the one that the code's imports give."""

from __future__ import annotations

import architecture
import pytest


def test_the_page_has_the_picture_of_today() -> None:
    assert architecture.written() == architecture.picture(), "run: python tests/support/architecture.py --write"


def test_the_picture_has_every_layer_and_its_arrows_go_down() -> None:
    rows = [[part for part in layer if not part.startswith("_")] for layer in architecture.layers()]
    height = {part: row for row, parts in enumerate(rows) for part in parts}
    assert {"tasks", "run", "cli"} <= set(height)
    found = list(architecture.arrows(list(height)))
    assert ("plan", "plugins") in found
    assert all(height[upper] < height[lower] for upper, lower in found)


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    found = list(architecture.arrows(["run", "plan", "errors"]))
    assert ("run", "plan") in found
    assert ("run", "errors") not in found  # run imports it, and so does plan


def test_a_page_without_a_picture_is_an_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    monkeypatch.setattr(architecture, "PAGE", page)
    with pytest.raises(ValueError, match="0 blocks"):
        architecture.written()
