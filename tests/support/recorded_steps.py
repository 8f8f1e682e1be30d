"""Training steps over recorded rollouts, with a run's own session, engine, adapter, `grpo` and learner.

Only the agents and the model server are left out, so that a step takes a moment and a fault can be planted anywhere.
"""

from __future__ import annotations

import copy
import json
import queue
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.naming import model_directory

from agentrig import Endpoint, Outcome, Score, Span, Task, Trace
from agentrig.hardware import Cpu, CpuConfig
from agentrig.plan import resolve
from agentrig.pools import Job, Result
from agentrig.run.directory import RunDirectory
from agentrig.run.loop import Loop
from agentrig.run.session import RunSession
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.scorer import Scorer
from agentrig.traces import LLM_CALL, NODE, SERVER

TASKS = [Task(id=f"task-{i}", input={"kind": kind}) for i, kind in enumerate(["plain", "plain", "odd", "same"])]
"""Rollouts of `plain` tasks have two trained calls and one of another node; `odd` ones also have a call that failed,
one to another server and one without token ids, and one rollout of four fails; `same` ones all get the same reward."""

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m", sampling={})


class Recorded:
    """Replaces the runtime: all its rollouts are recorded."""

    warnings = ()

    def __init__(self, *, logprobs: bool) -> None:
        self._random, self._logprobs = random.Random(5), logprobs

    def check(self) -> None:
        """The run goes on."""

    def submit(self, jobs: Sequence[Job], results: queue.SimpleQueue[Any]) -> None:
        for place, job in enumerate(jobs):
            results.put(self._result(job.id, job.input["kind"], place % 4))

    def _result(self, rollout_id: str, kind: str, place: int) -> Result:
        spans = [Span(id="root", parent=None, name="rollout", start=0.0, end=9.0)]
        for node in ("write_query", "rewrite_query", "check_query"):
            parent = f"n{len(spans)}"
            attributes: dict[str, Any] = {NODE: node}
            spans.append(Span(id=parent, parent="root", name="chain.chain", start=1, end=2, attributes=attributes))
            spans.append(self._call(f"c-{node}", parent, node))
        if kind == "odd":
            parent = next(s.id for s in spans if s.node == "write_query")
            spans.append(Span(id="c-broken", parent=parent, name=LLM_CALL, start=1, end=2, error="HTTP 500: busy"))
            elsewhere = {SERVER: "api.example:443"}
            spans.append(Span(id="c-other", parent=parent, name=LLM_CALL, start=1, end=2, attributes=elsewhere))
            spans.append(Span(id="c-bare", parent=parent, name=LLM_CALL, start=1, end=2))
        answer = Outcome(answer=kind_value(kind, place))
        if kind == "odd" and place == 3:
            answer = Outcome(failure="agent-error", message="no plan")
        return Result(
            id=rollout_id,
            outcome=answer,
            trace=Trace(rollout_id=rollout_id, spans=tuple(spans)),
            start=0.0,
            duration_s=1.0,
        )

    def _call(self, span_id: str, parent: str, node: str) -> Span:
        response = [self._random.randrange(5, 500) for _ in range(self._random.randint(3, 9))]
        attributes: dict[str, Any] = {
            "request": {},
            "gen_ai.response.id": f"r{self._random.random()}",
            "prompt_token_ids": [7, 8, 9, len(node)],
            "response_token_ids": response,
        }
        if self._logprobs:
            attributes["response_logprobs"] = [-7.0] * len(response)
        return Span(id=span_id, parent=parent, name=LLM_CALL, start=1, end=2, attributes=attributes)


def kind_value(kind: str, place: int) -> float:
    return 1.0 if kind == "same" else float(place % 2)


@cache
def mini() -> Any:
    """Return the shipped model; take a copy."""
    torch.set_num_threads(1)
    return checkpoint.load_model(model_directory("mini"))


def session_in(folder: Path, *, logprobs: bool = False, adapter: Any = None, negative_scale: float = 1.0) -> RunSession:
    # No audit: these rollouts were made up.
    own = ["run.failure_limit=0.5", "run.audit=false", "credit.use=dr-grpo", f"credit.negative_scale={negative_scale}"]
    plan = resolve("mini", overrides=[f"run.directory={json.dumps(str(folder))}", *own])
    runtime: Any = Recorded(logprobs=logprobs)
    scorer = Scorer(lambda task, outcome, budget_s: Score.ok(outcome.answer), budget_s=5.0)
    return RunSession(
        plan=plan,
        engine=RolloutEngine(runtime, scorer=scorer, adapter=adapter or plan.build("adapter")),
        runtime=runtime,
        run=RunDirectory.create(plan),
        hardware=Cpu(config=CpuConfig(threads=1)),
        tasks={"train": TASKS, "validation": [], "report": []},
        second={},
    )


def run_steps(session: RunSession, *, steps: int = 2, credit: Any = None, **settings: Any) -> list[Any]:
    """Train for some steps, as `Loop.run` does; return the lines of metrics."""
    config = GrpoConfig(model="mini", **{"lr": 1e-4, "tokens_per_batch": 64, **settings})
    loop = Loop(Grpo(config))
    loop.session = session
    if credit is not None:
        session.credit, session._ledger._relative = credit, False
    loop.learner = learner = Learner(copy.deepcopy(mini()), config, dtype="float32", seed=0)
    for step in range(1, steps + 1):
        rollouts = session.rollouts(TASKS, n=4, endpoint=ENDPOINT, step=step)
        samples, left_out = loop._samples(rollouts)
        metrics = learner.update(samples, step=step)
        session.end_step(step, metrics=metrics, time_s={}, calls=[*loop._entries(samples), *left_out])
    return session.lines


def sampled_by(model: Any, step: int) -> list[TrainSample]:
    """Return twelve calls as a server with the model's weights samples them."""
    rng = random.Random(step)
    made = []
    for i in range(12):
        prompt = [5 + i // 4, *range(7, 19)]
        response = [rng.randrange(5, 300) for _ in range(2 + i % 5)]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        made.append(
            TrainSample(
                prompt_ids=prompt,
                response_ids=response,
                logprobs=found.tolist(),
                advantage=rng.uniform(-1, 1),
                rollout=i,
                group=f"g{i // 4}",
            )
        )
    return made
