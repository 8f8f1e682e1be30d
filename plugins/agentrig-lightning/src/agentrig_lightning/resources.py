"""Agent Lightning's rollouts and resources as jobs and endpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning import (
    LLM,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    RolloutConfig,
)
from pydantic import TypeAdapter

from agentrig.endpoints import Endpoint, GatewayAddress
from agentrig.pools import Job

OWN_FIELDS = "agentrig"
"""The key of an LLM's sampling parameters that has what Agent Lightning's resource has no field for."""

NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
"""The endpoint of a rollout whose resources have no LLM."""

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


def lightning_llm(endpoint: Endpoint, *, own_fields: bool = True) -> LLM:
    """Return an endpoint as Agent Lightning's resource.

    With `own_fields`, the sampling parameters have agentrig's extra fields. A user's agent must not get them: it may
    pass all sampling parameters to its client.
    """
    own = {"headers": dict(endpoint.headers), "token_ids": endpoint.token_ids}
    if endpoint.gateway is not None:
        own["gateway"] = {"url": endpoint.gateway.url, "token": endpoint.gateway.token}
    extra = {OWN_FIELDS: own} if own_fields else {}
    return LLM(
        endpoint=endpoint.base_url,
        model=endpoint.model,
        api_key=endpoint.api_key,
        sampling_parameters={**endpoint.sampling, **extra},
    )


def templates_of(prompts: Mapping[str, str]) -> dict[str, PromptTemplate]:
    """Return an agent's prompts as Agent Lightning's resources."""
    return {name: PromptTemplate(template=text, engine="f-string") for name, text in prompts.items()}


def endpoint_of(resources: Mapping[str, Any], rollout_id: str, attempt_id: str) -> Endpoint:
    """Return the endpoint of a rollout: agentrig's own LLM, or else the first, as in Agent Lightning's own functions.

    A `ProxyLLM` gives the address of this attempt.
    """
    for resource in sorted(resources.values(), key=lambda r: OWN_FIELDS not in getattr(r, "sampling_parameters", {})):
        if isinstance(resource, LLM):
            parameters = dict(resource.sampling_parameters)
            extra = parameters.pop(OWN_FIELDS, {})
            return Endpoint(
                base_url=resource.get_base_url(rollout_id, attempt_id),
                model=resource.model,
                api_key=resource.api_key or "none",
                sampling=parameters,
                headers=extra.get("headers", {}),
                token_ids=extra.get("token_ids", True),
                gateway=GatewayAddress(**extra["gateway"]) if "gateway" in extra else None,
            )
    return NOWHERE


def has_llm(resources: Mapping[str, Any]) -> bool:
    """Return whether there is an LLM among resources."""
    return any(isinstance(resource, LLM) for resource in resources.values())


def sampling_of(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields of the first LLM among resources; empty without one."""
    found: Mapping[str, Any] = next((r.sampling_parameters for r in resources.values() if isinstance(r, LLM)), {})
    return {name: value for name, value in found.items() if name != OWN_FIELDS}


def job_of(attempted: AttemptedRollout, update: Any) -> Job:
    """Return the job of an attempt.

    The resources of its `ResourcesUpdate`, if there is one, travel with the job, except those that agentrig itself
    stored: its job has the endpoint and the prompts, and nothing else.
    """
    resources: Mapping[str, Any] = update.resources if update is not None else {}
    own = any(isinstance(r, LLM) and OWN_FIELDS in r.sampling_parameters for r in resources.values())
    attempt = attempted.attempt
    return Job(
        id=attempted.rollout_id,
        input=attempted.input,
        endpoint=endpoint_of(resources, attempted.rollout_id, attempt.attempt_id),
        mode=attempted.mode,
        attempt=attempt.sequence_id,
        attempt_id=attempt.attempt_id,
        config=attempted.config.model_dump(),
        metadata=attempted.metadata,
        resources={} if own else {name: r.model_dump() for name, r in resources.items()},
        resources_id=update.resources_id if update is not None else None,
        prompts={name: r.template for name, r in resources.items() if own and isinstance(r, PromptTemplate)},
    )


def resources_of(job: Job) -> NamedResources:
    """Return the resources that an algorithm of Agent Lightning gave a job."""
    return _RESOURCES.validate_python({name: dict(value) for name, value in job.resources.items()})


def rollout_of(job: Job, *, start: float) -> AttemptedRollout:
    """Return a job as the rollout that an agent of Agent Lightning gets; `start` is Unix time in seconds."""
    attempt = Attempt(
        rollout_id=job.id, attempt_id=job.attempt_id or f"{job.id}-0", sequence_id=job.attempt, start_time=start
    )
    mode: Any = job.mode
    return AttemptedRollout(
        rollout_id=job.id,
        input=job.input,
        start_time=start,
        mode=mode,
        resources_id=job.resources_id,
        config=RolloutConfig(**job.config),
        metadata=dict(job.metadata) if job.metadata is not None else None,
        attempt=attempt,
    )
