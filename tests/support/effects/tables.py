"""All tables of effects, by section or component; see `effects`."""

from __future__ import annotations

from collections.abc import Mapping

from effects import Elsewhere, Flip, agent, grpo_learning, hardware, keys, run, runners, tasks

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere]] = {
    "run": run.TABLE,
    "runners": runners.TABLE,
    "agent.langgraph-sql": agent.TABLE,
    **tasks.TABLES,
    **hardware.TABLES,
    "algorithm.grpo": grpo_learning.TABLE,
}
TODO = {(p, k) for p, k in keys() if k not in TABLES.get(p, {})}
