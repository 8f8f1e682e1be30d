"""The keys of `[runners]`, observed in real runner processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentrig import Endpoint
from agentrig.plan import resolve
from agentrig.run.setup import Setup
from agentrig.runners.jobs import Job, Result
from effects import Elsewhere, Settings, Together, folder
from effects.run import OWN, TOY, overrides

LATE = "plugins/agentrig-lightning/tests/test_late_runners.py::test_one_joins_late_one_is_killed_and_one_leaves"
OTHERS = "it needs runners in processes of their own, which join over the network"
NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
SIGN = "EFFECTS_SIGN"


def results(settings: Settings, todo: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Return the results of these tasks from a run's runners."""
    made = resolve("toy", overrides=overrides("runners", settings), uses={"agent": "effects-teller"}, files=[TOY, OWN])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGN, "1")
        pool = Setup(made).pool()
        try:
            pool.start()
            for i, given in enumerate(todo):
                pool.submit(Job(id=f"job-{i}", input=given, endpoint=NOWHERE))
            found: list[Result] = []
            end = time.monotonic() + 60
            while len(found) < len(todo) and time.monotonic() < end:
                found += pool.poll(0.1)
            return found
        finally:
            pool.close()


def crowd(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """Return what twelve rollouts reported about their runners."""
    mark = str(folder() / "none")
    return [r.outcome.answer for r in results(settings, [{"do": "", "sleep_s": 0.4, "mark": mark}] * 12)]


def trouble(settings: Settings) -> tuple[str | None, int]:
    """Return how a rollout of 1.5 s failed, and how often a rollout was started whose runner always dies."""
    mark = folder() / f"starts-{settings['retries']}"
    (nap,) = results({**settings, "n": 1}, [{"do": "", "sleep_s": 1.5, "mark": str(mark)}])
    (dead,) = results({**settings, "n": 1, "deadline_s": 60.0}, [{"do": "die", "sleep_s": 0.0, "mark": str(mark)}])
    assert dead.outcome.failure == "runner-died", dead.outcome
    return nap.outcome.failure, len(mark.read_text())


CROWD, TROUBLE = Together(crowd), Together(trouble)
TABLE = {
    "n": CROWD.flip("n", 1, 2, lambda seen: len({s["pid"] for s in seen}), lambda a, b: (a, b) == (1, 2)),
    "threads": CROWD.flip("threads", 2, 3, lambda seen: max(s["most"] for s in seen), lambda a, b: (a, b) == (2, 3)),
    "environment": CROWD.flip(
        "environment",
        [],
        ["EFFECTS_*"],
        lambda seen: {SIGN in s["environment"] for s in seen},
        lambda a, b: (a, b) == ({False}, {True}),
    ),
    "deadline_s": TROUBLE.flip(
        "deadline_s", 0.5, 30.0, lambda seen: seen[0], lambda a, b: (a, b) == ("deadline", None)
    ),
    "retries": TROUBLE.flip("retries", 0, 2, lambda seen: seen[1], lambda a, b: (a, b) == (1, 3)),
}

LIGHTNING_TABLE = dict.fromkeys(("store", "store_token", "lease_s"), Elsewhere(LATE, OTHERS))

RAY = "plugins/agentrig-ray/tests/test_ray_pool.py"
RAY_TABLE = {
    **dict.fromkeys(
        ("cpus", "resources", "wait_s"),
        Elsewhere(f"{RAY}::test_a_cluster_without_room_is_explained", "it needs a Ray cluster"),
    ),
    **dict.fromkeys(
        ("address", "runtime_env", "logs"),
        Elsewhere(f"{RAY}::test_the_keys_reach_ray", "it is what Ray is called with"),
    ),
}
