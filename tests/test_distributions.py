"""`pyproject.toml` of core and plugins: one version, one range of Python, all requirements."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import agentrig

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = sorted((ROOT / "plugins").glob("agentrig-*"))
ALL = [ROOT, *PLUGINS]
OPTIONAL = {
    "langchain_core": "imported when the agent has imported it, or by Agent Lightning's own tracer",
    "pynvml": "used if it is installed",
    "swanlab": "used if a run logs to it",
    "triton": "for kernels on a GPU: torch for CUDA brings it",
}
CORE = {
    "pytest": "imported by the pytest plugin of the kit, which only pytest loads",
    "tokenizers": "comes with transformers; asked how a model's own file splits text",
    "torch": "for the tensors of an algorithm that has some, and to check an export where it is installed",
    "transformers": "to check an export where it is installed, and the models of an algorithm that has some",
    "safetensors": "to compare checkpoints that are such files: what wrote them brings it",
}


def project(folder: Path) -> dict[str, Any]:
    with (folder / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def requirements(folder: Path) -> list[Requirement]:
    about = project(folder)
    extras = [line for lines in about.get("optional-dependencies", {}).values() for line in lines]
    return [Requirement(line) for line in (*about["dependencies"], *extras)]


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the imports of a distribution from outside of it and of Python: top-level name, file and line."""
    own = {path.name for path in (folder / "src").iterdir()}
    files = [f for f in (folder / "src").rglob("*.py") if "templates" not in f.relative_to(folder).parts]
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                yield top, f"{file.relative_to(folder)}:{node.lineno}"


brought = cache(importlib.metadata.packages_distributions)


def undeclared(folder: Path) -> list[str]:
    declared = {requirement.name.lower() for requirement in requirements(folder)}
    brings = brought()
    optional = OPTIONAL.keys() | (CORE.keys() if folder == ROOT else ())
    missing = []
    for top, where in imported(folder):
        by = {top.replace("_", "-"), *(name.lower() for name in brings.get(top, ()))}
        if top not in optional and not by & declared:
            missing.append(f"{where} imports {top}")
    return missing


@pytest.mark.parametrize("folder", ALL, ids=lambda folder: folder.name if folder != ROOT else "agentrig")
def test_every_import_is_required(folder: Path) -> None:
    assert undeclared(folder) == []


def test_core_and_plugins_have_one_version_and_the_plugins_require_it() -> None:
    assert {project(folder)["version"] for folder in ALL} == {agentrig.__version__}
    for folder in PLUGINS:
        for requirement in requirements(folder):
            if requirement.name.startswith("agentrig"):
                assert requirement.specifier == SpecifierSet(f">={agentrig.__version__},<0.3"), folder.name


def test_the_python_versions_are_declared_in_one_place() -> None:
    said = project(ROOT)["requires-python"]
    assert {project(folder)["requires-python"] for folder in ALL} == {said}
    # tests/docs/test_docs.py compares the one page that states them.
    # The Makefile reads the line of pyproject.toml, with a Python that may be too old for tomllib.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert not re.search(r"\(3, 1\d\)", makefile)
    assert "requires-python" in makefile


def test_all_distributions_are_typed() -> None:
    for folder in ALL:
        (package,) = [p for p in (folder / "src").iterdir() if (p / "__init__.py").is_file()]
        assert (package / "py.typed").is_file(), package
