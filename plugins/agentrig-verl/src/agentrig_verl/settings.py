"""The keys of the algorithm `verl`."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from agentrig import setting
from agentrig.errors import ConfigError
from agentrig_verl import schema, symbols


def _known_to_verl(_config: Any, _field: Any, value: dict[str, Any]) -> None:
    """Check the keys against verl's schema, if verl is installed; a run checks them again.

    An unsupported verl is not asked: errors about its other keys would hide the real cause, which the doctor and a
    run report.
    """
    if not schema.installed() or symbols.lacking():
        return
    try:
        schema.compose(value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("[algorithm] ")) from None


@attrs.frozen(kw_only=True)
class VerlConfig:
    """Settings of `verl`; verl's own keys are in the table `verl`, under verl's names."""

    model: str = setting("", help="the starting model: a Hugging Face directory (no download) or a name on the Hub")
    credit: Literal["rollout", "call"] = setting(
        "rollout",
        help="rollout: each rollout counts once in its group's baseline; call: each trained call does",
        choices=("rollout", "call"),
    )
    negative_scale: float = setting(1.0, help="negative advantages are multiplied by this", ge=0)
    engine: Literal["auto", "forest", "verl"] = setting(
        "auto",
        help="what trains: forest computes tokens that calls share once, verl is verl's own engine, auto: forest where "
        "it is exact",
        choices=("auto", "forest", "verl"),
    )
    merge: bool = setting(True, help="train calls that extend an earlier call's tokens as one sequence")
    runners: str = setting(
        "auto",
        help="where runners run: ray (actors over the cluster's CPUs), local (processes here), auto: ray on a cluster",
        choices=("auto", "ray", "local"),
    )
    runner_cpus: float = setting(0.5, help="CPUs that a runner requests from Ray", ge=0)
    worker_logs: bool = setting(False, help="print what verl's workers and vLLM print")
    verl: dict[str, Any] = setting(
        dict, help="verl's own keys, for example actor_rollout_ref.actor.optim.lr = 1e-6", validator=_known_to_verl
    )
