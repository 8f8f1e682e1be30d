"""Agent Lightning's own runner, joining a store by hand, without agentrig. Arguments: the store's URL, a worker id."""

from __future__ import annotations

import asyncio
import sys

from agentlightning import AgentOpsTracer, LightningStoreClient, LitAgent, LitAgentRunner
from openai import OpenAI


class Parity(LitAgent):
    """Asks the model whether a number is odd; the reward is whether it was right."""

    def rollout(self, task, resources, rollout):
        if task["number"] == 5:
            raise KeyError("no such number")
        llm = resources["main_llm"]
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
        question = [{"role": "user", "content": f"Is {task['number']} odd?"}]
        reply = client.chat.completions.create(model=llm.model, messages=question, **llm.sampling_parameters)
        return float((reply.choices[0].message.content == "odd") == (task["number"] % 2 == 1))


async def main() -> None:
    runner = LitAgentRunner(AgentOpsTracer(), poll_interval=0.3, interval_jitter=0.0, heartbeat_interval=1.0)
    store = LightningStoreClient(sys.argv[1], retry_delays=(), health_retry_delays=())
    with runner.run_context(agent=Parity(), store=store, worker_id=int(sys.argv[2])):
        await runner.iter()


if __name__ == "__main__":
    asyncio.run(main())
