"""A `LitAgent` as an agent: its spec."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import attrs

from agentrig.plugins.specs import AgentSpec, NoConfig
from agentrig.prompting import misfit
from agentrig.traces import Trace
from agentrig_lightning.instances import Factory, check_form

SPIDER = "VERL_SPIDER_DATA_DIR"
"""Where Agent Lightning's SQL agent looks for Spider."""

SIMPLE = {str, int, float, bool, type(None)}
"""Types, alone or in a union, of arguments that a run file can give."""


def agent(
    cls: Any,
    *,
    name: str,
    summary: str,
    resource: str = "main_llm",
    tracer: Factory | None = None,
    environment: Sequence[str] = (),
    initial_resources: Mapping[str, Any] | None = None,
    hooks: Sequence[Any] = (),
    whole_rows: bool = False,
    answer: Callable[[Trace], Any] | None = None,
) -> AgentSpec:
    """Return the spec of a `LitAgent`.

    Its `training_rollout` gets the task's input, its resources and the rollout: with the mode, the attempt, the
    configuration and the metadata of the store. In any mode but `train` its `validation_rollout` gets them. The number
    that it returns (or emits) is the rollout's answer. The reward `own` uses it as the score; other rewards score the
    answer.

    Every thread of a runner process has an agent of its own; an `async` agent has one for every rollout that runs at
    the same time. So an agent may keep state in `self` during a rollout.

    If it is given by its class, the arguments of its `__init__` that have a default are its keys in a run file:
    `agent.val_temperature=0`.

    Args:
        cls: The `LitAgent` subclass; an instance, which is copied; a function decorated with `agl.rollout`, or one
            that could be; or a function without parameters that makes an instance.
        name: The component's name.
        summary: One line about it.
        resource: The resource name under which the agent looks up the endpoint.
        tracer: A tracer class of Agent Lightning, used instead of agentrig's tracer.
        environment: Environment variables that the agent needs beside `VERL_SPIDER_DATA_DIR`; see `AgentSpec`.
        initial_resources: Further resources, by name, for example a `PromptTemplate`. An algorithm of Agent Lightning
            gives the agent its own resources instead. Templates of the engine `f-string` are the agent's prompts
            (`AgentSpec.prompts`): a run may replace them, and `gepa` and `apo` improve them.
        hooks: `Hook` objects of Agent Lightning, called in the runner process. Every agent has copies of them.
        whole_rows: Whether it gets whole rows, gold columns included, to compute its reward; see `AgentSpec`. Its
            number is then no answer that another reward could judge.
        answer: Called in the runner process with the rollout's trace; returns what other rewards judge, a JSON value,
            or None. The reward `own` still uses the agent's number.

    Raises:
        TypeError: `cls` is something else.
    """
    check_form(cls)
    keys = _keys(cls)

    def build(config: Any) -> Any:
        from agentrig_lightning.calls import LitAgentCall

        return LitAgentCall(
            functools.partial(cls, **attrs.asdict(config, recurse=False)) if attrs.fields(keys) else cls,
            resource=resource,
            initial_resources=initial_resources,
            tracer=tracer() if tracer is not None else None,
            hooks=hooks,
            answer=answer,
            judges=whole_rows or answer is not None,
        )

    return AgentSpec(
        name=name,
        summary=summary,
        config=keys,
        build=build,
        preload=("agentrig_lightning.recorder_tracer", "openai"),
        environment=(SPIDER, *environment),
        whole_rows=whole_rows,
        prompts=_prompts(initial_resources or {}),
    )


def _prompts(resources: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates among resources, as an agent's prompts."""
    templates = {
        name: resource.template for name, resource in resources.items() if getattr(resource, "engine", "") == "f-string"
    }
    return {name: template for name, template in templates.items() if not misfit(template, None)}


def _keys(source: Any) -> type:
    """Return the config class of a `LitAgent`: the arguments of its `__init__` that a run file can give."""
    if not isinstance(source, type):
        return NoConfig
    try:
        hints = get_type_hints(source.__init__)  # type: ignore[misc]
    except Exception:  # a name that exists for the type checker only
        return NoConfig
    found = {
        name: attrs.field(default=p.default, type=hints[name], metadata={"help": f"argument of {source.__name__}"})
        for name, p in inspect.signature(source).parameters.items()
        if p.default is not p.empty and name in hints and set(get_args(hints[name]) or [hints[name]]) <= SIMPLE
    }
    made: type = attrs.make_class(f"{source.__name__}Config", found, frozen=True, kw_only=True)
    return made
