"""The picture of docs/architecture.md agrees with the code's imports."""

from __future__ import annotations

import architecture


def test_the_picture_is_up_to_date() -> None:
    assert architecture.FILE.read_text("utf-8") == architecture.picture(), (
        "run: python tests/support/architecture.py --write"
    )
    assert "(images/architecture.svg)" in (architecture.ROOT / "docs" / "architecture.md").read_text("utf-8")
