"""All tables of effects, by section or component; see `effects`."""

from __future__ import annotations

from collections.abc import Mapping

from effects import (
    Elsewhere,
    Flip,
    agent,
    gateway,
    grpo_learning,
    grpo_runs,
    hardware,
    rewards,
    run,
    runners,
    tasks,
    verl,
    vllm_server,
)

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere]] = {
    "run": {**run.TABLE, **grpo_runs.RUN_TABLE},
    "runners": runners.TABLE,
    "gateway": gateway.TABLE,
    "plugins": {
        "require": Elsewhere("tests/plugins/test_ranges.py::test_a_run_file_requires_plugins", "it needs packages"),
    },
    "runners.ray": runners.RAY_TABLE,
    "agent.langgraph-sql": agent.TABLE,
    **rewards.TABLES,
    **tasks.TABLES,
    **hardware.TABLES,
    "algorithm.verl": verl.TABLE,
    "server.embedded": grpo_runs.SERVER_TABLE,
    "server.vllm": vllm_server.TABLE,
    "algorithm.grpo": {**grpo_learning.TABLE, **grpo_runs.TABLE},
}
