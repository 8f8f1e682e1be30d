"""Run directories as a run writes them: Parquet by the run's own writer, traces as the tracer records them."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from agentrig import Outcome, Score, Span, Task, Trace
from agentrig.adapters import triplet_of
from agentrig.correctness import turn_of
from agentrig.plan import to_toml
from agentrig.rollouts import Mode, Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.metrics import reward_figures
from agentrig.traces import LLM_CALL, NODE

QUESTIONS = (
    ("concert_hall", "How many singers are older than 30?", "SELECT count(*) FROM singer WHERE age > 30"),
    ("library", "Which authors have no book?", "SELECT name FROM author WHERE id NOT IN (SELECT author_id FROM book)"),
    ("airport", "List the airports in France, A to Z.", "SELECT name FROM airport WHERE country = 'France' ORDER BY 1"),
    ("bakery", "What is the mean price of a cake with <b>nuts</b>?", "SELECT avg(price) FROM cake WHERE nuts = 1"),
)


def trace_of(rollout_id: str, task: Task, queries: Sequence[str], *, right: bool, start: float) -> Trace:
    """A rollout of the four-node graph: a turn for each query; the last check accepts."""
    spans: list[Span] = []
    clock, graph = start, f"{rollout_id}-graph"

    def node(name: str, output: Any, *, reply: str | None = None) -> None:
        nonlocal clock
        span_id, began = f"{rollout_id}-{len(spans)}", clock
        clock += 0.002 if reply is None else 0.31
        about = {NODE: name, "output": output}
        spans.append(Span(id=span_id, parent=graph, name="chain.chain", start=began, end=clock, attributes=about))
        if reply is not None:
            call = {
                "request": {"model": "m", "messages": [{"role": "user", "content": task.input["question"]}]},
                "response": {"id": "c", "choices": [{"message": {"role": "assistant", "content": reply}}]},
                "gen_ai.response.id": "c",
                "prompt_token_ids": list(range(60)),
                "response_token_ids": list(range(20)),
                "response_logprobs": [-0.1] * 20,
            }
            at = f"{span_id}-call"
            spans.append(Span(id=at, parent=span_id, name=LLM_CALL, start=began, end=clock, attributes=call))

    for turn, query in enumerate(queries, 1):
        node("write_query" if turn == 1 else "rewrite_query", {"query": query, "turn": turn}, reply=query)
        broken = "FORM" in query
        node("execute_query", {"result": 'Error: near "FORM": syntax error' if broken else "count(*)\n4"})
        verdict = turn == len(queries)
        feedback = "VERDICT: CORRECT" if verdict else "It does not run. VERDICT: INCORRECT"
        node("check_query", {"feedback": feedback, "correct": verdict}, reply=feedback)
        node("after_check", "__end__" if verdict else "rewrite_query")
    root = Span(id=f"{rollout_id}-root", parent=None, name="rollout", start=start, end=clock)
    about = {NODE: "langgraph-sql", "input": dict(task.input), "output": {**task.input, "query": queries[-1]}}
    whole = Span(id=graph, parent=root.id, name="chain.chain", start=start, end=clock, attributes=about)
    return Trace(rollout_id=rollout_id, spans=(root, whole, *spans))


def rollout_of(i: int, *, right: bool, mode: Mode, step: int, failure: str | None = None, turns: int = 1) -> Rollout:
    """A rollout of task i."""
    db_id, question, gold = QUESTIONS[i % len(QUESTIONS)]
    task = Task(
        id=f"task-{i:04d}",
        input={"question": question, "db_id": db_id, "database": f"/data/{db_id}.sqlite"},
        private={"gold": "SECRET GOLD"},
        slices={"half": "first" if i % 2 == 0 else "second"},
    )
    calls = [*[0.0, None] * (turns - 1), float(right), None]
    queries = [*["SELECT count(*) FORM singer"] * (turns - 1), gold if right else gold.split(" WHERE")[0]]
    rollout_id = f"{mode}-{step}-{i}"
    trace = trace_of(rollout_id, task, queries, right=right, start=1_700_000_000.0 + step)
    triplets = [triplet_of(c, node=trace.nodes(c)[0]) for c in trace.llm_calls() if "write" in trace.nodes(c)[0]]
    return Rollout(
        id=rollout_id,
        task=task,
        group=f"{mode}-{step}-{i}",
        mode=mode,
        step=step,
        outcome=Outcome(failure=failure, message="the model <server> did not answer")
        if failure
        else Outcome(answer=queries[-1]),
        score=None
        if failure
        else Score(
            status="ok",
            value=float(right),
            details={"turn": turn_of(calls), **({} if right else {"wrong": "rows"})},
            calls=calls,
        ),
        trace=trace,
        triplets=[attrs.evolve(t, reward=float(right)) for t in triplets if t is not None and not failure],
        start=1_700_000_000.0,
        duration_s=0.6,
        reward_s=0.001,
    )


def write_run(
    path: Path,
    *,
    steps: int = 24,
    held_out: int = 40,
    seed: int = 0,
    ended: bool = True,
    lift: float = 0.35,
    second_reward: str = "",
    lr: float = 3e-4,
) -> Path:
    """Write a run directory whose accuracy rises from about 0.3 by `lift`."""
    draw = random.Random(seed)
    run = RunDirectory(path)
    recorded = json.loads((resources.files("agentrig.testing") / "run.json").read_text("utf-8"))
    config = recorded["config"]
    config["run"] |= {"name": path.name, "seed": seed, "second_reward": [second_reward] if second_reward else []}
    config["algorithm"]["lr"] = lr
    run.write("config.toml", to_toml(config))
    data = {"report": {"split": "test", "tasks": held_out, "fingerprint": "9f" * 32}}
    run.write_json("manifest.json", {**recorded["manifest"], "seed": seed, "data": data})

    def share(step: int) -> float:
        return 0.3 + lift * (1 - math.exp(-3 * step / max(1, steps)))

    def measure(mode: Mode, step: int, n: int) -> float:
        rights = [draw.random() < share(step) for _ in range(n)]
        rollouts = [rollout_of(i, right=r, mode=mode, step=step, turns=1 + i % 2) for i, r in enumerate(rights)]
        run.write_rollouts(rollouts, mode=mode, step=step)
        return sum(rights) / n

    accuracy = {"before": measure("report", 0, held_out)}
    run.write_json("progress.json", _measured(accuracy, held_out))
    for step in range(1, steps + 1):
        rollouts = []
        for i in range(16):
            right, turns = draw.random() < share(step), 1 + (draw.random() < 0.4)
            failure = "llm-error" if i == 0 and step % 7 == 3 else None
            rollouts.append(rollout_of(i, right=right, mode="train", step=step, turns=turns, failure=failure))
        # the two rewards disagree on one rollout of the last step
        second = {r.id: {second_reward: r.score} for r in rollouts if r.score is not None} if second_reward else {}
        if second_reward and step == steps:
            other = Score(status="ok", value=0.5, details={"reason": "reads no table"})
            second[rollouts[3].id] = {second_reward: other}
        run.write_rollouts(rollouts, mode="train", step=step, second=second)
        valid = [r for r in rollouts if r.failure is None]
        seconds = {"rollout": 3.4 + draw.random(), "reward": 0.1, "update": 2.2 + 0.4 * draw.random()}
        figures = reward_figures(rollouts)
        line: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            **figures,
            **recorded["step"],
            "accuracy": figures["reward"],
            "step_s": sum(seconds.values()) + 0.3,
            "time_s": seconds,
            "transitions_per_rollout": sum(len(r.triplets) for r in valid) / len(valid),
            "prompt_tokens": 61.0 + draw.random(),
            "response_tokens": 22.0 - 4 * step / steps + draw.random(),
            "algorithm": {"weight_change": 0.01 + 0.002 * draw.random(), "loss": -0.02 * draw.random()},
        }
        if second_reward:
            judged = {"n": len(valid), "mean": max(0.0, figures["reward"] - 0.08), **recorded["second_reward"]}
            line["second_rewards"] = {second_reward: judged}
            line["reward_parts"] = {"rows": figures["reward"], "columns": 0.5}
        if step % 8 == 0 or step == steps:
            line["validation_accuracy"] = measure("validation", step, 30)
        run.append_metrics(line)
    if ended:
        accuracy["after"] = measure("report", max(steps, 1), held_out)
        run.write_json("progress.json", _measured(accuracy, held_out))
        lines = run.metrics()
        summary = {
            **recorded["summary"],
            "accuracy": {**accuracy, "n": held_out},
            "steps": steps,
            "wall_s": sum(x["step_s"] for x in lines) + 20,
            "rollouts": 16 * steps + 2 * held_out + 30 * sum("validation_accuracy" in x for x in lines),
            "failures": {"llm-error": sum(bool(x["failures"]) for x in lines)},
        }
        run.write_json("summary.json", summary)
    return path


def _measured(accuracy: Mapping[str, float], n: int) -> dict[str, Any]:
    return {end: {"accuracy": share, "n": n, "failures": {}} for end, share in accuracy.items()}
