"""Run by test_lightning.py in a process of its own: what users wrote for Agent Lightning, through the real runtime.

Every attempt to reach anything but this machine, here or in a runner, is written to a file by `sitecustomize`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from agentrig import hookimpl

SITECUSTOMIZE = """
import os, sys

LOCAL = ("127.0.0.1", "localhost", "::1", "", None, b"127.0.0.1", b"localhost")


def watch(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in LOCAL:
        import traceback

        file = os.open(os.environ["AGENTRIG_TEST_NETWORK_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{event} {host}\\n{''.join(traceback.format_stack()[-12:])}\\n".encode())
        os.close(file)
        raise OSError(f"the tests allow no network: {host}")


sys.addaudithook(watch)
"""


class Watch:
    def __init__(self) -> None:
        self.told: list[list[object]] = []

    @hookimpl
    def on_run_start(self, event: Any) -> None:
        self.told.append(["start", event.steps])

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        self.told.append(["rollout", rollout.value])

    @hookimpl
    def on_step_end(self, event: Any) -> None:
        self.told.append(["step", event.step])


def main() -> None:
    """Run everything; the results go to a file as JSON."""
    folder, url, toy = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    mine = str(Path(__file__).parent / "lightning_plugin.py")

    from agentrig import Endpoint
    from agentrig.plan import resolve
    from agentrig.run.training import train
    from agentrig.runners.scorer import Scorer

    found: dict[str, object] = {}

    def plan(*overrides: str, **uses: str):
        own = [f"run.directory={folder}/runs", "run.validation_tasks=2", "run.train_tasks=6", "run.report_tasks=2"]
        if "algorithm" not in uses:
            own.append(f"algorithm.endpoint={url}")
        return resolve("toy", overrides=[*own, *overrides], uses=uses, files=[toy, mine])

    def roll(name: str, **uses: str) -> None:
        resolved = plan(**{"reward": "own", **uses})
        tasks = resolved.build("tasks").load("train")[:6]
        sees_trace = resolved.components["reward"].spec.sees_trace
        scorer = Scorer(resolved.build("reward"), budget_s=5, sees_trace=sees_trace)
        engine, runtime = resolved.engine(scorer=scorer, adapter=resolved.build("adapter"))
        endpoint = Endpoint(base_url=url, model="toy-model", sampling={"temperature": 0.5}, token_ids=True)
        rollouts = []
        runtime.run(lambda: rollouts.extend(engine.run(tasks, n=1, endpoint=endpoint, step=1, mode="train")))
        found[name] = [
            {
                "number": r.task.input["number"],
                "value": r.value,
                "failure": r.failure,
                "message": r.outcome.message,
                "calls": len(r.trace.llm_calls()),
                "temperatures": [c.attributes["request"].get("temperature") for c in r.trace.llm_calls()],
                "names": [s.name for s in r.trace.spans],
                "orphans": len(
                    [s for s in r.trace.spans if s.parent and s.parent not in {x.id for x in r.trace.spans}]
                ),
                "roots": len([s for s in r.trace.spans if not s.parent]),
                "triplets": [
                    {
                        "prompt": bytes(t.prompt_ids).decode(),
                        "response": bytes(t.response_ids).decode(),
                        "logprobs": t.logprobs,
                        "node": t.node,
                        "reward": t.reward,
                    }
                    for t in r.triplets
                ],
            }
            for r in rollouts
        ]

    for agent in ("lit", "lit-async", "lit-emits", "lit-fails", "lit-otel", "lit-agentops", "lit-agentops-async"):
        roll(agent, agent=agent)
    roll("lit-triplets", adapter="lit-triplets", reward="toy-parity")
    roll("lit-all", agent="lit", adapter="lit-all")

    for name, more in {
        "lit-sweep": {},
        "lit-waiting": {},
        "lit-first": {"agent": "lit-prompted", "reward": "own"},
    }.items():
        os.environ["SWEEP_FILE"] = str(folder / f"{name}.json")
        wish = [f"algorithm.endpoint={url}", f"run.name={name}"]
        resolved, watch = plan(*wish, algorithm=name, **more), Watch()
        resolved.registry.add_observer(watch, "watch")
        found[name] = train(resolved)
        found[f"{name}-told"] = watch.told
    found["litellm"] = sorted(m for m in sys.modules if m.split(".")[0] == "litellm")
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
