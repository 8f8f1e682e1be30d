"""Training rollouts that are demonstrations: nothing is sampled, and the rest of the loop stays as it is.

`algorithm.demonstrations` says where they come from:

    tasks    the agent plays a step's tasks, and a demonstrator answers its calls → the reward scores what it answers
    RUN      the rollouts that an earlier run's reward accepted, of each task the different answers → scored again
    FILE     the chats of a JSONL file, the last reply of each; the agent plays no part, so nothing is scored

What the reward does not accept is not learned: it is counted, and named once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentrig.adapters import triplet_of
from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.demonstrations import OPTIONS, TOKENS, Call, demonstration_of, read_demonstrations, recorded_call, row_of
from agentrig.errors import ConfigError, RunStopped
from agentrig.learners import Imitating
from agentrig.pools import Result
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.damage import read_object
from agentrig.run.metrics import line_of
from agentrig.run.past import recorded_in
from agentrig.run.rows import stored_rollouts
from agentrig.tasks import Task, tasks_of_step
from agentrig.text import amount, json_text
from agentrig.traces import LLM_CALL, SERVER, Span, Trace, mapping

if TYPE_CHECKING:
    from agentrig.run.session import RunSession

log = logging.getLogger(__name__)

TASKS = "tasks"
"""The value of `algorithm.demonstrations` for those of the training tasks."""

REJECTED = 0.5
"""Largest share of a run's demonstrations that the reward may reject."""

SHOWN = 3
"""How many examples a message has."""


class Demonstrated:
    """The demonstrations of a run.

    Raises:
        ConfigError: There is no such run or file, or nothing in it can be learned; or a task has no gold.
        AgentrigError: A file cannot be read.
    """

    def __init__(self, session: RunSession, source: str) -> None:
        self._session, self._source, self._who = session, Path(source), source
        self._learner: Imitating
        self._played = source == TASKS
        self._named = set[str]()
        self._seen = self._rejected = 0  # before the run was resumed, too
        for line in session.lines:
            scored = line["rollouts"] - sum(line["failures"].values())
            self._seen += scored
            self._rejected += scored - round(scored * (line.get("accuracy") or 0.0))
        if self._played:
            if not session.plan.runners.n:
                raise ConfigError(
                    "algorithm.demonstrations = tasks: demonstrations are served on this machine only: give it "
                    "runners, for example runners.n=2"
                )
            self._says, self._who = session.plan.demonstrator(session.train_tasks)
            return
        if self._source.is_dir():
            self._kept, note = accepted(self._source, session.train_tasks)
        else:
            self._kept, note = chats(self._source, session.engine.scorer.correctness)
        if note:
            session.note(note)

    def begin(self, learner: object, name: str) -> None:
        """Take the learner, leave out what its model can't learn, and note which demonstrations the run has."""
        if not isinstance(learner, Imitating):
            raise ConfigError(f"algorithm {name} has a key `demonstrations`, and its learner has no method `encode`")
        self._learner = learner
        if self._played:
            return
        session = self._session
        self._kept, notes = learnable(self._kept, learner, self._source)
        for note in notes:
            session.note(note)
        ids = [[(t.prompt_ids, t.response_ids) for t in rollout.triplets] for rollout in self._kept]
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        earlier = mapping(read_object(session.directory / "manifest.json").get("demonstrations"))
        if earlier.get("fingerprint", digest) != digest:
            log.warning("the demonstrations of %s have changed since this run started", self._source)
        session.record("demonstrations", {"source": str(self._source), "n": len(self._kept), "fingerprint": digest})

    def rollouts(self, step: int, n: int) -> list[Rollout]:
        """Return a step's demonstrations, stored; those of tasks and of a run are scored.

        Raises:
            RunStopped: The reward rejects most of them; or see `agentrig.algorithms.Session.rollouts`.
        """
        session = self._session
        if self._played:
            from agentrig.run.demonstration_server import demonstrating

            tasks = tasks_of_step(session.train_tasks, n=n, step=step, seed=session.seed)
            seed = f"{session.seed} {step}"
            with demonstrating(tasks, self._says, seed=seed, encode=self._learner.encode) as (endpoints, _):
                found = session.rollouts(tasks, n=1, endpoint=endpoints, step=step)
        else:
            start = time.perf_counter()
            found = self._recorded(step, n)
            wall_s = time.perf_counter() - start
            session.file(found, mode="train", step=step, sampling={}, wall_s=wall_s, expected=n)
        self._check(found, step)
        return found

    def _recorded(self, step: int, n: int) -> list[Rollout]:
        """Return a step's recorded demonstrations as rollouts of this run; those of a run are scored again."""
        session, found = self._session, list[Rollout]()
        for i, rollout in enumerate(tasks_of_step(self._kept, n=n, step=step, seed=session.seed)):
            name = f"{rollout.id}-{step}-{i}"
            trace = attrs.evolve(rollout.trace, rollout_id=name)
            found.append(attrs.evolve(rollout, id=name, group=f"train-{step}-{i}", step=step, trace=trace))
        if not self._source.is_dir():
            for rollout in found:
                session.plan.registry.notify("on_rollout_end", rollout=rollout)
            return found
        results = [
            Result(id=r.id, outcome=r.outcome, trace=r.trace, start=r.start, duration_s=r.duration_s) for r in found
        ]
        return session.engine.scored(results, {r.id: (r.task, r.group) for r in found}, step=step, mode="train")

    def _check(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Name the demonstrations that the reward rejects, each task once, and stop if it rejects most."""
        scored = [r for r in rollouts if r.failure is None]
        wrong = [r for r in scored if not r.correct]
        new = [r for r in wrong if r.task.id not in self._named]
        shown = "\n".join(f"  {line_of(r)}" for r in (new or wrong)[:SHOWN])
        self._named.update(r.task.id for r in new)
        self._seen, self._rejected = self._seen + len(scored), self._rejected + len(wrong)
        if self._rejected > REJECTED * self._seen:
            reward = self._session.plan.components["reward"].spec.name
            raise RunStopped(
                f"step {step}: the reward {reward} does not count {self._rejected} of {self._seen} demonstrations by "
                f"{self._who} as correct, so they are not learned:\n{shown}\n  Does the agent change what the model "
                "answers, or does the reward want another form? (docs/how-to/laptop.md)",
                cause="demonstrations-rejected",
            )
        if new:
            log.warning(
                "step %d: the reward does not count %d of %d demonstrations as correct; they are not learned:\n%s",
                *(step, len(wrong), len(scored), shown),
            )


def accepted(path: Path, tasks: Sequence[Task]) -> tuple[list[Rollout], str]:
    """Return the training rollouts of a run that its reward accepted: of each task the different answers, once.

    Args:
        tasks: Those that may be learned, with their private part.

    Returns:
        The rollouts, and a sentence about those of other tasks, or ''.
    """
    if not (path / "config.toml").is_file():
        raise ConfigError(f"algorithm.demonstrations = {path}: the folder is no run directory, it has no config.toml")
    known, found, strange, read = {task.id: task for task in tasks}, dict[tuple[str, str], Rollout](), 0, 0
    written = recorded_in(path)
    for batch in stored_rollouts(path / "rollouts", recorded=written, size=64, pattern="train-[0-9]*.parquet"):
        read += len(batch)
        for rollout in sorted(batch, key=lambda r: r.id):
            if rollout.correct:
                found.setdefault((rollout.task.id, json_text(rollout.outcome.answer)), rollout)
    for key, rollout in list(found.items()):
        task = known.get(rollout.task.id)
        if task is None or dict(task.input) != dict(rollout.task.input):
            strange += 1
            del found[key]
        else:
            found[key] = attrs.evolve(rollout, task=task)
    if not found:
        why = f"{strange} of them are accepted, of tasks that are not in this run's training split" if strange else ""
        raise ConfigError(
            f"algorithm.demonstrations = {path}: nothing to learn in its {amount(read, 'training rollout')}: "
            f"{why or 'its reward accepted none'}"
        )
    note = f"{strange} accepted rollouts of {path} are of other tasks than this run's, and are left out"
    return sorted(found.values(), key=lambda r: (r.step, r.id)), note if strange else ""


def chats(path: Path, correctness: Correctness) -> tuple[list[Rollout], str]:
    """Return the chats of a file as rollouts of one call, without those whose reward does not count as correct.

    Returns:
        The rollouts, and a sentence about those that are left out, or ''.
    """
    if not path.is_file():
        raise ConfigError(f"algorithm.demonstrations = {path}: there is no such file or run directory")
    turns, found = read_demonstrations(path), list[Rollout]()
    for number, turn in enumerate(turns, 1):
        value = 1.0 if turn.reward is None else float(turn.reward)
        if not correctness.decide("ok", value, True if turn.reward is None else None):
            continue
        name, sent = f"line-{number}", {key: v for key, v in row_of(turn).items() if key in ("tools", OPTIONS)}
        said = {
            "request": {**sent, "messages": list(turn.messages)},
            "response": {"id": name, "choices": [{"index": 0, "message": turn.reply.message()}]},
            **{key: list(getattr(turn, key)) for key in TOKENS},
        }
        call = Span(id="call", parent=None, name=LLM_CALL, start=0.0, end=0.0, attributes=said)
        asked = {"question": Call(messages=turn.messages).text}
        rollout = Rollout(
            id=name,
            task=Task(id=turn.task or f"{path.name}:{number}", input=asked),
            group="",
            mode="train",
            step=0,
            outcome=Outcome(answer=turn.reply.content or json_text(list(turn.reply.tool_calls))),
            score=attrs.evolve(Score.ok(value), correct=True),
            trace=Trace(rollout_id=name, spans=(call,)),
        )
        found.append(rollout)
    if not found:
        raise ConfigError(f"algorithm.demonstrations = {path}: no reward in its {amount(len(turns), 'line')} is right")
    lost = len(turns) - len(found)
    note = f"{lost} of {len(turns)} demonstrations of {path} have a reward that does not count as correct"
    return found, note if lost else ""


def learnable(rollouts: Sequence[Rollout], learner: Imitating, source: Path) -> tuple[list[Rollout], list[str]]:
    """Return the rollouts that a learner's model can learn, with its token ids, and sentences about the others."""
    of, faults, kept, rewritten = amount(len(rollouts), "demonstration"), Counter[str](), list[Rollout](), 0
    for rollout in rollouts:
        try:
            pairs = [_encoded(span, learner) for span in rollout.trace.spans]
        except ValueError as error:
            faults[str(error)] += 1
            continue
        spans = tuple(span for span, _ in pairs)
        triplets = [t for span in spans if span.name == LLM_CALL and (t := triplet_of(span)) is not None]
        kept.append(attrs.evolve(rollout, trace=attrs.evolve(rollout.trace, spans=spans), triplets=triplets))
        rewritten += any(other for _, other in pairs)
    lines = "\n".join(f"  {count} x {fault}" for fault, count in faults.most_common(3))
    if not kept:
        raise ConfigError(f"algorithm.demonstrations = {source}: none of its {of} can be learned:\n{lines}")
    notes = [f"{faults.total()} of {of} of {source} are left out"] if faults else []
    if faults:
        log.warning("%d of %s can't be learned:\n%s", faults.total(), of, lines)
    if rewritten:
        notes.append(
            f"{rewritten} of {of} of {source} have token ids of another tokenizer or template: they are tokenized again"
        )
    return kept, notes


def _encoded(span: Span, learner: Imitating) -> tuple[Span, bool]:
    """Return a call to the run's model with the token ids of the learner's; any other span as it is.

    Returns:
        The span, and whether it had other token ids.
    """
    if span.name != LLM_CALL or span.error is not None or SERVER in span.attributes:
        return span, False
    said = dict(span.attributes)
    line = recorded_call(said)
    turn = demonstration_of({**line, "messages": [*(line["messages"] or ()), line["reply"]]})
    prompt, reply = learner.encode(turn)
    end = "tool_calls" if turn.reply.tool_calls else "stop"
    if list(reply) == list(turn.response_token_ids):  # it may have been cut at a limit
        end = str(said.get("finish_reason") or end)
    response = {key: value for key, value in mapping(said.get("response")).items() if key != "system_fingerprint"}
    response["choices"] = [{**response["choices"][0], "finish_reason": end}]
    ids = dict(zip(TOKENS, (list(prompt), list(reply)), strict=True))
    said.pop("response_logprobs", None)  # of another policy: nothing was sampled here
    other = any(getattr(turn, key) and list(getattr(turn, key)) != ids[key] for key in TOKENS)
    return attrs.evolve(span, attributes={**said, "response": response, **ids, "finish_reason": end}), other
