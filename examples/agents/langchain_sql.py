"""LangChain's SQL toolkit, unchanged: `agentrig dev mini --plugin examples/agents/langchain_sql.py --agent toolkit`.

The agent is LangChain's tool-calling agent over `SQLDatabaseToolkit`, as its documentation builds it. Only the address
of the model comes from agentrig. Its answer is the last query that it ran. docs/how-to/existing-agent.md has the
commands that make a small model for it and train it.
"""

from __future__ import annotations

from agentrig import AgentSpec, hookimpl
from agentrig.demonstrations import Reply, gold_of

PROMPT = """\
You answer questions about an SQLite database with the tools at hand. List its tables, read the schema of those that \
you need, then run one query that returns what the question asks for and nothing else. Only read. When a query fails, \
mend it and run it again. When its result answers the question, say so in a few words."""


def toolkit(task_input, endpoint):
    """Answer a question with SQL: the last query that the agent ran."""
    from langchain.agents import create_agent
    from langchain_community.agent_toolkits import SQLDatabaseToolkit
    from langchain_community.utilities import SQLDatabase
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key)
    database = SQLDatabase.from_uri(f"sqlite:///file:{task_input['database']}?mode=ro&uri=true")
    agent = create_agent(model, SQLDatabaseToolkit(db=database, llm=model).get_tools(), system_prompt=PROMPT)
    question = {"messages": [{"role": "user", "content": task_input["question"]}]}
    answer = agent.invoke(question, {"recursion_limit": 20})
    calls = [call for message in answer["messages"] for call in getattr(message, "tool_calls", ())]
    queries = [call["args"].get("query", "") for call in calls if call["name"] == "sql_db_query"]
    return queries[-1] if queries else ""


def demonstrate(task, call):
    """Say what a small model should: run the gold query, end. It learns the few names of mini-sql by heart."""
    query = {"name": "sql_db_query", "arguments": {"query": gold_of(task)}}
    return Reply(content="Done.") if call.turn else Reply(tool_calls=[query])


@hookimpl
def register_agents():
    """Register the agent `toolkit`."""
    yield AgentSpec(
        name="toolkit",
        summary="LangChain's SQL toolkit with its tool-calling agent.",
        build=lambda config: toolkit,
        demonstrate=lambda config: demonstrate,
        preload=("langchain.agents", "langchain_community.agent_toolkits", "langchain_openai", "openai.resources"),
    )
