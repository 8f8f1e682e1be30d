"""The picture of docs/architecture.md agrees with the code's imports."""

from __future__ import annotations

from xml.etree import ElementTree

import architecture


def test_the_picture_is_up_to_date() -> None:
    assert architecture.FILE.read_text("utf-8") == architecture.picture(), (
        "run: python tests/support/architecture.py --write"
    )
    assert "(images/architecture.svg)" in (architecture.ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_the_picture_has_every_layer_and_its_arrows_go_down() -> None:
    height = {part: row for row, parts in enumerate(architecture.rows()) for part in parts}
    assert {"tasks", "run", "cli"} <= set(height)
    found = list(architecture.arrows(list(height)))
    assert ("plan", "plugins") in found
    assert all(height[upper] < height[lower] for upper, lower in found)
    drawn = ElementTree.fromstring(architecture.picture())
    names = [text.text.rstrip("/") for text in drawn.findall(".//{*}text")]
    assert names == list(height)
    assert [title.text for title in drawn.findall(".//{*}title")] == [f"{upper} → {lower}" for upper, lower in found]


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    found = list(architecture.arrows(["run", "plan", "errors"]))
    assert ("run", "plan") in found
    assert ("run", "errors") not in found  # run imports it, and so does plan
