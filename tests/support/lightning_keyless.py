"""A LitAgent as upstream's LitSQLAgent is: its key is `OPENAI_API_KEY` or "dummy", and it hides what fails.

It reads real Spider by `VERL_SPIDER_DATA_DIR`, in another folder for training than for validation. Its reward gives
partial credit, so that the small model of `mini`, which never gets a query right here, has something to learn.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Any, TypedDict

import agentlightning as agl
import agentrig_lightning as lightning
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from agentrig import hookimpl


class State(TypedDict, total=False):
    """What a node reads and writes."""

    question: str
    query: str


class KeylessAgent(agl.LitAgent[dict[str, Any]]):
    """Asks for a query, runs it, and asks once more if it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = os.environ.get("VERL_SPIDER_DATA_DIR", "data")

    def rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        """Return the reward, or None if a call failed."""
        llm: Any = resources["main_llm"]
        databases = "database" if rollout.mode == "train" else "test_database"
        database = os.path.join(self.folder, databases, task["db_id"], f"{task['db_id']}.sqlite")
        if not os.path.exists(database):
            return None
        model = ChatOpenAI(
            model=llm.model,
            base_url=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),  # type: ignore[attr-defined]
            api_key=os.environ.get("OPENAI_API_KEY", "dummy"),  # type: ignore[arg-type]
            temperature=llm.sampling_parameters.get("temperature", 0.0),
            max_retries=0,
            max_tokens=40,
        )
        handler = self.tracer.get_langchain_handler()
        try:
            state = graph(model, database).invoke(
                {"question": task["question"]}, {"callbacks": [handler] if handler else []}
            )
        except Exception:
            return None
        query = state["query"]
        return 1.0 if query == task["query"] else len(set(query) & set(task["query"])) / 100


def graph(model: ChatOpenAI, database: str) -> Any:
    """Return write_query, and rewrite_query after a query that fails."""

    def write_query(state: State) -> State:
        return {"query": str(model.invoke(state["question"]).content)}

    def rewrite_query(state: State) -> State:
        return {"query": str(model.invoke(f"{state['query']} fails. {state['question']}"[:400]).content)}

    def next_node(state: State) -> str:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            try:
                connection.execute(state["query"])
            except (sqlite3.Error, sqlite3.Warning):
                return "rewrite_query"
        return END

    builder = StateGraph(State)
    builder.add_node(write_query)
    builder.add_node(rewrite_query)
    builder.add_edge(START, "write_query")
    builder.add_conditional_edges("write_query", next_node)
    return builder.compile()


@hookimpl
def register_agents() -> Any:
    """Register the agent, in the one line that the docs show."""
    yield lightning.agent(KeylessAgent, name="keyless", summary="Has no key.", whole_rows=True)
