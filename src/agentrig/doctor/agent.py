"""The check of the agent: it plays one training task, and the adapter says which of its calls would be trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs

from agentrig.credit import TurnConfig, unscored_calls
from agentrig.demonstrations import Call, Reply
from agentrig.errors import AgentrigError
from agentrig.findings import Finding, Situation
from agentrig.plugins.auto import OWN, PROCESSES
from agentrig.run.demonstration_server import demonstrating
from agentrig.run.evaluate import evaluate
from agentrig.run.guards import unseen_calls, untrained_calls, with_token_ids
from agentrig.run.metrics import reason_of
from agentrig.run.splits import read_split, split_of
from agentrig.runners.processes import not_installed
from agentrig.tasks import Task
from agentrig.text import amount

DEADLINE_S = 15.0
"""Seconds that the agent gets for the task."""


def check_agent(situation: Situation) -> Iterator[Finding]:
    """Would calls of this agent be trained on? A local server says the right answer, where the task tells it."""
    plan = situation.plan
    if plan is None or not plan.runners.n or plan.components["runners"].spec.name not in (OWN, PROCESSES):
        return
    logger = logging.getLogger("agentrig")
    level = logger.level
    try:
        tasks = plan.tasks()
        rows = read_split(tasks, split_of(plan.run, tasks, "train"), who=plan.whose_tasks)[:1]
        says, _ = plan.demonstrator()

        def answer(task: Task, call: Call) -> Reply | str:
            try:
                return says(task, call) or ""
            except Exception:  # no gold, or no demonstration of this call: any answer shows which call was made
                return "?"

        fewer = attrs.evolve(plan.runners, n=1, deadline_s=min(DEADLINE_S, plan.runners.deadline_s), retries=0)
        short = attrs.evolve(plan, runners=fewer, observers=())
        logger.setLevel(logging.ERROR)  # a run says its warnings itself
        with demonstrating(rows, answer, seed=0) as (endpoints, _):
            (rollout,) = evaluate(
                short, tasks=rows, endpoint=endpoints, mode="dev", as_mode="train", keep=True
            ).rollouts
        (rollout,) = with_token_ids([rollout], plan.build("adapter"))
    except AgentrigError as error:
        yield attrs.evolve(Finding.of_error("agent", error), result="warning")
        return
    finally:
        logger.setLevel(level)
    adapter, calls = plan.components["adapter"].spec, list(rollout.trace.llm_calls())
    why = unseen_calls([rollout]) or (untrained_calls([rollout], adapter=adapter)[0] if calls else "")
    if why:
        first, _, rest = why.partition("\n")
        evidence = f"it played one training task, and none of its calls would be trained on. {first}"
        yield Finding.warning("agent", evidence, cure=" ".join(rest.split()))
    elif not calls:
        evidence = f"it could not play a training task without a model: {rollout.failure}: {reason_of(rollout)}"
        yield Finding.warning("agent", evidence, cure="see it with agentrig dev")
    else:
        kept = f"{len(rollout.triplets)} of {amount(len(calls), 'call')} to the model"
        yield Finding.ok("agent", f"it played one training task: {kept} would be trained on ({adapter.name})")
        if isinstance(plan.configs["credit"], TurnConfig) and (unscored := unscored_calls([rollout])):
            evidence, cure = unscored.split(": ", 1)
            yield Finding.warning("agent", evidence, cure=cure)
    spec: Any = plan.components["agent"].spec
    if absent := not_installed(spec.preload):
        evidence = f"its `preload` has {', '.join(absent)}, not installed: no runner can import it beforehand"
        yield Finding.warning("agent", evidence, cure="install it, or take it out of `preload`")
