"""Run by test_lightning_triplets.py in processes of their own: one agent under two tracers.

Once under Agent Lightning's own runner, store and AgentOps tracer, and once under agentrig's. The spans of both go
through the same adapters of Agent Lightning.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import agentrig_lightning  # noqa: F401  (before Agent Lightning, which then comes without litellm)

# isort: split
import agentlightning as agl
from agentlightning.adapter.triplet import RewardMatchPolicy, TraceTree
from agentlightning.tracer.base import get_active_tracer
from agentrig_lightning.calls import LitAgentCall
from agentrig_lightning.spans import to_lightning
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from model_server import ModelServer, model_server
from openai import OpenAI

from agentrig.endpoints import Endpoint
from agentrig.tracing.recording import recording

Adapt = Callable[[list[Any]], list[Any]]
IMAGE = [{"type": "text", "text": "Is 3 odd?"}, {"type": "image_url", "image_url": {"url": "file:///a.png"}}]
ASKS = {"logprobs": True, "extra_body": {"return_token_ids": True}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


class State(TypedDict):
    text: str


class Agent(agl.LitAgent[Any]):
    """Calls the model in two nodes of a graph, in a reward operation, and without any; emits rewards between."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        llm = resources["main_llm"]
        model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key="none", temperature=0.5, max_retries=0)
        asking = model.bind(**ASKS)

        def write(state: State) -> State:
            text = asking.invoke("Is 1 odd?").content
            agl.emit_reward(0.1)
            return {"text": str(text)}

        def check(state: State) -> State:
            asking.invoke(f"[no-ids] Is it {state['text']}?")
            agl.emit_reward({"form": 0.2, "length": 0.3}, primary_key="form")
            return {"text": str(asking.invoke([("system", "Judge."), ("user", "Is 2 odd?")]).content)}

        graph = StateGraph(State)
        graph.add_node("write", write)
        graph.add_node("check", check)
        graph.add_edge(START, "write")
        graph.add_edge("write", "check")
        graph.add_edge("check", END)
        handler = self.tracer.get_langchain_handler()
        graph.compile().invoke({"text": ""}, {"callbacks": [handler]})
        with OpenAI(base_url=llm.endpoint, api_key="none") as client:
            with agl.operation(name="agentlightning.reward"):
                self._ask(client, llm.model, "Grade it.")
            self._ask(client, llm.model, IMAGE, temperature=0.7, tools=TOOLS)
            agl.emit_reward(0.4)
            with agl.operation(**{"agent.name": "late"}):
                self._ask(client, llm.model, "Is 4 odd?", top_p=0.9, max_tokens=5)
                agl.emit_reward(0.9)

    def _ask(self, client: OpenAI, model: str, content: Any, **more: Any) -> None:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **ASKS, **more)


def tracer_triplets(**settings: Any) -> Adapt:
    return lambda spans: agl.TracerTraceToTriplet(**settings).adapt(spans)


def trajectory(**settings: Any) -> Adapt:
    """Return a trace tree's triplets with settings that the adapter has no argument for."""

    def adapt(spans: list[Any]) -> list[Any]:
        tree = TraceTree.from_spans(spans)
        tree.repair_hierarchy()
        return tree.to_trajectory(**settings)

    return adapt


SIBLING = RewardMatchPolicy.FIRST_SIBLING
SETTINGS: Mapping[str, Adapt] = {
    "default": tracer_triplets(),
    "one node": tracer_triplets(agent_match="write"),
    "the other node": tracer_triplets(agent_match="^check$"),
    "several nodes": tracer_triplets(agent_match="write|check"),
    "the graph": tracer_triplets(agent_match="LangGraph"),
    "an operation": tracer_triplets(agent_match="late"),
    "no such node": tracer_triplets(agent_match="nobody"),
    "calls in rewards": tracer_triplets(exclude_llm_call_in_reward=False),
    "first sibling": tracer_triplets(reward_match=SIBLING),
    "first sibling in a node": tracer_triplets(reward_match=SIBLING, agent_match="check"),
    "no repair": tracer_triplets(repair_hierarchy=False),
    "no repair, one node": tracer_triplets(repair_hierarchy=False, agent_match="write"),
    "without empty token ids": tracer_triplets(_skip_empty_token_spans=True),
    "another name of calls": tracer_triplets(llm_call_match="embedding"),
    "duplicates stay": trajectory(dedup_llm_call=False),
    "final reward": trajectory(final_reward=1.0),
}


def theirs(server: ModelServer) -> list[Any]:
    llm = agl.LLM(endpoint=server.url, model="m", api_key="none")

    async def run() -> list[Any]:
        store, tracer = agl.InMemoryLightningStore(), agl.AgentOpsTracer()
        runner: Any = agl.LitAgentRunner(tracer)
        with runner.run_context(agent=Agent(), store=store):
            rollout = await runner.step({}, resources={"main_llm": llm})
        assert rollout.status == "succeeded", rollout
        return list(await store.query_spans(rollout.rollout_id))

    return asyncio.run(run())


def ours(server: ModelServer) -> list[Any]:
    assert get_active_tracer() is None
    call = LitAgentCall(Agent)
    endpoint = Endpoint(base_url=server.url, model="m", token_ids=True)
    with recording("r1", token_ids=True, base_url=server.url) as recorder:
        call({}, endpoint)
    return to_lightning(recorder.trace(), "r1", "a")


def comparable(triplet: Any) -> dict[str, Any]:
    """Return a triplet as JSON, without what agentrig does not record: a token's text, and the SDK's headers."""
    found: dict[str, Any] = json.loads(triplet.model_dump_json())
    if "logprobs" in found["response"]:
        found["response"]["logprobs"] = [token["logprob"] for token in found["response"]["logprobs"]]
    found["metadata"]["request"].pop("headers", None)
    return found


def main() -> None:
    """Write the triplets by setting: `theirs FILE` or `ours FILE`."""
    with model_server() as server:
        spans = {"theirs": theirs, "ours": ours}[sys.argv[1]](server)
    found: dict[str, Any] = {key: [comparable(t) for t in adapt(spans)] for key, adapt in SETTINGS.items()}
    found["tree"] = TraceTree.from_spans(spans).names_tuple()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
