"""The agent `langgraph-sql`: the graph of `graph.py` as a component of agentrig."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs

from agentrig import AgentFailure, AgentSpec, Endpoint, RecipeSpec, hookimpl
from agentrig_langgraph_sql.settings import SqlAgentConfig

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

    from agentrig.demonstrations import Demonstrate
    from agentrig_langgraph_sql.graph import Graph


@attrs.frozen
class SqlAgent:
    """Answers a task's question with SQL; called as `agent(task_input, endpoint)`."""

    config: SqlAgentConfig
    _graph: Graph = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_graph", _build_graph(self.config))

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> str:
        """Return the final SQL.

        Args:
            task_input: `question`, and `database`: the path of the SQLite file.
            endpoint: The model. Its sampling fields and headers go with every call.

        Raises:
            openai.OpenAIError: The model's server can't be reached, takes too long, or refused a call.
            AgentFailure: The task lacks a field; or, of kind `llm-error`, the response of the model's server is not a
                completion; or, of kind `database-error`, the database can't be read.
        """
        from langsmith import tracing_context

        from agentrig_langgraph_sql.database import DatabaseBroken
        from agentrig_langgraph_sql.graph import NotACompletion, Question

        missing = [name for name in ("question", "database") if not isinstance(task_input.get(name), str)]
        if missing:
            raise AgentFailure(
                f"langgraph-sql needs the text {' and '.join(missing)} in a task's input, which has"
                f" {', '.join(sorted(task_input)) or 'nothing'}; choose tasks over SQLite databases, such as mini-sql"
            )
        config = self.config
        llm = chat_model(endpoint, max_tokens=config.max_tokens, timeout=config.timeout, max_retries=config.max_retries)
        question = Question(question=task_input["question"], database=task_input["database"])
        try:
            # Prompts are never sent to LangSmith, whatever the environment is: agentrig's tracer records them.
            with tracing_context(enabled=False):
                answer = self._graph.invoke(question, context={"llm": llm})
        except NotACompletion as error:
            raise AgentFailure(str(error), kind="llm-error") from error
        except (DatabaseBroken, FileNotFoundError) as error:
            raise AgentFailure(f"the task's database can't be read: {error}", kind="database-error") from error
        return str(answer["query"])


NAMED = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling fields that `ChatOpenAI` has by name; others go with the request as they are."""


def chat_model(endpoint: Endpoint, *, max_tokens: int, timeout: float, max_retries: int) -> ChatOpenAI:
    """Return LangChain's client of an endpoint, with its sampling; the smaller limit of new tokens holds.

    A process has one for each endpoint: to make one takes a quarter of a call's CPU time.
    """
    sampling = dict(endpoint.sampling)
    limit = min(max_tokens, sampling.pop("max_tokens", None) or max_tokens)
    fields = {name: sampling.pop(name) for name in NAMED if name in sampling}
    return _chat_model(
        json.dumps(
            {
                "model": endpoint.model,
                "base_url": endpoint.base_url,
                "api_key": endpoint.api_key,
                "default_headers": dict(endpoint.headers),
                "timeout": timeout,
                "max_retries": max_retries,
                "max_tokens": limit,
                "extra_body": sampling,
                **fields,
            }
        )
    )


@lru_cache(maxsize=64)
def _chat_model(fields: str) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**json.loads(fields), http_client=_connections())


@lru_cache(maxsize=1)
def _connections() -> Any:
    """Return the process's HTTP client."""
    from openai import DefaultHttpxClient

    return DefaultHttpxClient()


def _forget_connections() -> None:
    """Let a forked process open connections of its own."""
    _chat_model.cache_clear()
    _connections.cache_clear()


os.register_at_fork(after_in_child=_forget_connections)


def _build_graph(config: SqlAgentConfig) -> Graph:
    from agentrig_langgraph_sql.graph import build_graph

    return build_graph(limits=config, prompts=config.preset())


def _mermaid(config: SqlAgentConfig) -> str:
    from agentrig_langgraph_sql.graph import mermaid

    return mermaid(_build_graph(config))


def _demonstrate(config: SqlAgentConfig) -> Demonstrate:
    from agentrig_langgraph_sql.demonstrations import demonstrator

    return demonstrator(config.preset())


def _prompts(config: SqlAgentConfig) -> Mapping[str, str]:
    return config.preset().instructions()


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register `langgraph-sql`."""
    yield AgentSpec(
        name="langgraph-sql",
        summary="Writes SQL for a question, runs it, checks it and rewrites it (LangGraph).",
        config=SqlAgentConfig,
        build=SqlAgent,
        graph=_mermaid,
        # openai imports its resources on the first call only, which would cost every runner a second.
        preload=("agentrig_langgraph_sql.graph", "langchain_openai", "openai.resources", "httpcore"),
        demonstrate=_demonstrate,
        prompts=_prompts,
    )


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register `mini`."""
    from agentrig_langgraph_sql.recipes import specs

    return specs()
