"""All tables of effects, by section or component; see `effects`."""

from __future__ import annotations

from collections.abc import Mapping

from effects import Elsewhere, Flip, grpo_learning, keys, run, runners

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere]] = {
    "run": run.TABLE,
    "runners": runners.TABLE,
    "algorithm.grpo": grpo_learning.TABLE,
}
TODO = {(p, k) for p, k in keys() if k not in TABLES.get(p, {})}
