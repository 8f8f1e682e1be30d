"""Run directories as a run writes them: Parquet by the run's own writer, traces as the tracer records them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig import Outcome, Score, Span, Task, Trace
from agentrig.adapters import triplet_of
from agentrig.plan import to_toml
from agentrig.rollouts import Mode, Rollout
from agentrig.run.directory import RunDirectory
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
            details={} if right else {"wrong": "rows"},
            calls=[*[0.0, None] * (turns - 1), float(right), None],
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
    config: dict[str, dict[str, Any]] = {
        "run": {
            "name": path.name,
            "seed": seed,
            "failure_limit": 0.25,
            "second_reward": [second_reward] if second_reward else [],
        },
        "tasks": {"use": "mini-sql"},
        "agent": {"use": "langgraph-sql", "max_turns": 3, "table_info_truncate": 2048},
        "reward": {"use": "spider-exec"},
        "adapter": {"use": "agent-match", "match": "write"},
        "algorithm": {"use": "grpo", "lr": lr, "model": "/models/qwen2-mini", "max_length": 512},
        "hardware": {"use": "cpu"},
        "runners": {"n": 2},
    }
    run.write("config.toml", to_toml(config))
    manifest = {
        "agentrig": "0.1.0",
        "created": "2026-01-01T12:00:00+0000",
        "recipe": "mini",
        "seed": seed,
        "python": "3.11.7",
        "platform": "Linux",
        "hardware": {"name": "cpu", "devices": [{"name": "2 x86-64 cores, AVX2", "memory": 8 << 30}], "evidence": []},
        "plugins": [
            {"name": "grpo", "distribution": "agentrig-grpo", "version": "0.1.0", "status": "ok", "error": None}
        ],
        "components": {
            "agent": {"name": "langgraph-sql", "distribution": "agentrig-langgraph-sql", "version": "0.1.0"}
        },
        "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
        "data": {"report": {"split": "test", "tasks": held_out, "fingerprint": "9f" * 32}},
        "model": "/models/qwen2-mini",
        "warnings": [],
    }
    run.write_json("manifest.json", manifest)

    def share(step: int) -> float:
        return 0.3 + lift * (1 - math.exp(-3 * step / max(1, steps)))

    def measure(mode: Mode, step: int, n: int) -> tuple[float, int]:
        rights = [draw.random() < share(step) for _ in range(n)]
        rollouts = [rollout_of(i, right=r, mode=mode, step=step, turns=1 + i % 2) for i, r in enumerate(rights)]
        run.write_rollouts(rollouts, mode=mode, step=step)
        return sum(rights) / n, n

    before, n = measure("report", 0, held_out)
    progress: dict[str, Any] = {"before": {"accuracy": before, "n": n, "failures": {}}}
    run.write_json("progress.json", progress)
    for step in range(1, steps + 1):
        rollouts = [
            rollout_of(
                i,
                right=draw.random() < share(step),
                mode="train",
                step=step,
                turns=1 + (draw.random() < 0.4),
                failure="llm-error" if i == 0 and step % 7 == 3 else None,
            )
            for i in range(16)
        ]
        # the two rewards disagree on one rollout of the last step
        second = {r.id: {second_reward: r.score} for r in rollouts if r.score is not None} if second_reward else {}
        if second_reward and step == steps:
            other = Score(status="ok", value=0.5, details={"reason": "reads no table"})
            second[rollouts[3].id] = {second_reward: other}
        run.write_rollouts(rollouts, mode="train", step=step, second=second)
        valid = [r for r in rollouts if r.failure is None]
        reward = sum(r.value or 0.0 for r in valid) / len(valid)
        seconds = {"rollout": 3.4 + draw.random(), "reward": 0.1, "update": 2.2 + 0.4 * draw.random()}
        line: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            "reward": reward,
            "accuracy": reward,
            "reward_std": 0.4,
            "rollouts": len(rollouts),
            "failures": {"llm-error": 1} if step % 7 == 3 else {},
            "zero_variance_groups": 0.3,
            "step_s": sum(seconds.values()) + 0.3,
            "time_s": seconds,
            "rollouts_per_s": 24.0,
            "tokens_per_s": 1830.0,
            "transitions_per_rollout": sum(len(r.triplets) for r in valid) / len(valid),
            "prompt_tokens": 61.0 + draw.random(),
            "response_tokens": 22.0 - 4 * step / steps + draw.random(),
            "nodes": {
                "seen": {"write_query": 16, "check_query": 22, "rewrite_query": 6},
                "trained": {"write_query": 15, "rewrite_query": 6},
            },
            "algorithm": {"weight_change": 0.01 + 0.002 * draw.random(), "loss": -0.02 * draw.random()},
        }
        if second_reward:
            line["second_rewards"] = {
                second_reward: {"n": len(valid), "mean": max(0.0, reward - 0.08), "differs": 1, "agreement": 0.9375}
            }
            line["reward_parts"] = {"rows": reward, "columns": 0.5}
        if step % 8 == 0 or step == steps:
            line["validation_accuracy"], _ = measure("validation", step, 30)
        run.append_metrics(line)
    if ended:
        after, n = measure("report", max(steps, 1), held_out)
        progress["after"] = {"accuracy": after, "n": n, "failures": {}}
        run.write_json("progress.json", progress)
        lines = run.metrics()
        summary = {
            "accuracy": {"before": before, "after": after, "n": held_out},
            "steps": steps,
            "wall_s": sum(x["step_s"] for x in lines) + 20,
            "rollouts": 16 * steps + 2 * held_out + 30 * sum("validation_accuracy" in x for x in lines),
            "failures": {"llm-error": sum(bool(x["failures"]) for x in lines)},
            "time_share": {"rollout": 0.58, "reward": 0.02, "update": 0.36},
            "transitions_per_rollout": 1.4,
            "prompt_tokens": 61.5,
            "response_tokens": 20.0,
            "observer_errors": {},
            "complete": True,
        }
        run.write_json("summary.json", summary)
    return path
