"""Every check of the kit has a plugin that breaks it.

`python tests/testing/test_every_check.py` prints the table. The tests of each kind show that its plugins are caught by
their own check and by no other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrig.plugins.loading import load
from agentrig.testing.kit import CHECKED, table_of

FILES = {
    **{"tasks": "task_sets.py", "agent": "agents.py", "reward": "rewards.py", "adapter": "adapters.py"},
    **{"algorithm": "algorithms.py", "server": "servers.py", "hardware": "hardware.py", "runners": "runners.py"},
    **{"observer": "recipes.py", "recipe": "recipes.py"},
}
"""The file under `broken` with the plugins of a kind: named as the check, or `breaks-` and its name."""
ABSENT = {"agent.loads", "recipe.loads"}
"""Checks whose plugin is one that does not exist: they build nothing, so that a name that nobody has breaks them."""


LISTED = 'PLAY = ["play.rollouts", "play.scored", "play.readable", "play.trains"]'
"""The list of what a test expects to pass is no proof that a check can fail."""


def breakers(kind: str) -> dict[str, str]:
    """Return the plugin that breaks each check of a kind; '' if it has none."""
    known = {c.spec.name for c in load(files=[Path(__file__).parent / "broken" / FILES[kind]]).components(kind)}
    found = {}
    for declared in table_of(kind):
        short = declared.name.partition(".")[2]
        found[declared.name] = next((name for name in (f"breaks-{short}", short) if name in known), "")
    return found


@pytest.mark.parametrize("kind", CHECKED)
def test_every_check_has_a_plugin_that_breaks_it(kind: str) -> None:
    assert {check for check, plugin in breakers(kind).items() if not plugin} <= ABSENT


def test_every_check_of_a_trial_has_a_mistake_that_it_catches() -> None:
    from agentrig.testing.play import TABLE as PLAY

    tests = "".join(file.read_text("utf-8") for file in Path(__file__).parent.glob("test_validate*.py"))
    assert [
        d.name for d in PLAY if not d.name.endswith(".loads") and f'"{d.name}"' not in tests.replace(LISTED, "")
    ] == []


if __name__ == "__main__":
    for kind in CHECKED:
        for check, plugin in breakers(kind).items():
            print(f"{check:28} {FILES[kind]:15} {plugin or 'a name that no plugin has'}")
