"""Runs of the embedded algorithm for the tests of proofs, with a tiny model and real server, adapter and files."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from agentrig_agent_match import AgentMatch, AgentMatchConfig
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.server.handle import Embedded

from agentrig import Endpoint, Outcome, Score, Task, Trace
from agentrig.algorithms import Measurement
from agentrig.credit import GroupConfig, dr_grpo
from agentrig.delivery import Delivery
from agentrig.hardware import Cpu, CpuConfig
from agentrig.rollouts import Rollout
from agentrig.run.gate import Gate
from agentrig.run.loop import Loop
from agentrig.servers import MakeServer, Server, ServerPlan
from agentrig.testing.scripted import LocalServer, QuietHandler, serving
from agentrig.traces import LLM_CALL, Span

CPU = Cpu(config=CpuConfig(threads=1))


class ProofSession:
    """A session whose agents call the real server once, with traces as the tracer records them and the real adapter."""

    def __init__(self, directory: Path, *, checkpoint: Path | None = None, first_step: int = 1, words: int = 1) -> None:
        self.train_tasks = [Task(id=str(i), input={"question": f"name {i} " + "count " * words}) for i in range(6)]
        self.directory, self.hardware, self.seed = directory, CPU, 3
        self.first_step, self.checkpoint, self.stopping, self.solved = first_step, checkpoint, False, False
        self.enough = None
        self.measured: Measurement | None = None
        self.credit = partial(dr_grpo, config=GroupConfig())
        self.steps: list[dict[str, Any]] = []
        self.saved: dict[int, Path] = {}
        self.adapter = AgentMatch(AgentMatchConfig(match=""))
        self.make: MakeServer = partial(Embedded, EmbeddedConfig(batch=8))
        directory.mkdir(exist_ok=True)
        self.delivery, self.resumed = Delivery(directory), checkpoint is not None
        self.auditing, self.start_weights = SimpleNamespace(due=False), ""
        self.gate = Gate()

    @property
    def lines(self) -> Sequence[Any]:
        return self.steps

    def note(self, *_: Any) -> None:
        """Do nothing."""

    check_teacher = record = sketch = plan_steps = note

    def record_start(self, digest: str) -> None:
        self.start_weights = digest

    def start_clock(self) -> None:
        """Nothing of it is timed."""

    def rollouts(self, tasks: Any, *, n: int, endpoint: Any, step: int, mode: Any = "train", **_: Any) -> list[Rollout]:
        (endpoint,) = [endpoint] if isinstance(endpoint, Endpoint) else endpoint
        assert endpoint.token_ids
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        with (
            httpx.Client(base_url=endpoint.base_url, timeout=60, headers=headers) as client,
            ThreadPoolExecutor(4) as pool,
        ):
            jobs = [(task, i) for task in tasks for i in range(n)]
            found = list(pool.map(lambda job: self.one(client, endpoint, step, mode, *job), jobs))
        self.delivery.offer(found)
        self.delivery.settle()
        return found

    def one(self, client: Any, endpoint: Any, step: int, mode: Any, task: Task, i: int) -> Rollout:
        messages = [{"role": "user", "content": task.input["question"]}]
        body = {"model": endpoint.model, "messages": messages, "logprobs": True, "return_token_ids": True}
        body |= endpoint.sampling
        reply = client.post("/chat/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        (choice,) = answer["choices"]
        attributes = {
            "request": body,
            "prompt_token_ids": answer["prompt_token_ids"],
            "response_token_ids": choice["token_ids"],
            "response_logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        }
        call = Span(id=f"{task.id}-{i}", parent=None, name=LLM_CALL, start=0.0, end=0.0, attributes=attributes)
        trace = Trace(rollout_id=f"{step}-{task.id}-{i}", spans=[call])
        outcome, score = self.judged(task, i, mode, body, choice)
        return Rollout(
            id=trace.rollout_id,
            task=task,
            group=task.id,
            mode=mode,
            step=step,
            outcome=outcome,
            score=score,
            trace=trace,
            triplets=() if outcome.failure else self.adapter(trace),
        )

    def judged(self, task: Task, i: int, mode: str, body: Any, choice: Any) -> tuple[Outcome, Score | None]:
        """Return how the i-th rollout of a task ended, and its score."""
        ids = choice["token_ids"]
        return Outcome(answer=choice["message"]["content"]), Score.ok(sum(token % 7 for token in ids) / len(ids))

    def server(self, plan: ServerPlan) -> Server:
        return self.make(plan)

    def validate(self, endpoint: Any, *, step: int) -> float | None:
        self.measured = Measurement(accuracy=1.0 / (1 + step), reward=0.0, n=1)
        return self.measured.accuracy

    def report(self, endpoint: Any, *, when: str, step: int) -> float | None:
        return None

    def end_step(self, step: int, *, metrics: Any, time_s: Any, **_: Any) -> None:
        assert metrics["weight_change"] > 0
        self.steps.append({"step": step, "delivery": self.delivery.line(), "time_s": dict(time_s)})

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool = False) -> Path:
        directory = self.directory / f"step-{step}-{len(self.saved)}"
        write(directory)
        self.saved[step] = directory
        return directory


def run(directory: Path, model: Path, session: ProofSession | None = None, **settings: Any) -> ProofSession:
    settings = {"steps": 2, "tasks_per_step": 3, "group_size": 4, "lr": 1e-3, "max_tokens": 6, **settings}
    session = session or ProofSession(directory)
    Loop(Grpo(GrpoConfig(model=str(model), **{"validate_every": 0, **settings}))).run(session)  # type: ignore[arg-type]
    return session


class Backend:
    """A server behind a balancer: its address and key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key


class Balancer(LocalServer):
    """A real load balancer: each connection goes to the next backend. `refuse` names paths that it answers with 404."""

    def __init__(self, backends: Sequence[Backend], refuse: Sequence[str] = ()) -> None:
        super().__init__(_Passing)
        self.turns, self.refuse = itertools.cycle(backends), refuse
        self.lock = threading.Lock()


class _Passing(QuietHandler):
    server: Balancer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.backend = next(self.server.turns)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.removeprefix("/v1")
        if path in self.server.refuse:
            self.reply(404, {"error": f"no {path} here"})
            return
        headers = {"Authorization": f"Bearer {self.backend.api_key}", "Content-Type": "application/json"}
        reply = httpx.post(self.backend.base_url + path, content=body, headers=headers, timeout=60)
        self.reply(reply.status_code, reply.content)


def balanced(backends: Sequence[Backend], refuse: Sequence[str] = ()) -> AbstractContextManager[Balancer]:
    return serving(Balancer(backends, refuse))
