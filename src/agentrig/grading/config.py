"""The keys of the rewards `weighted` and `judge`; every command imports this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from agentrig.errors import nearest
from agentrig.secrets import Secret
from agentrig.settings import setting

PARTS = ("input", "answer", "private")
"""What the judge may be shown of a rollout."""

HOW = "write parts = {NAME = WEIGHT}, or a table [reward.parts.NAME] with weight and the keys of the reward"


@attrs.frozen(kw_only=True)
class WeightedConfig:
    """Keys of `weighted`."""

    parts: dict[str, Any] = setting(
        dict,
        help="the rewards to add up: NAME = WEIGHT, or a table with `weight` (1.0), `use` (NAME) and the reward's keys",
    )
    primary: str = setting("", help="the part that decides what counts as correct; by default the first")


def tables(config: WeightedConfig) -> dict[str, dict[str, Any]]:
    """Return the table of each part; keys with dots, as overrides have them, are those of inner tables.

    Raises:
        ValueError: There are no parts, a part is neither a number nor a table, or `primary` is no part.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in config.parts.items():
        name, *path = name.split(".")
        if isinstance(value, Mapping) and not path:
            found.setdefault(name, {}).update(value)
            continue
        table = found.setdefault(name, {})
        *outer, key = path or ["weight"]
        for each in outer:
            table = table.setdefault(each, {})
        table[key] = value
    if not found:
        raise ValueError(f"there are no parts: {HOW}")
    for name, table in found.items():
        weight = table.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"the weight of {name} is {weight!r}; it must be a finite number: {HOW}")
    if config.primary and config.primary not in found:
        raise ValueError(f'primary = "{config.primary}" is no part.{nearest(config.primary, found)}')
    return found


def parts(config: WeightedConfig) -> dict[str, dict[str, Any]]:
    """Return the keys of each part, for the registry."""
    return {name: {k: v for k, v in table.items() if k != "weight"} for name, table in tables(config).items()}


def weights(config: WeightedConfig) -> dict[str, float]:
    """Return the weight of each part."""
    return {name: float(table.get("weight", 1.0)) for name, table in tables(config).items()}


@attrs.frozen(kw_only=True)
class JudgeConfig:
    """Keys of `judge`."""

    base_url: str = setting(help="the endpoint, up to and including /v1")
    model: str = setting(help="the model's name there")
    api_key: Secret | None = setting(None, secret=True, help="the endpoint's key")
    rubric: str = setting("", help="how to grade: what gets which grade")
    rubric_file: str = setting("", help="a file with the rubric, instead of rubric")
    low: float = setting(0.0, help="the lowest grade; a reward of 0")
    high: float = setting(1.0, help="the highest grade; a reward of 1")
    correct_at: float = setting(1.0, help="an answer counts as correct from this reward on", ge=0, le=1)
    shows: list[str] = setting(
        lambda: list(PARTS), help="what the judge sees: input, answer, private (the task's gold, which no agent sees)"
    )
    structured: bool = setting(True, help="ask for the grade by response_format with a JSON schema")
    max_calls: int = setting(0, help="most requests of one run; what comes after is not scored. 0 for no limit", ge=0)
    concurrency: int = setting(8, help="requests at the same time", ge=1)
    cache: str = setting("", help="a file that remembers grades from run to run; empty: only within the run")
