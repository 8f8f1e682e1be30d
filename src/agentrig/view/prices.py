"""A price table: what tokens and machines cost, as the user's TOML file says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import ConfigError
from agentrig.rows import utf8_text
from agentrig.settings import setting, structure

MILLION = 1e6

MOST = 1e12
"""The greatest price; a greater one is a slip, and its costs would be infinite."""


@attrs.frozen(kw_only=True)
class TokenPrice:
    """What the tokens of a model cost."""

    prompt: float = setting(help="price of a million prompt tokens", ge=0, le=MOST)
    response: float = setting(help="price of a million response tokens", ge=0, le=MOST)


@attrs.frozen(kw_only=True)
class MachinePrice:
    """What a machine costs."""

    hour: float = setting(help="price of an hour", ge=0, le=MOST)


@attrs.frozen(kw_only=True)
class Prices:
    """A price table: a `TokenPrice` by each model's name, and a `MachinePrice` by each machine's."""

    currency: str = setting("", help="shown behind each cost")
    models: dict[str, Any] = setting(dict, help="[models.NAME] has prompt and response")
    machines: dict[str, Any] = setting(dict, help="[machines.NAME] has hour")


def read_prices(file: Path) -> Prices:
    """Read a price table.

    Raises:
        AgentrigError: It cannot be read, is not UTF-8 or no TOML, it has an unknown key, or a price is missing,
            negative or no number.
    """
    try:
        found = structure(Prices, tomllib.loads(utf8_text(file)), owner="the price table", section=str(file))
    except OSError as error:
        raise ConfigError(f"the price table {file} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the price table {file} is no TOML: {error}") from error

    def priced(cls: Any, section: str, tables: Mapping[str, Any]) -> dict[str, Any]:
        for name, keys in tables.items():
            if not isinstance(keys, dict):
                wanted = "\n".join(f"{field.name} = 1.0" for field in attrs.fields(cls))
                raise ConfigError(f'{file}: {section}.{name} is {keys!r:.80}. Write\n[{section}."{name}"]\n{wanted}')
        return {
            name: structure(cls, keys, owner=f"the price table {file}", section=f"{section}.{name}")
            for name, keys in tables.items()
        }

    models, machines = priced(TokenPrice, "models", found.models), priced(MachinePrice, "machines", found.machines)
    return attrs.evolve(found, models=models, machines=machines)


def priced(row: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    """Return what a run cost: `models`, the tokens of each, `tokens`, all of them, `machine`, and the `total`.

    What has no price is None. The tokens need a price of each model that another server answered for: the run's own
    model may cost no more than its machine. The total needs the price of the machine, too.
    """
    models: dict[str, float | None] = {}
    for model, of in row["usage"].items():
        price = prices.models.get(model)
        spent = None if price is None else of["prompt_tokens"] * price.prompt + of["response_tokens"] * price.response
        models[model] = None if spent is None or of["at_least"] else spent / MILLION
    needed = [cost for model, cost in models.items() if not row["usage"][model]["own"] or model in prices.models]
    known = [cost for cost in needed if cost is not None]
    hour, wall = prices.machines.get(row["machine"]), row["wall_s"]
    machine = None if hour is None or wall is None else hour.hour * wall / 3600
    whole = len(known) == len(needed)
    lacking = [f"model {model}" for model in models if model not in prices.models]
    return {
        "models": models,
        "tokens": sum(known) if needed and whole else None,
        "machine": machine,
        "total": machine + sum(known) if machine is not None and whole else None,
        "no_price": [*lacking, *([f"machine {row['machine']}"] if hour is None else [])],
    }
