"""All tables of effects, by section or component; see `effects`. Those of `grpo_runs` need whole runs and servers."""

from __future__ import annotations

from collections.abc import Mapping

from effects import (
    Elsewhere,
    Flip,
    Inherited,
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

SAMPLING = {
    *(
        "task_sampling",
        "recheck_every",
        "group_size",
        "temperature",
        "top_p",
        "max_staleness",
        "clip_low",
        "clip_high",
        "loss",
        "rollout_is_threshold",
    )
}
"""The keys of `grpo` that `sft` does not have: it samples nothing."""

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere | Inherited]] = {
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
    "algorithm.apo": prompts.APO,
    "server.endpoint": prompts.ENDPOINT,
    "server.embedded": grpo_runs.SERVER_TABLE,
    "server.vllm": vllm_server.TABLE,
    "algorithm.grpo": {**grpo_learning.TABLE, **grpo_runs.TABLE},
    "algorithm.sft": {
        **{
            key: Inherited("algorithm.grpo")
            for key in {**grpo_learning.TABLE, **grpo_runs.TABLE}
            if key not in SAMPLING
        },
        "demonstrations": Elsewhere(
            "tests/run/test_demonstrated.py::test_accepted_rollouts_of_a_run_are_learned_token_for_token_and_its_model_goes_on",
            "it takes two whole runs",
        ),
    },
}

ENTRIES = {(place, key): entry for place, table in TABLES.items() for key, entry in table.items()}
OF_RUNS = [
    *(("run", key) for key in grpo_runs.RUN_TABLE),
    *(("server.embedded", key) for key in grpo_runs.SERVER_TABLE),
    *(("algorithm.grpo", key) for key in grpo_runs.TABLE),
    *((place, "timeout_s") for place in ("reward.spider-exec", "reward.spider-exec-strict")),
    *(("agent.langgraph-sql", key) for key in ("timeout", "query_timeout_s")),
    *(
        ("tasks.mini-sql", "seed"),
        ("tasks.mini-sql", "cache"),
        ("agent.agent-lightning-1", "time_s"),
        ("algorithm.verl", "merge"),
    ),
]
"""What takes seconds: tests/proofs/test_keys_of_runs.py."""
