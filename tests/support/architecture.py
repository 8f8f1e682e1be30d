"""Draws the picture of docs/architecture.md from the code's own imports.

python tests/support/architecture.py           print the picture
python tests/support/architecture.py --write   put it into the page
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "```mermaid\n", "```"


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


def picture() -> str:
    """Return the picture as Mermaid text."""
    rows = [[part for part in layer if not part.startswith("_")] for layer in layers()]
    rows = [row for row in rows if row]
    lines = ["flowchart TB"]
    for row in rows:
        for part in row:
            folder = (ROOT / "src" / "agentrig" / part).is_dir()
            lines.append(f"    {part}[{part}/]" if folder else f"    {part}({part})")
    lines += [f"    {a} --> {b}" for a, b in arrows([part for row in rows for part in row])]
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the picture that the page has.

    Raises:
        ValueError: It has none, or several.
    """
    found: list[str] = re.findall(re.escape(BEGIN) + "(.*?)" + END, PAGE.read_text("utf-8"), re.S)
    if len(found) != 1:
        raise ValueError(f"{PAGE} has {len(found)} blocks of Mermaid instead of one")
    return found[0]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(PAGE.read_text("utf-8").replace(written(), picture()), "utf-8")
    else:
        print(picture(), end="")
