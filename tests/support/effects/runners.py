"""The keys of `[runners]`, observed in real runner processes by their own tests."""

from __future__ import annotations

from effects import Elsewhere

LATE = "plugins/agentrig-lightning/tests/test_late_runners.py::test_one_joins_late_one_is_killed_and_one_leaves"
OTHERS = "it needs runners in processes of their own, which join over the network"
POOL = "tests/runners/test_processes.py"
TESTS = {
    f"{POOL}::test_each_rollout_returns_once": ("n", "threads"),
    f"{POOL}::test_a_stuck_rollout_ends_at_its_deadline_and_the_others_continue": ("deadline_s",),
    f"{POOL}::test_an_agent_that_kills_its_process_is_a_failure_after_its_retries": ("retries",),
    "tests/test_secrets.py::test_runners_get_what_their_agent_declares": ("environment",),
}
TABLE = {key: Elsewhere(test, "its own test shows it") for test, keys in TESTS.items() for key in keys}

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
