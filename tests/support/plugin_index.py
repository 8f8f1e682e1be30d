"""Makes the index of plugins that ships with agentrig, from the metadata of its own: `--write` writes it."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from agentrig.plugins.index import SHIPPED

ROOT = Path(__file__).resolve().parents[2]


def entry(folder: Path) -> dict[str, Any]:
    """Return the entry of a distribution of this repository, as its metadata on a registry would give it."""
    about = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    required = [Requirement(line) for line in about["dependencies"]]
    return {
        "name": about["name"],
        "version": about["version"],
        "summary": about["description"],
        "keywords": about["keywords"],
        "home": "",
        "agentrig": ",".join(str(r.specifier) for r in required if r.name == "agentrig"),
    }


def text(made: str) -> str:
    """Return the file's content, with the date that it was made."""
    plugins = [entry(folder) for folder in sorted((ROOT / "plugins").glob("agentrig-*"))]
    return json.dumps({"made": made, "source": "agentrig's own plugins", "plugins": plugins}, indent=1) + "\n"


if __name__ == "__main__":
    if "--write" not in sys.argv or len(sys.argv) != 3:
        sys.exit("write: python tests/support/plugin_index.py --write YYYY-MM-DD")
    SHIPPED.write_text(text(sys.argv[2]), "utf-8")
