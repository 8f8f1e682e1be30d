"""Imports respect the layers (`lint-imports` reads them from pyproject.toml) and form no cycle."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grimp
import networkx
import pytest
from quick import quick_first

ROOT = Path(__file__).parents[1]


SPIDER = "../../plugins/agentrig-spider/src/agentrig_spider/__init__.py"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts over the sources below a copy of the repository."""
    sources = [root / "src", *sorted((root / "plugins").glob("*/src"))]
    return subprocess.run(
        [sys.executable, "-P", "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


WRONG = {
    "up": ("tasks.py", "from agentrig.run import session", "agentrig.tasks is not allowed to import agentrig.run"),
    "inside a function": (
        "errors.py",
        "def late() -> None:\n    from agentrig.plan import resolve",
        "agentrig.errors is not allowed to import agentrig.plan",
    ),
    "for types only": (
        "rollouts.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentrig.observers import RunEnd",
        "agentrig.rollouts is not allowed to import agentrig.observers",
    ),
    "ray": ("runners/jobs.py", "import ray", "agentrig is not allowed to import ray"),
    "a plugin imports machinery": (
        SPIDER,
        "def late() -> None:\n    from agentrig.run import session",
        "agentrig_spider -> agentrig.run.session",
    ),
}
"""A file, what is added to it, and what `lint-imports` says. `make lint` checks the sources as they are."""


@pytest.mark.parametrize("name", quick_first(WRONG, ("a plugin imports machinery",)))
def test_a_wrong_import_is_found(tmp_path: Path, name: str) -> None:
    file, line, said = WRONG[name]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for plugin in (ROOT / "plugins").iterdir():
        if (plugin / "src").is_dir():
            shutil.copytree(
                plugin / "src",
                tmp_path / "plugins" / plugin.name / "src",
                ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json"),
            )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "agentrig" / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert said in " ".join(done.stdout.split())


def private_names(folder: Path) -> Iterator[str]:
    """Yield private names of agentrig that the sources of a folder import: file, line, name."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agentrig":
                for name in [*(node.module or "").split("."), *(n.name for n in node.names)]:
                    if name.startswith("_") and not name.endswith("__"):
                        yield f"{file.name}:{node.lineno} {name}"


def test_plugins_import_no_private_name(tmp_path: Path) -> None:
    folders = [*(ROOT / "plugins").glob("*/src"), *(ROOT / "examples").glob("*/src")]
    folders += (ROOT / "src/agentrig/templates").glob("*")
    assert [name for folder in folders for name in private_names(folder)] == []
    (tmp_path / "odd.py").write_text("def late():\n    from agentrig.tasks import (\n        _id,\n    )\n")
    assert list(private_names(tmp_path)) == ["odd.py:2 _id"]


def circles(sources: Sequence[Path], packages: Sequence[str]) -> list[list[str]]:
    """Return the circles of files, and of the parts of each folder; every import counts, for types and in functions."""
    with found_first(sources):
        graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    files = networkx.DiGraph()
    for module in graph.modules:
        files.add_edges_from((module, target) for target in graph.find_modules_directly_imported_by(module))
    found = [sorted(c) for c in networkx.strongly_connected_components(files) if len(c) > 1]
    for folder in graph.modules:
        parts, depth = networkx.DiGraph(), folder.count(".") + 1
        for a, b in files.edges:
            if a.startswith(f"{folder}.") and b.startswith(f"{folder}."):
                parts.add_edge(*(".".join(m.split(".")[: depth + 1]) for m in (a, b)))
        parts.remove_edges_from(networkx.selfloop_edges(parts))
        found += [sorted(c) for c in networkx.strongly_connected_components(parts) if len(c) > 1]
    return found


@contextmanager
def found_first(sources: Sequence[Path]) -> Iterator[None]:
    """Put these sources first on the path."""
    before = list(sys.path)
    sys.path[:0] = map(str, sources)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def test_no_files_or_folders_form_a_circle() -> None:
    sources = [ROOT / "src", *sorted((ROOT / "plugins").glob("*/src"))]
    packages = [folder.name for source in sources for folder in source.iterdir() if (folder / "__init__.py").exists()]
    assert circles(sources, packages) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "ring" / "one").mkdir(parents=True)
    (tmp_path / "ring" / "two").mkdir()
    for name in ("__init__", "one/__init__", "two/__init__", "two/b"):
        (tmp_path / "ring" / f"{name}.py").touch()
    (tmp_path / "ring" / "one" / "a.py").write_text("import ring.two.b\n")
    (tmp_path / "ring" / "two" / "c.py").write_text("def late():\n    from ring.one import a\n")
    assert circles([tmp_path], ["ring"]) == [["ring.one", "ring.two"]]
    (tmp_path / "ring" / "two" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ring.one.a\n"
    )
    assert ["ring.one.a", "ring.two.b"] in circles([tmp_path], ["ring"])
