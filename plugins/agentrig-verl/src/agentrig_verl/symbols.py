"""Checks that the installed verl has what this plugin imports from it: reads source files, imports nothing."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrig.errors import ConfigError
from agentrig_verl import schema

SUPPORTED = "0.9"
"""The verl version that messages name. The check itself looks for the imported names, not the version."""


@functools.cache
def wanted() -> Mapping[str, frozenset[str]]:
    """Return the modules of verl that this plugin's own source imports from, and the names that it takes there."""
    found: dict[str, set[str]] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "verl":
                found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return {module: frozenset(names) for module, names in found.items()}


def lacking(root: Path | None = None) -> list[str]:
    """Return the dotted names that this plugin needs and a verl does not have; empty if it can use that verl.

    Args:
        root: The folder of the package `verl`; None for the installed one.
    """
    root = root or schema.package()
    missing = []
    for module, names in wanted().items():
        file = _file(root, module)
        if file is None:
            missing.append(module)
            continue
        here = set(_defined(ast.parse(file.read_text("utf-8")).body))
        if "*" not in here:
            missing += [f"{module}.{n}" for n in sorted(names - here) if _file(root, f"{module}.{n}") is None]
    return sorted(set(missing))


def require() -> None:
    """Raise unless this plugin can use the installed verl."""
    if missing := lacking():
        raise ConfigError(
            f"[algorithm] verl: agentrig cannot use the installed verl: it has no {', '.join(missing)}\n"
            f"  Install verl {SUPPORTED}: docs/gpu.md and docs/hardware.md have the versions that work with it"
        )


def _file(root: Path, module: str) -> Path | None:
    """Return the source file of a module `verl.a.b`, or None."""
    place = root.joinpath(*module.split(".")[1:])
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements define, those under `if`, `try` and `with` among them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        else:
            inner = [s for s in ast.iter_child_nodes(node) if isinstance(s, ast.stmt)]
            handlers = [s for h in getattr(node, "handlers", ()) for s in h.body]
            yield from _defined([*inner, *handlers])
