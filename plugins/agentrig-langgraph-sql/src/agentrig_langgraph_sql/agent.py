"""The agent `langgraph-sql`: the graph of `graph.py` as a component of agentrig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentrig import AgentFailure, AgentSpec, Endpoint, RecipeSpec, hookimpl, setting
from agentrig_langgraph_sql.prompts import PRESETS, Prompts
from agentrig_langgraph_sql.schema import STYLES

if TYPE_CHECKING:
    from agentrig.demonstrations import Demonstrate
    from agentrig_langgraph_sql.graph import Graph


@attrs.frozen(kw_only=True)
class SqlAgentConfig:
    """Settings of `langgraph-sql`."""

    # 33 turns are 99 nodes, one less than the graph's recursion limit.
    max_turns: int = setting(3, help="full cycles of write, execute and check", ge=1, le=33)
    prompts: str = setting(
        "full", help="full for instruct models; short for the starting model of mini", choices=tuple(PRESETS)
    )
    schema_style: str = setting(
        "auto", help="form of the schema; auto is the form that the prompts expect", choices=("auto", *STYLES)
    )
    table_info_truncate: int = setting(2048, help="greatest length of the schema, in characters", ge=64)
    sample_rows: int = setting(
        0, help="rows of each table that are shown with the schema, within its length", ge=0, le=3
    )
    execution_truncate: int = setting(2048, help="greatest length of a query's result, in characters", ge=64)
    reply_truncate: int = setting(
        4096, help="greatest length of a query or of a check's remarks in the next prompt, in characters", ge=64
    )
    max_tokens: int = setting(2048, help="most new tokens per call; the endpoint may set a lower limit", ge=1)
    query_timeout_s: float = setting(5.0, help="time limit of a query, in seconds", gt=0)
    max_rows: int = setting(1000, help="most rows of a result that are fetched", ge=1)
    llm_timeout_s: float = setting(600.0, help="time limit of each attempt of a call to the model, in seconds", gt=0)
    max_retries: int = setting(
        2, help="further attempts of a call that failed in the network or at an overloaded server", ge=0
    )

    def preset(self) -> Prompts:
        """Return the preset of prompts, with the schema's form as set."""
        preset = PRESETS[self.prompts]
        return preset if self.schema_style == "auto" else attrs.evolve(preset, schema_style=self.schema_style)


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
            httpx.HTTPError: The model's server can't be reached, or takes too long.
            AgentFailure: The task lacks a field; or, of kind `llm-error`, the model's server refused a call, or its
                response is not a completion; or, of kind `database-error`, the database can't be read.
        """
        from langsmith import tracing_context

        from agentrig_langgraph_sql.database import DatabaseBroken
        from agentrig_langgraph_sql.graph import Question
        from agentrig_langgraph_sql.model import LLM, LLMError

        missing = [name for name in ("question", "database") if not isinstance(task_input.get(name), str)]
        if missing:
            raise AgentFailure(
                f"langgraph-sql needs the text {' and '.join(missing)} in a task's input, which has"
                f" {', '.join(sorted(task_input)) or 'nothing'}; choose tasks over SQLite databases, such as mini-sql"
            )
        config = self.config
        max_tokens = min(config.max_tokens, endpoint.sampling.get("max_tokens") or config.max_tokens)
        llm = LLM(
            base_url=endpoint.base_url,
            model=endpoint.model,
            api_key=endpoint.api_key,
            sampling={**endpoint.sampling, "max_tokens": max_tokens},
            headers=endpoint.headers,
            timeout_s=config.llm_timeout_s,
            max_retries=config.max_retries,
        )
        question = Question(question=task_input["question"], database=task_input["database"])
        try:
            # Prompts are never sent to LangSmith, whatever the environment is: agentrig's tracer records them.
            with tracing_context(enabled=False):
                answer = self._graph.invoke(question, context={"llm": llm})
        except LLMError as error:
            raise AgentFailure(str(error), kind="llm-error") from error
        except (DatabaseBroken, FileNotFoundError) as error:
            raise AgentFailure(f"the task's database can't be read: {error}", kind="database-error") from error
        return str(answer["query"])


def _build_graph(config: SqlAgentConfig) -> Graph:
    from agentrig_langgraph_sql.graph import Limits, build_graph

    limits = Limits(
        max_turns=config.max_turns,
        table_info_truncate=config.table_info_truncate,
        sample_rows=config.sample_rows,
        execution_truncate=config.execution_truncate,
        reply_truncate=config.reply_truncate,
        query_timeout_s=config.query_timeout_s,
        max_rows=config.max_rows,
    )
    return build_graph(limits=limits, prompts=config.preset())


def _mermaid(config: SqlAgentConfig) -> str:
    from agentrig_langgraph_sql.graph import mermaid

    return mermaid(_build_graph(config))


def _demonstrate(config: SqlAgentConfig) -> Demonstrate:
    from agentrig_langgraph_sql.demonstrations import demonstrator

    return demonstrator(config.preset())


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Bring `langgraph-sql`."""
    yield AgentSpec(
        name="langgraph-sql",
        summary="Writes SQL for a question, runs it, checks it and rewrites it (LangGraph).",
        config=SqlAgentConfig,
        build=SqlAgent,
        graph=_mermaid,
        preload=("agentrig_langgraph_sql.graph", "httpcore"),
        demonstrate=_demonstrate,
    )


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Bring `mini`."""
    from agentrig_langgraph_sql.recipes import specs

    return specs()
