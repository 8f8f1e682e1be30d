"""A plugin file: an adapter, a reward and agents with faults that a run must name."""

from __future__ import annotations

import random

import agentrig
from agentrig import AdapterSpec, AgentSpec, RewardSpec, Score, hookimpl
from agentrig.adapters import triplet_of


def twice(trace):
    return [t for call in trace.llm_calls() if (t := triplet_of(call, node="write_query")) for _ in range(2)]


def two_names(task_input, endpoint):
    """Ask under another name in every third task."""
    from toy_plugin import ask

    number = task_input["number"]
    with agentrig.span("write_query" if number % 3 else "guess"):
        return ask(endpoint, f"Is {number} odd?")


def pays_odd(task, outcome, budget_s):
    """Pay right answers, and wrong ones that say odd."""
    right = outcome.answer == task.private["parity"]
    return Score.ok(float(right or outcome.answer == "odd"), correct=right)


def draws_lots(task, outcome, budget_s):
    return Score.ok(random.random(), correct=random.random() < 0.5)


@hookimpl
def register_adapters():
    yield AdapterSpec(name="twice", summary="Returns each call two times.", build=lambda config: twice)


@hookimpl
def register_rewards():
    yield RewardSpec(name="pays-odd", summary="Pays wrong answers too.", build=lambda config: pays_odd)
    yield RewardSpec(name="draws-lots", summary="Pays by chance.", build=lambda config: draws_lots)


@hookimpl
def register_agents():
    yield AgentSpec(name="two-names", summary="Asks under two names.", build=lambda config: two_names)
