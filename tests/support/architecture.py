"""Draws the picture of docs/architecture.md from the code's own imports.

python tests/support/architecture.py           print what imports what
python tests/support/architecture.py --write   write the picture, docs/images/architecture.svg

It is an SVG file, so that the site shows it without a script from the network.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "images" / "architecture.svg"

WIDTH, HEIGHT = 130, 30
"""Of a box, in pixels."""

ACROSS, DOWN = 150, 66
"""From one box to the next, in a row and between rows."""

STYLE = """
rect { fill: #eef2fb; stroke: #3f51b5; }
rect.file { fill: #fff; }
rect.page { fill: #fff; stroke: none; }
text { font: 13px sans-serif; text-anchor: middle; fill: #1a1a2e; }
path { fill: none; stroke: #7986cb; stroke-width: 1.2; marker-end: url(#head); }
"""


def layers() -> list[list[str]]:
    """Return the parts of agentrig from top to bottom, as the contract of layers has them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    contract = next(c for c in config["contracts"] if c["type"] == "layers")
    return [[part.strip().removeprefix("agentrig.") for part in layer.split("|")] for layer in contract["layers"]]


def arrows(parts: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what imports what, type-only and function-level imports included, without what follows from the rest."""
    graph = grimp.build_graph("agentrig", include_external_packages=False, cache_dir=None)
    below: dict[str, set[str]] = {}
    for part in parts:
        inside = {f"agentrig.{part}", *graph.find_descendants(f"agentrig.{part}")}
        found = {m for module in inside for m in graph.find_modules_directly_imported_by(module)} - inside
        below[part] = {m.split(".")[1] for m in found if "." in m} & set(parts)
    reached: dict[str, set[str]] = {}

    def reach(part: str) -> set[str]:
        if part not in reached:
            reached[part] = below[part].union(*(reach(b) for b in below[part])) if below[part] else set()
        return reached[part]

    for part in parts:
        implied = set().union(*(reach(b) for b in below[part])) if below[part] else set()
        for target in sorted(below[part] - implied):
            yield part, target


def rows() -> list[list[str]]:
    """Return the layers with the parts that are drawn: private modules are not."""
    found = [[part for part in layer if not part.startswith("_")] for layer in layers()]
    return [row for row in found if row]


def picture() -> str:
    """Return the picture as SVG text: a row for each layer, a curve for each arrow, drawn behind the boxes."""
    drawn = rows()
    width, height = ACROSS * max(map(len, drawn)), DOWN * len(drawn)
    at = {
        part: (width // 2 + ACROSS * (2 * i - len(row) + 1) // 2, DOWN * y + DOWN // 2)
        for y, row in enumerate(drawn)
        for i, part in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<polygon points="0 0, 8 4, 0 8" fill="#7986cb"/></marker></defs>',
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for a, b in arrows(list(at)):
        (x1, y1), (x2, y2) = (at[a][0], at[a][1] + HEIGHT // 2), (at[b][0], at[b][1] - HEIGHT // 2)
        bend = max((y2 - y1) // 2, 12)
        lines.append(
            f'<path d="M{x1} {y1} C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}"><title>{a} → {b}</title></path>'
        )
    for part, (x, y) in at.items():
        folder = (ROOT / "src" / "agentrig" / part).is_dir()
        kind, name = ("folder", f"{part}/") if folder else ("file", part)
        lines.append(
            f'<rect class="{kind}" x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}"'
            f' rx="{3 if folder else 15}"/><text x="{x}" y="{y + 4}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(picture(), "utf-8")
    else:
        for upper, lower in arrows([part for row in rows() for part in row]):
            print(upper, "→", lower)
