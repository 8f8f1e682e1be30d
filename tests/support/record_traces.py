"""Records the traces of the kit: small agents of five frameworks, against the scripted server.

python tests/support/record_traces.py langgraph openai httpx streaming
python tests/support/record_traces.py agents-sdk      # where `openai-agents` is installed
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx

import agentrig
from agentrig.endpoints import Endpoint
from agentrig.testing.scripted import Reply, scripted_server
from agentrig.traces import Trace
from agentrig.tracing.recording import recording

FOLDER = Path(__file__).parents[2] / "src" / "agentrig" / "testing" / "traces"
QUERY = "SELECT count(*) FROM animal WHERE name = 'Zoë'"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def script(body: Mapping[str, Any]) -> str | Reply:
    """Answer as a model would: call a tool first, write a query, find a fault in it once."""
    last = body["messages"][-1]
    text = str(last.get("content"))
    if body.get("tools") and last["role"] == "user":
        return Reply(tool_calls=[("add", {"a": 19, "b": 23})])
    if "unwell" in text:
        return Reply(status=503, text="the engine is busy")
    if "in two halves" in text:
        return Reply(text="the first half, the second", breaks_after=14)
    if text.startswith("Check"):
        return "INCORRECT: the name" if "Zoe" in text else "CORRECT"
    return QUERY if "again" in text else QUERY.replace("ë", "e")


def langgraph(endpoint: Endpoint) -> str:
    """A graph that writes, checks and rewrites a query."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    llm = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key="none", **endpoint.sampling)
    graph = StateGraph(dict)

    def ask(text: str) -> str:
        return str(llm.invoke([("system", "You write SQL."), ("user", text)]).content)

    graph.add_node("write_query", lambda state: {**state, "query": ask(state["question"])})
    graph.add_node("check_query", lambda state: {**state, "verdict": ask(f"Check {state['query']}")})
    graph.add_node("rewrite_query", lambda state: {**state, "query": ask(f"{state['question']} Write it again.")})
    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "check_query")
    graph.add_conditional_edges("check_query", lambda state: END if state["verdict"] == "CORRECT" else "rewrite_query")
    graph.add_edge("rewrite_query", "check_query")
    return str(graph.compile().invoke({"question": "How many animals are called Zoë?"})["query"])


def openai(endpoint: Endpoint) -> str:
    """A plain loop with a tool; its last call goes to another server, which is not trained."""
    from openai import OpenAI

    client = OpenAI(base_url=endpoint.base_url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is 19 + 23?"}]
    with agentrig.span("solve"):
        for _ in range(4):
            reply = client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=TOOLS, extra_body=dict(endpoint.sampling)
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
            if not message.tool_calls:
                break
    with scripted_server("a summary") as other:
        OpenAI(base_url=other.url, api_key="none").chat.completions.create(
            model="other", messages=[{"role": "user", "content": "Summarize."}]
        )
    return str(messages[-1]["content"])


def plain_httpx(endpoint: Endpoint) -> str:
    """Posts by itself, and tries again when the server is busy."""
    answers = []
    with httpx.Client(timeout=20) as client:
        for content in ("unwell?", "How many animals?", "And again?"):
            body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], **endpoint.sampling}
            reply = client.post(f"{endpoint.base_url}/chat/completions", json=body)
            if reply.status_code == 200:
                answers.append(reply.json()["choices"][0]["message"]["content"])
    return str(answers[-1])


def streaming(endpoint: Endpoint) -> str:
    """Streams, also two calls at once; one stream breaks in its middle."""
    from openai import APIError, AsyncOpenAI

    async def ask(client: Any, content: str) -> str:
        stream = await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": content}],
            stream=True,
            extra_body=dict(endpoint.sampling),
        )
        parts = []
        try:
            async for event in stream:
                parts += [choice.delta.content or "" for choice in event.choices]
        except APIError:
            parts.append(" (broken)")
        return "".join(parts)

    async def run() -> str:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key="none") as client:
            with agentrig.span("write"):
                await asyncio.gather(ask(client, "How many animals?"), ask(client, "in two halves"))
            with agentrig.span("rewrite"):
                return await ask(client, "Write it again.")

    return asyncio.run(run())


def agents_sdk(endpoint: Endpoint) -> str:
    """The OpenAI Agents SDK, with a tool of its own."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key="none")
    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
    agent = Agent(name="calculator", instructions="You calculate.", tools=[add], model=model)
    return str(Runner.run_sync(agent, "What is 19 + 23?").final_output)


FRAMEWORKS: Mapping[str, Callable[[Endpoint], str]] = {
    "langgraph": langgraph,
    "openai": openai,
    "httpx": plain_httpx,
    "streaming": streaming,
    "agents-sdk": agents_sdk,
}


def record(name: str) -> Trace:
    """Run an agent and return its trace."""
    with scripted_server(script) as server:
        endpoint = server.endpoint(temperature=0.7)
        with recording(name, token_ids=True, base_url=endpoint.base_url) as recorder:
            FRAMEWORKS[name](endpoint)
        return recorder.trace()


def main() -> None:
    """Record the traces that the command line names."""
    for name in sys.argv[1:]:
        trace = record(name)
        rows = [attrs.asdict(span) for span in trace.spans]
        start = rows[0]["start"]
        names = {row["id"]: f"{name}-{i}" for i, row in enumerate(rows)}
        for row in rows:
            row["start"], row["end"] = round(row["start"] - start, 3), round(row["end"] - start, 3)
            row["id"], row["parent"] = names[row["id"]], names.get(row["parent"])
        (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=None, separators=(",", ":")) + "\n")
        print(name, [(s.name, s.node, s.error, len(s.attributes.get("response_token_ids") or ())) for s in trace.spans])


if __name__ == "__main__":
    main()
