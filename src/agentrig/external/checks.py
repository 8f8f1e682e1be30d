"""What `agentrig doctor` asks of the service of the agent `http`."""

from __future__ import annotations

from collections.abc import Iterator

from agentrig.external.config import HttpConfig, key_headers
from agentrig.findings import Finding, Situation

ASK_S = 10.0
"""Seconds that the service may take."""


def check_service(situation: Situation) -> Iterator[Finding]:
    """Whether the service answers, and whether its time fits into a rollout's."""
    config = situation.plan.configs.get("agent") if situation.plan is not None else None
    if not isinstance(config, HttpConfig):
        return
    yield _answers(config)
    deadline_s = situation.setting("runners", "deadline_s")
    longest_s = config.timeout_s + config.restart_s
    if deadline_s is not None and longest_s >= deadline_s:
        yield Finding.warning(
            "agent service time",
            f"agent.timeout_s + agent.restart_s = {longest_s:g} is not below runners.deadline_s = {deadline_s:g}",
            cure="set one of them lower: else a service that is slow or away ends the runner, with its other rollouts",
        )


def _answers(config: HttpConfig) -> Finding:
    import httpx

    from agentrig.endpoints import without_proxy

    address = config.health or config.url
    without_proxy(address)
    try:
        with httpx.stream("GET", address, headers=key_headers(config), timeout=ASK_S) as reply:
            status, location = reply.status_code, reply.headers.get("location", "")
    except httpx.HTTPError as error:
        evidence = f"{address} does not answer: {error or type(error).__name__}"
        cure = "start the service, or name its address (agent.url); each rollout would fail with `service-down`"
        return Finding.problem("agent service", evidence, cure=cure)
    said = f"{address} answers {status}"
    if 300 <= status < 400:
        return Finding.problem("agent service", said, cure=f"name the address that it moved to: {location}")
    if status in (401, 403):
        cure = "check the service's key (agent.api_key) and its header (agent.key_header)"
        return Finding.problem("agent service", said, cure=cure)
    if status >= 500 or (status >= 400 and config.health):
        return Finding.problem("agent service", said, cure="see the service's log")
    if status == 404:
        cure = "check the path of agent.url; if it takes POST only, name an address that takes GET by agent.health"
        return Finding.warning("agent service", said, cure=cure)
    return Finding.ok("agent service", said)
