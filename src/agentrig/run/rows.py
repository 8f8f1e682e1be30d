"""Rollouts as rows of Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs

from agentrig.agents import Outcome
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.damage import entries, reading
from agentrig.run.files import sha256_of
from agentrig.tasks import Task
from agentrig.text import json_text, names_secret, storable
from agentrig.traces import RETURNED, SERVER, Span, Trace, reply_of


def _span(s: Span) -> dict[str, Any]:
    fields = attrs.asdict(s, recurse=False)  # recursion would copy every token id
    return fields if s.otel else {name: value for name, value in fields.items() if name != "otel"}


def _verdict(score: Score) -> dict[str, Any]:
    fields = {name: value for name, value in attrs.asdict(score, recurse=False).items() if name != "calls"}
    return {**fields, "components": dict(score.components), "details": dict(score.details)}


def slices_of(r: Rollout) -> dict[str, str]:
    """Return what a rollout's figures are broken down by: its task's slices, and how many of its calls were trained."""
    return {**r.task.slices, "calls": str(len(r.triplets))}


def row_of(r: Rollout, second: Mapping[str, Score] | None = None) -> dict[str, Any]:
    """Return a rollout as a row of the Parquet files, without its task's private part.

    Args:
        second: The score of each second reward, by name.
    """
    calls, trained = r.trace.llm_calls(), {t.span_id for t in r.triplets}
    counted = [c for c in calls if (c.id in trained if trained else SERVER not in c.attributes)]
    score, verdicts = r.score, {name: _verdict(other) for name, other in (second or {}).items()}
    answer, spans = json_text(r.outcome.answer), [_span(s) for s in r.trace.spans]
    if names_secret(answer):  # then it is not what the agent returned
        for span in spans[:1]:
            span["attributes"] = {key: one for key, one in span["attributes"].items() if key != RETURNED}
    return {
        "id": r.id,
        "task_id": r.task.id,
        "group": r.group,
        "mode": r.mode,
        "step": r.step,
        "failure": r.failure,
        "message": storable(r.outcome.message) or None,
        "status": score.status if score else None,
        "value": score.value if score else None,
        "correct": r.correct,
        "components": json_text(dict(score.components) if score else {}),
        "details": json_text(dict(score.details) if score else {}),
        "call_values": json_text(list(score.calls) if score else []),
        "second_rewards": json_text(verdicts) if verdicts else None,
        "input": json_text(dict(r.task.input)),
        "root": r.task.root or None,
        "slices": json_text(slices_of(r)),
        "answer": answer,
        "own_reward": r.outcome.own_reward,
        "start": r.start,
        "duration_s": r.duration_s,
        "reward_s": r.reward_s,
        "version": r.version,
        "calls": len(calls),
        "truncated": sum(c.attributes.get("finish_reason") == "length" for c in counted),
        "triplets": len(r.triplets),
        "prompt_tokens": sum(len(t.prompt_ids) for t in r.triplets),
        "response_tokens": sum(len(t.response_ids) for t in r.triplets),
        "nodes": json_text(sorted({nodes[0] for call in calls if (nodes := r.trace.nodes(call))})),
        "replies": storable("\n".join(filter(None, (reply_of(call.attributes) for call in calls)))),
        "spans": json_text(spans),
    }


def rollout_of(row: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a row that `row_of` made, without triplets and its task's private part.

    Raises:
        ValueError: The row's JSON is damaged, or holds a text where the run could not write JSON.
    """
    status = row["status"]
    score = status and Score(
        status=status,
        value=row["value"],
        components=json.loads(row["components"]),
        details=json.loads(row["details"]),
        correct=row["correct"],
        calls=json.loads(row["call_values"]),
    )
    spans = json.loads(row["spans"])
    if not isinstance(spans, list):
        raise ValueError("its spans could not be written as JSON")
    return Rollout(
        id=row["id"],
        task=Task(
            id=row["task_id"],
            input=json.loads(row["input"]),
            slices=json.loads(row["slices"]),
            root=row.get("root") or "",  # earlier versions have no such column
        ),
        group=row["group"],
        mode=row["mode"],
        step=row["step"],
        outcome=Outcome(
            answer=json.loads(row["answer"]),
            failure=None if status else row["failure"],
            message=row["message"] or "",
            own_reward=row["own_reward"],
        ),
        score=score or None,
        trace=Trace(rollout_id=row["id"], spans=tuple(Span(**span) for span in spans)),
        start=row["start"],
        duration_s=row["duration_s"],
        reward_s=row["reward_s"],
        version=row["version"],
    )


def call_schema(pa: Any) -> Any:
    """Return the types of the columns of calls."""
    text, count = pa.string(), pa.int64()
    types = {"rollout": text, "span": text, "node": text, "place": text, "reason": text, "tokens": count}
    own = {"advantage": pa.float64(), "token_advantages": text, "teacher_logprobs": text}
    return pa.schema([*types.items(), *own.items()])


def stored_rollouts(
    folder: Path, *, size: int, pattern: str = "[a-z]*-[0-9]*.parquet", recorded: Mapping[str, str] | None = None
) -> Iterator[list[Rollout]]:
    """Yield the rollouts of all files of a run, without triplets and private parts, `size` at a time.

    Args:
        folder: The run's folder `rollouts`.
        recorded: The SHA-256 of its files as the run wrote them (`agentrig.run.past.recorded_in`), if they are known.
    """
    import pyarrow.parquet as pq

    for file in (f for f in entries(folder) if fnmatch(f.name, pattern)):
        cure = "Restore it from a copy, or remove it: its rollouts are then left out"
        with reading(file, cure):
            if (digest := (recorded or {}).get(f"{folder.name}/{file.name}")) and sha256_of(file) != digest:
                raise ValueError("it was changed since the run wrote it")
            batches = pq.ParquetFile(file).iter_batches(batch_size=size)
        while True:
            with reading(file, cure):
                batch = next(batches, None)
                rollouts = [rollout_of(row) for row in batch.to_pylist()] if batch is not None else []
            if batch is None:
                break
            yield rollouts


def rollout_schema(pa: Any) -> Any:
    """Return the types of the columns of rollouts."""
    text, number, count = pa.string(), pa.float64(), pa.int64()
    types = {
        "id": text, "task_id": text, "group": text, "mode": text, "step": count, "failure": text, "message": text,
        "status": text, "value": number, "correct": pa.bool_(), "components": text, "details": text,
        "call_values": text, "second_rewards": text, "input": text, "root": text, "slices": text, "answer": text,
        "own_reward": number, "start": number, "duration_s": number, "reward_s": number,
        "version": count, "calls": count, "truncated": count, "triplets": count,
        "prompt_tokens": count, "response_tokens": count, "nodes": text, "replies": text, "spans": text,
    }  # fmt: skip
    return pa.schema(list(types.items()))
