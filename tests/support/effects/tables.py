"""All tables of effects, by section or component; see `effects`."""

from __future__ import annotations

from collections.abc import Mapping

from effects import Elsewhere, Flip, grpo_learning, keys

TABLES: Mapping[str, Mapping[str, Flip | Elsewhere]] = {
    "algorithm.grpo": grpo_learning.TABLE,
}
TODO = {(p, k) for p, k in keys() if k not in TABLES.get(p, {})}
