"""`agentrig validate` on the two example domains with all their tasks, and on the agent of the README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributions import install_copy

from agentrig.cli.entry import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def validate(word: str, *more: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Run the command in a folder; return what it prints of a validation without a fault."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "validate", word, "--json", *more],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "node"), [("units", "assistant"), ("json-repair", "repair")])
def test_a_whole_domain_is_green(tmp_path: Path, domain: str, node: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install_copy(EXAMPLES / f"agentrig-{domain}", site)
    here = {"PYTHONPATH": str(site), "AGENTRIG_CACHE": str(tmp_path / "cache")}
    found = validate(f"agentrig-{domain}", folder=tmp_path, **here)
    assert [r["kind"] for r in found["reports"]] == ["recipe", "tasks", "agent", "play", "reward"]
    results = {r["check"]: r["status"] for report in found["reports"] for r in report["results"]}
    skipped = {check for check, status in results.items() if status == "skipped"}
    assert skipped == {"reward.batch", "reward.monotone"}
    assert set(results.values()) == {"passed", "skipped"}
    (trial,) = found["trials"]
    assert trial["agent"] == trial["reward"] == domain
    assert list(trial["trained_by_node"]) == [node]
    assert trial["reward_mean"]["gold"] > 0.5 > trial["reward_mean"]["nonsense"] == 0.0


@pytest.mark.slow
def test_the_readmes_agent_with_its_own_tasks_is_green(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.S)
    (tmp_path / "my_agent.py").write_text(block)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    found = validate("my_agent.py", "--limit", "2", folder=tmp_path)
    assert sorted({report["kind"] for report in found["reports"]}) == ["agent", "play", "recipe", "reward"]
    (trial,) = found["trials"]
    assert trial["reward_mean"] == {"gold": 1.0, "nonsense": 0.0}
    # The agent alone, with other tasks and their reward, is the first example of the command's help.
    agent = block.partition("@hookimpl\ndef register_rewards")[0]
    (tmp_path / "my_agent.py").write_text(agent.replace("['text']", "['question']"))
    words = re.findall(r"^  agentrig validate (.*)", CliRunner().invoke(main, ["validate", "--help"]).stdout, re.M)[0]
    (trial,) = validate(*words.split(), "--limit", "2", folder=tmp_path)["trials"]
    assert (trial["reward"], trial["reward_mean"]) == ("spider-exec", {"gold": 1.0, "nonsense": 0.0})
