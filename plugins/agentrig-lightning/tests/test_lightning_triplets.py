"""The triplets of Agent Lightning's adapters are the same with its own tracer and runner and with agentrig's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # two processes with Agent Lightning

SCRIPT = Path(__file__).parents[3] / "tests" / "support" / "lightning_compare.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The triplets by setting, of Agent Lightning and of agentrig: two processes, because AgentOps patches its own."""
    folder = tmp_path_factory.mktemp("compare")
    found = []
    for name in ("theirs", "ours"):
        command = [sys.executable, str(SCRIPT), name, str(folder / name)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        found.append(json.loads((folder / name).read_text()))
    return found[0], found[1]


def test_every_setting_gives_the_same_triplets(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = ({k: v for k, v in side.items() if k != "tree"} for side in both)
    assert len(ours) == 16
    assert [name for name in theirs if theirs[name] != ours[name]] == []
    rewards = {name: [t["reward"] for t in triplets] for name, triplets in ours.items()}
    assert rewards["default"] == [0.1, 0.2, None, 0.4, 0.9]
    assert rewards["first sibling"] == [None, None, None, 0.4, 0.9]
    assert rewards["no such node"] == []
    assert len({json.dumps(triplets) for triplets in ours.values()}) >= 10, "the settings make a difference"


def test_the_spans_have_the_same_tree(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = both
    (_, ((session, children),)) = theirs["tree"]
    assert session == "session.session"  # AgentOps adds it around what LangChain and the agent did
    assert ours["tree"] == ["rollout", children]
