"""Section `[gateway]` of a run, and the models behind the gateway: the run's own, and others that are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.secrets import Secret, http_address
from agentrig.settings import setting, structure

POLICY = "policy"
"""What `[gateway.models]` calls the run's model."""

FORM = (
    'write NAME = "policy" for the run\'s model, or NAME = {base_url = "…/v1", model = "…", api_key_env = "VARIABLE"}'
)


@attrs.frozen(kw_only=True)
class FixedModel:
    """A model that agents may call and that is not trained."""

    base_url: str = setting(help="the address of its server, up to and including /v1", validator=http_address)
    model: str = setting("", help="its name there; empty for the name that the agent sends")
    api_key_env: str = setting("", help="the environment variable of the run that has its key; empty if it needs none")
    api: str = setting(
        "chat",
        choices=("chat", "own"),
        help="chat: calls of the APIs Responses and Messages become chat completions, as for the run's model; own: its "
        "server has these APIs itself, and gets such calls as they are",
    )

    def endpoint(self, name: str) -> Endpoint:
        """Return its endpoint, with its key, for the name that agents send."""
        key = Secret.read({"env": self.api_key_env}) if self.api_key_env else None
        return Endpoint.at(self.base_url, self.model or name, key)


KEYS = tuple(field.name for field in attrs.fields(FixedModel))


def models_of(table: Mapping[str, Any]) -> dict[str, FixedModel | None]:
    """Return the fixed model of each name, None for the run's model.

    Args:
        table: `[gateway.models]`. A name with a dot and a key of `FixedModel`, as an override has it, is that key.
    """
    values: dict[str, Any] = {}
    for name, value in table.items():
        model, dot, key = name.rpartition(".")
        if dot and key in KEYS and value != POLICY:
            inner = values.setdefault(model, {})
            if not isinstance(inner, dict):
                raise ValueError(f"models has {model} twice: as {inner!r} and as a table")
            inner[key] = value
        else:
            values[name] = dict(value) if isinstance(value, Mapping) else value
    return {name: _model(name, value) for name, value in values.items()}


def _model(name: str, value: Any) -> FixedModel | None:
    if value == POLICY:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"models.{name} = {value!r}: {FORM}")
    if "api_key" in value:
        raise ValueError(f"models.{name} has a key in it: name the variable that holds it, by api_key_env")
    return structure(FixedModel, value, owner=f"the model {name}", section=f"gateway.models.{name}")


def _checked(_config: Any, _field: Any, value: dict[str, Any]) -> None:
    """Reject models of another form, and a key that is not there."""
    for name, model in models_of(value).items():
        if model is not None:
            model.endpoint(name)


@attrs.frozen(kw_only=True)
class GatewaySettings:
    """Section `[gateway]`: the proxy that records the calls of agents which run outside the runner's process."""

    use: str = setting(
        "auto",
        help="whether agents call the model through the gateway; auto: if the agent's spec says calls=gateway, "
        "or if there are models",
        choices=("auto", "on", "off"),
    )
    host: str = setting("127.0.0.1", help="address that the gateway listens on; 0.0.0.0 for agents of other machines")
    port: int = setting(0, help="port that the gateway listens on; 0 for a free one", ge=0, le=65535)
    sampling: bool = setting(
        True, help="whether the gateway adds the run's sampling fields that an agent's request lacks"
    )
    body_mb: int = setting(16, help="longest body of an agent's request, MiB", ge=1, le=1024)
    models: dict[str, Any] = setting(
        dict,
        help='the models that agents may name: NAME = "policy" for the run\'s, which is trained, or a table with '
        "base_url, model, api_key_env and api for one that is not",
        validator=_checked,
    )

    @property
    def named(self) -> dict[str, FixedModel | None]:
        """The fixed model of each name; None for the run's."""
        return models_of(self.models)
