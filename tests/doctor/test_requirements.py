"""The doctor checks everything that a run imports: the whole tree of requirements, and whether the imports work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributions import install

from agentrig.doctor.requirements import unmet

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


def doctor(site: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "agentrig", "doctor", "toy", "--plugin", str(PLUGIN), "--hardware", "cpu"]
    done = subprocess.run(
        [*command, *words, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
        timeout=200,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


@pytest.mark.parametrize("leaf", [5, 7])
def test_an_incompatible_indirect_requirement_is_found(tmp_path: Path, leaf: int) -> None:
    """For example protobuf, upgraded for an unrelated package: the metadata and the import both show it."""
    install(tmp_path, "toy-leaf", LEAF.replace("7", str(leaf)), version=f"{leaf}.1", plugin=False)
    install(tmp_path, "toy-middle", MIDDLE, version="1.0", requires=["toy-leaf<6,>=5"], plugin=False)
    install(tmp_path, "toy-agents", AGENT, requires=["toy-middle"])
    status, findings = doctor(tmp_path, "--agent", "talker")
    lines = {f["check"]: f for f in findings}
    if leaf == 5:
        assert (status, lines["requirements"]["result"], lines["imports"]["result"]) == (0, "ok", "ok"), findings
        return
    assert status == 1
    assert lines["requirements"]["result"] == "warning"
    assert (
        lines["requirements"]["evidence"]
        == "toy-middle (required by toy-agents) requires toy-leaf<6,>=5; 7.1 is installed"
    )
    assert lines["imports"]["result"] == "problem"
    assert lines["imports"]["evidence"].startswith(
        "build agent talker: the agent talker cannot be built: TypeError: Det"
    )
    assert lines["stack"]["check"] == "stack"  # the other checks run too


def test_the_imports_of_every_run_are_tried(tmp_path: Path) -> None:
    """With a module on the path that hides the real one."""
    (tmp_path / "agentlightning").mkdir()
    (tmp_path / "agentlightning" / "__init__.py").write_text("raise SystemExit('half installed')\n")
    status, findings = doctor(tmp_path)
    (found,) = [f for f in findings if f["check"] == "imports"]
    assert (status, found["result"]) == (1, "problem")
    assert found["evidence"].startswith("import agentrig.run.session (every run does): SystemExit: half installed")
    assert "agentlightning/__init__.py:1)" in found["evidence"]


def test_an_import_that_kills_the_interpreter_is_a_finding(tmp_path: Path) -> None:
    install(tmp_path, "toy-agents", AGENT.replace("import toy_middle", "import os; os.abort()"))
    status, findings = doctor(tmp_path, "--agent", "talker")
    (found,) = [f for f in findings if f["check"] == "imports"]
    assert (status, found["result"]) == (1, "problem")
    assert "the subprocess that tried the imports of a run failed" in found["evidence"]
