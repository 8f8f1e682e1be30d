"""The agent as a LangGraph: write → execute → check → (end | rewrite → execute). Needs no run of agentrig."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

from agentrig_spider.queries import sql_of
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import END, START, StateGraph  # noqa: TID253  (only imported when the agent is built)
from langgraph.graph.message import add_messages  # noqa: TID253
from langgraph.graph.state import CompiledStateGraph  # noqa: TID253
from langgraph.runtime import Runtime  # noqa: TID253

import agentrig
from agentrig_langgraph_sql.database import cut, run_query
from agentrig_langgraph_sql.prompts import FULL, Prompts
from agentrig_langgraph_sql.replies import verdict_of
from agentrig_langgraph_sql.schema import schema_text
from agentrig_langgraph_sql.settings import SqlAgentConfig

LEFT_TO_RIGHT = ("graph TD;", "graph LR;")

RECURSION_LIMIT = 100
"""Nodes that one question may pass through; a turn passes three."""


class Question(TypedDict):
    """The graph's input: a question in natural language, and the SQLite file that it is about."""

    question: str
    database: str


class State(Question):
    """The state of the nodes; `messages` are the model's replies, one a call.

    It does not have the schema, which is the same in every node and would be copied into every trace.
    """

    messages: Annotated[list[AnyMessage], add_messages]
    query: str
    result: str
    feedback: str
    correct: bool
    turn: int


class Context(TypedDict):
    """Values that can differ from one call of the graph to the next."""

    llm: BaseChatModel


class NotACompletion(Exception):
    """The model's server answered with something that is not a chat completion."""


Graph = CompiledStateGraph[State, Context, Question, State]


def build_graph(
    llm: BaseChatModel | None = None, *, limits: SqlAgentConfig | None = None, prompts: Prompts = FULL
) -> Graph:
    """Return the agent: `graph.invoke({"question": …, "database": …})["query"]` is the final SQL.

    Args:
        llm: The chat model that the nodes call, for example a `ChatOpenAI`. None if each call passes its own,
            `graph.invoke(question, context={"llm": llm})`, so that the graph is compiled only once.
        limits: Settings of the agent, of which the limits for one question count here.
        prompts: The prompts, and how replies are parsed. In a rollout, `agentrig.prompts()` takes their place.
    """
    limits = limits or SqlAgentConfig()

    def ask(name: str, state: State, runtime: Runtime[Context]) -> AIMessage:
        model = runtime.context["llm"] if runtime.context else llm
        if model is None:
            raise ValueError('the graph was built without a model; call `graph.invoke(question, context={"llm": …})`')
        schema = schema_text(
            state["database"],
            style=prompts.schema_style,
            limit=limits.table_info_truncate,
            sample_rows=limits.sample_rows,
        )
        fields = {
            "question": state["question"],
            "schema": schema,
            "dialect": "SQLite",
            "db_id": Path(state["database"]).stem,
            "query": cut(state.get("query", ""), limits.reply_truncate),
            "result": state.get("result", ""),
            "feedback": cut(state.get("feedback", ""), limits.reply_truncate),
        }
        messages = prompts.template(name, agentrig.prompts()).messages(**fields)
        try:
            return model.invoke(messages)
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # what ChatOpenAI raises when it can't read a response
            raise NotACompletion(
                f"the model's server did not answer with a chat completion ({type(error).__name__}: {error}); "
                "check that its address ends in /v1 and belongs to an OpenAI-compatible server"
            ) from error

    def write_query(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
        reply = ask("write", state, runtime)
        return {"messages": [reply], "query": sql_of(reply.text), "turn": 1}

    def execute_query(state: State) -> dict[str, Any]:
        result = run_query(
            state["database"], state["query"], timeout_s=limits.query_timeout_s, max_rows=limits.max_rows
        )
        return {"result": result.text(limits.execution_truncate, header=prompts.header)}

    def check_query(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
        reply = ask("check", state, runtime)
        return {"messages": [reply], "feedback": reply.text, "correct": verdict_of(reply.text, prompts)}

    def rewrite_query(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
        reply = ask("rewrite", state, runtime)
        former = state["query"] if prompts.fenced else None
        return {"messages": [reply], "query": sql_of(reply.text, former), "turn": state["turn"] + 1}

    def after_check(state: State) -> str:
        done = state["correct"] or state["turn"] >= limits.max_turns
        return END if done else "rewrite_query"

    graph = StateGraph(State, context_schema=Context, input_schema=Question)
    for node in (write_query, execute_query, check_query, rewrite_query):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "execute_query")
    graph.add_edge("execute_query", "check_query")
    graph.add_conditional_edges("check_query", after_check, [END, "rewrite_query"])
    graph.add_edge("rewrite_query", "execute_query")
    return graph.compile(name="langgraph-sql").with_config(recursion_limit=RECURSION_LIMIT)


def mermaid(graph: Graph) -> str:
    """Return the graph as Mermaid text, from left to right."""
    return graph.get_graph().draw_mermaid().replace(*LEFT_TO_RIGHT)
