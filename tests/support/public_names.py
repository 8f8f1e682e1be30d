"""Lists the public names of a released version, for the test that they can still be imported.

    python tests/support/public_names.py 9751d2c > tests/data/public_names_0.1.json

Run it once for each release, on its commit or tag. A public name is defined at the top of a module without an
underscore in its path, or imported into a package by its `__init__`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = re.compile(r"(?:plugins/[^/]+/)?src/((?:\w+/)*\w+)\.py")
NOT_API = {"log", "logger"}
"""Names that are not part of the API."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def public_names(commit: str) -> dict[str, list[str]]:
    """Return every public module of the core and its plugins at a commit, and the names that each has."""
    found = {}
    for file in git("ls-tree", "-r", "--name-only", commit, "src", "plugins").splitlines():
        if not (matched := SOURCE.fullmatch(file)):
            continue
        module = matched[1].replace("/", ".").removesuffix(".__init__")
        if module.endswith("__main__") or re.search(r"(^|\.)_", module):
            continue
        tree = ast.parse(git("show", f"{commit}:{file}"))
        names = set(defined(tree.body, module.partition(".")[0], package=file.endswith("/__init__.py")))
        found[module] = sorted(name for name in names if not re.match(r"_|[A-Z]$", name) and name not in NOT_API)
    return dict(sorted(found.items()))


def defined(body: list[ast.stmt], root: str, *, package: bool) -> Iterator[str]:
    """Yield what a module defines, and what a package imports from itself or the core."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif package and isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == root:
            yield from (alias.asname or alias.name for alias in node.names)


if __name__ == "__main__":
    print(json.dumps(public_names(sys.argv[1]), indent=0))
