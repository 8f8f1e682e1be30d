"""The doctor checks everything that a run imports: the whole tree of requirements, and whether the imports work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributions import install

from agentrig.doctor import could_start, examine, imports, software
from agentrig.doctor.software import unmet
from agentrig.findings import Finding

PLUGIN = Path(__file__).parents[1] / "support" / "doctor_plugin.py"

LEAF = "VERSION = (7, 1)\n"
MIDDLE = (
    "import toy_leaf\n\n"
    "if toy_leaf.VERSION[0] != 5:\n"
    "    raise TypeError('Detected incompatible gencode and runtime versions: gencode 5.29, runtime 7.1')\n"
)
AGENT = """
from agentrig import AgentSpec, hookimpl

def build(config):
    import toy_middle
    return lambda task, endpoint: "still"

@hookimpl
def register_agents():
    yield AgentSpec(name="talker", summary="", build=build)
"""


def requirements_of(*roots: str) -> list[str]:
    return [f"{'>'.join(u.chain)}: {u.requirement.name}{u.requirement.specifier} {u.version}" for u in unmet(roots)]


def library(folder: Path, name: str, *requires: str, version: str = "1.0") -> None:
    install(folder, name, "", version=version, requires=requires, plugin=False)


def test_the_whole_tree_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    library(tmp_path, "toy-root", "toy_Middle>=1", "toy-side")
    library(tmp_path, "toy-middle", "toy-leaf<6,>=5", "toy-root")  # a circle too
    library(tmp_path, "toy-side", "toy-leaf<6,>=5", "toy-gone")
    library(tmp_path, "toy-leaf", version="7.1")
    assert requirements_of("toy-root") == [
        "toy-root>toy_Middle: toy-leaf<6,>=5 7.1",
        "toy-root>toy-side: toy-leaf<6,>=5 7.1",
        "toy-root>toy-side: toy-gone None",
    ]


def test_markers_and_extras_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    library(
        tmp_path,
        "toy-root",
        "toy-old; python_version < '3'",
        "toy-middle[fast]",
        "toy-unasked; extra == 'docs'",
    )
    library(tmp_path, "toy-middle", "toy-quick; extra == 'fast'", "toy-slow; extra == 'slow'")
    assert requirements_of("toy-root") == ["toy-root>toy-middle: toy-quick None"]
    library(tmp_path, "toy-other", "toy-middle", "toy-middle[slow]")  # first without the extra, then with it
    assert requirements_of("toy-other") == ["toy-other>toy-middle: toy-slow None"]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Examine the recipe `toy` with what the test's folder holds; only the checks that this file is about."""
    monkeypatch.syspath_prepend(tmp_path)  # plugins are found there
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the subprocess that tries the imports
    checks = (software.check_requirements, imports.check_imports, software.check_stack)
    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", checks)

    def findings(agent: str | None = None) -> list[Finding]:
        monkeypatch.delitem(sys.modules, "toy_agents", raising=False)
        return examine("toy", files=[str(PLUGIN)], uses={"hardware": "cpu", "agent": agent})

    return findings


@pytest.mark.parametrize("leaf", [5, 7])
def test_an_incompatible_indirect_requirement_is_found(
    tmp_path: Path, doctor: Callable[..., list[Finding]], leaf: int
) -> None:
    """For example protobuf, upgraded for an unrelated package: the metadata and the import both show it."""
    install(tmp_path, "toy-leaf", LEAF.replace("7", str(leaf)), version=f"{leaf}.1", plugin=False)
    install(tmp_path, "toy-middle", MIDDLE, version="1.0", requires=["toy-leaf<6,>=5"], plugin=False)
    install(tmp_path, "toy-agents", AGENT, requires=["toy-middle"])
    findings = doctor("talker")
    lines = {f.check: f for f in findings}
    if leaf == 5:
        assert (lines["requirements"].result, lines["imports"].result) == ("ok", "ok"), findings
        assert could_start(findings)
        return
    assert not could_start(findings)
    assert lines["requirements"].result == "warning"
    said = "toy-middle (required by toy-agents) requires toy-leaf<6,>=5; 7.1 is installed"
    assert lines["requirements"].evidence == said
    assert lines["imports"].result == "problem"
    said = "build agent talker: the agent talker cannot be built: TypeError: Det"
    assert lines["imports"].evidence.startswith(said)
    assert "stack" in lines  # the other checks run too


def test_the_imports_of_every_run_are_tried(tmp_path: Path, doctor: Callable[..., list[Finding]]) -> None:
    """With a module on the path that hides the real one."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise SystemExit('half installed')\n")
    (found,) = [f for f in doctor() if f.check == "imports"]
    assert found.result == "problem"
    assert found.evidence.startswith("import agentrig.audit.auditor (every run does): SystemExit: half installed")
    assert "numpy/__init__.py:1 in <module>)" in found.evidence


def test_an_import_that_kills_the_interpreter_is_a_finding(
    tmp_path: Path, doctor: Callable[..., list[Finding]]
) -> None:
    install(tmp_path, "toy-agents", AGENT.replace("import toy_middle", "import os; os.abort()"))
    (found,) = [f for f in doctor("talker") if f.check == "imports"]
    assert found.result == "problem"
    assert "the subprocess that tried the imports of a run failed" in found.evidence
