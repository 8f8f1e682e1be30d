"""All tables of effects, by section or component; see `effects`. Those of `grpo_runs` need whole runs and servers."""

from __future__ import annotations

from collections.abc import Mapping

from effects import (
    Elsewhere,
    Flip,
    agent,
    credits,
    gateway,
    grpo_learning,
    grpo_runs,
    hardware,
    programs,
    prompts,
    rewards,
    run,
    runners,
    services,
    tasks,
    verl,
    vllm_server,
)

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere]] = {
    "run": {**run.TABLE, **grpo_runs.RUN_TABLE},
    "runners": runners.TABLE,
    "gateway": {
        **gateway.TABLE,
        "models": Elsewhere(
            "tests/gateway/test_models.py::test_names_lead_to_their_models_and_only_the_policys_tokens_are_recorded",
            "it needs several servers",
        ),
    },
    "runners.lightning": runners.LIGHTNING_TABLE,
    "runners.ray": runners.RAY_TABLE,
    "agent.langgraph-sql": agent.TABLE,
    "agent.command": programs.TABLE,
    "agent.agent-lightning-1": programs.LIGHTNING_V1,
    "agent.http": services.TABLE,
    **rewards.TABLES,
    **credits.TABLES,
    **tasks.TABLES,
    **hardware.TABLES,
    "algorithm.verl": verl.TABLE,
    "algorithm.gepa": prompts.TABLE,
    "server.endpoint": prompts.ENDPOINT,
    "server.embedded": grpo_runs.SERVER_TABLE,
    "server.vllm": vllm_server.TABLE,
    "algorithm.grpo": {**grpo_learning.TABLE, **grpo_runs.TABLE},
}

ENTRIES = {(place, key): entry for place, table in TABLES.items() for key, entry in table.items()}
OF_RUNS = [
    *(("run", key) for key in grpo_runs.RUN_TABLE),
    *(("server.embedded", key) for key in grpo_runs.SERVER_TABLE),
    *(("algorithm.grpo", key) for key in grpo_runs.TABLE),
]
