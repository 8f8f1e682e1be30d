"""`agl.VERL(config)` as the algorithm `verl` of agentrig-verl, with the same configuration."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import attrs

from agentrig.errors import AgentrigError
from agentrig.plugins.specs import AlgorithmSpec

log = logging.getLogger(__name__)

MODEL = "actor_rollout_ref.model.path"
PLUGIN = "agentrig_verl"


def is_verl(source: Any) -> bool:
    """Return whether something is an `agl.VERL`, with its configuration."""
    return not isinstance(source, type) and hasattr(source, "agentrig_keeps")


def verl_spec(verl: Any, *, name: str, summary: str) -> AlgorithmSpec:
    """Return the spec of `verl` with the configuration as its defaults; a run sets other values by key.

    Keys that agentrig replaces by a part of its own are left out; the log says which, and why.

    Raises:
        AgentrigError: agentrig-verl is not installed, or `trainer_cls` or `daemon_cls` is given.
    """
    if verl.trainer_cls is not None or verl.daemon_cls is not None:
        raise AgentrigError(
            "agl.VERL: trainer_cls and daemon_cls are parts of Agent Lightning's trainer, which agentrig-verl "
            "replaces: leave them out, or write an algorithm of your own (docs/algorithms.md)"
        )
    try:
        plugin: Any = importlib.import_module(PLUGIN)
        schema: Any = importlib.import_module(f"{PLUGIN}.schema")
    except ModuleNotFoundError as error:
        raise AgentrigError(
            "agl.VERL(config) runs on agentrig-verl, which is not installed: pip install agentrig-verl"
        ) from error
    spec: AlgorithmSpec = next(iter(plugin.register_algorithms()))
    keys = dict(schema.flatten(verl.config))
    model = str(keys.pop(MODEL, ""))
    for key in [key for key in keys if key.startswith("agentlightning.") or schema.ignored(key) is not None]:
        why = schema.ignored(key) or "it belongs to Agent Lightning's own trainer"
        log.info("%s leaves out %s = %r: %s", name, key, keys.pop(key), why)
    return attrs.evolve(spec, name=name, summary=summary, config=_with_defaults(spec.config, schema, model, keys))


def _with_defaults(base: Any, schema: Any, model: str, keys: Mapping[str, Any]) -> type:
    """Return the config class with other defaults; keys of a run are added to those of the configuration."""
    fields = attrs.fields_dict(attrs.resolve_types(base))

    def merged(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**keys, **schema.flatten(given)}

    changed: dict[str, Any] = {
        "model": attrs.field(default=model, type=str, metadata=fields["model"].metadata),
        "verl": attrs.field(
            factory=dict,
            type=fields["verl"].type,
            metadata=fields["verl"].metadata,
            converter=merged,
            validator=fields["verl"].validator,
        ),
    }
    made: type = attrs.make_class("VerlConfig", changed, bases=(base,), frozen=True, kw_only=True, slots=True)
    return made
