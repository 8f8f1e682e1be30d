"""A script for Agent Lightning 0.3, as users write them; `test_lightning_trainer.py` changes its import and runs it."""

import asyncio
import json
import os
import sys
import threading

from agentlightning import Trainer  # isort: skip  (first: once changed, it keeps litellm from being imported)
import agentlightning as agl
from openai import AsyncOpenAI

LOCK = threading.Lock()  # what a script has at its top need not be sent to another process


class Noted(agl.Hook):
    """Appends a line to a file; each runner process has a copy."""

    async def on_rollout_start(self, *, agent, runner, rollout):
        self.note("start", rollout)

    async def on_rollout_end(self, *, agent, runner, rollout, spans):
        self.note(f"end {type(agent).__name__}", rollout)

    def note(self, what, rollout):
        with open(os.environ["HOOKS_FILE"], "a") as file:
            file.write(f"{what} {rollout.input['number']} {rollout.mode}\n")


class Formats(agl.LitAgent):
    """Has state, reads the environment of the script, and knows its mode."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def training_rollout(self, task, resources, rollout):
        with LOCK:
            text = resources["prompt"].format(n=task["number"], unit=self.unit)
        agl.emit_annotation({"text": text})
        return 1.0 if text == f"{task['number']} {os.environ['UNIT_WANTED']}" else 0.0

    def validation_rollout(self, task, resources, rollout):
        return 0.5


@agl.rollout
async def formats(task, prompt_template):
    """Asynchronous, a function; it calls a model of its own."""
    async with AsyncOpenAI(base_url=os.environ["MODEL_URL"], api_key="none") as client:
        await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "[no-ids]"}])
    return 1.0 if prompt_template.format(n=task["number"], unit="m") == f"{task['number']} m" else 0.0


def prompt(text):
    return {"prompt": agl.PromptTemplate(template=text, engine="f-string")}


def rollouts(trainer):
    async def read():
        store = trainer.store
        return [
            [r.input["number"], r.mode, r.status, agl.find_final_reward(await store.query_spans(r.rollout_id))]
            for r in await store.query_rollouts()
        ]

    return sorted(asyncio.run(read()))


def main():
    rows = [{"number": i} for i in range(3)]
    fit = Trainer(
        algorithm=agl.Baseline(polling_interval=0.05),
        n_workers=2,
        initial_resources=prompt("{n} {unit}"),
        hooks=Noted(),
        adapter={"agent_match": "write"},
        tracer="agentlightning.OtelTracer",
        strategy="shm",
    )
    assert fit.adapter.agent_match == "write"
    assert fit.n_runners == fit.n_workers == 2
    fit.fit(Formats("km"), rows, val_dataset=[{"number": 9}])
    dev = Trainer(
        initial_resources=prompt("{n} {unit}"), algorithm={"type": "agentlightning.Baseline", "polling_interval": 0.05}
    )
    dev.dev(formats, [{"number": i} for i in range(12)], val_dataset=[{"number": 20}])
    json.dump({"fit": rollouts(fit), "dev": rollouts(dev)}, sys.stdout)


if __name__ == "__main__":
    main()
