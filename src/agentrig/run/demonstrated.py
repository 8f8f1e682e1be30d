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
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.adapters import triplet_of
from agentrig.agents import Outcome
from agentrig.demonstrations import (
    Call,
    Demonstrate,
    Turn,
    demonstration_of,
    gold_of,
    gold_reply,
    read_demonstrations,
)
from agentrig.errors import ConfigError, RunStopped
from agentrig.learners import Imitating
from agentrig.plan import Plan
from agentrig.pools import Result
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.damage import read_object
from agentrig.run.demonstration_server import demonstrating
from agentrig.run.metrics import reason_of
from agentrig.run.rows import stored_rollouts
from agentrig.run.splits import task_set
from agentrig.tasks import Task, tasks_of_step
from agentrig.text import json_text
from agentrig.traces import LLM_CALL, SERVER, Span, Trace, mapping, message_of

if TYPE_CHECKING:
    from agentrig.run.session import RunSession

log = logging.getLogger(__name__)

TASKS = "tasks"
"""The value of `algorithm.demonstrations` for those of the training tasks."""

REJECTED = 0.5
"""Largest share of a run's demonstrations that the reward may reject."""

SHOWN = 3
"""How many examples a message has."""


def demonstrator(plan: Plan, *, gold: str = "") -> tuple[Demonstrate, str]:
    """Return who says what a right reply is, and its name.

    Args:
        plan: Its agent, or else its task set, may say it.
        gold: The key of `Task.private` to answer every call with, whatever these say.
    """
    spec: Any = plan.components["agent"].spec
    if gold:
        return gold_reply(gold), f"the tasks' {gold}"
    if spec.demonstrate is not None:
        found: Demonstrate = spec.demonstrate(plan.configs["agent"])
        return found, f"agent {spec.name}"
    own = getattr(task_set(plan), "demonstrate", None)
    if own is not None:
        return own, f"task set {plan.components['tasks'].spec.name}"
    return gold_reply(), "the tasks' gold"


class Demonstrated:
    """The demonstrations of a run.

    Args:
        session: The run's.
        source: `algorithm.demonstrations`.

    Raises:
        ConfigError: There is no such run or file, or nothing in it can be learned; or a task has no gold.
        AgentrigError: A file cannot be read.
    """

    def __init__(self, session: RunSession, source: str) -> None:
        self._session, self._source, self._who = session, source, source
        self._learner: Imitating
        self._rejected, self._seen = _judged_before(session)
        self._named = set[str]()
        self._kept: list[Rollout] = []
        if source == TASKS and not session.plan.runners.n:
            raise ConfigError(
                "algorithm.demonstrations = tasks: demonstrations are served on this machine only: give it runners, "
                "for example runners.n=2"
            )
        if source == TASKS:
            self._says, self._who = demonstrator(session.plan)
            if self._who.startswith("the tasks'"):
                for task in session.train_tasks:
                    gold_of(task)
        elif Path(source).is_dir():
            self._kept = _of_run(Path(source), session)
        else:
            self._kept = _of_file(Path(source), session)

    def begin(self, learner: object, name: str) -> None:
        """Take the learner, and leave out what its model can't learn.

        Args:
            learner: The run's.
            name: Of the algorithm, for messages.

        Raises:
            ConfigError: It can't learn from demonstrations, or from none of these.
        """
        if not isinstance(learner, Imitating):
            raise ConfigError(f"algorithm {name} has a key `demonstrations`, and its learner has no method `encode`")
        self._learner = learner
        if self._source == TASKS:
            return
        faults, kept, rewritten = Counter[str](), list[Rollout](), 0
        for rollout in self._kept:
            try:
                encoded = _encoded(rollout, learner)
            except ValueError as error:
                faults[str(error)] += 1
                continue
            kept.append(encoded)
            before, now = (
                [call.attributes.get("response_token_ids") for call in each.trace.llm_calls()]
                for each in (rollout, encoded)
            )
            rewritten += any(ids and ids != written for ids, written in zip(before, now, strict=True))
        session, source, n = self._session, self._source, len(self._kept)
        if not kept:
            raise ConfigError(
                f"algorithm.demonstrations = {source}: none of its {n} demonstrations can be learned:\n{_lines(faults)}"
            )
        if faults:
            session.note(f"{n - len(kept)} of {n} demonstrations of {source} are left out")
            log.warning("%d of %d demonstrations can't be learned:\n%s", n - len(kept), n, _lines(faults))
        if rewritten:
            session.note(
                f"{rewritten} of {n} demonstrations of {source} have token ids of another tokenizer or template: they "
                "are tokenized again"
            )
        self._kept = kept
        ids = [[(t.prompt_ids, t.response_ids) for t in rollout.triplets] for rollout in kept]
        found = {"source": source, "n": len(kept), "fingerprint": hashlib.sha256(json.dumps(ids).encode()).hexdigest()}
        earlier = mapping(read_object(session.directory / "manifest.json").get("demonstrations"))
        if earlier.get("fingerprint", found["fingerprint"]) != found["fingerprint"]:
            log.warning("the demonstrations of %s have changed since this run started", source)
        session.record("demonstrations", found)

    def rollouts(self, step: int, n: int) -> list[Rollout]:
        """Return a step's demonstrations, scored and stored.

        Args:
            step: The step.
            n: How many.

        Raises:
            RunStopped: The reward rejects most of them; or see `agentrig.algorithms.Session.rollouts`.
        """
        session = self._session
        if self._source == TASKS:
            tasks = tasks_of_step(session.train_tasks, n=n, step=step, seed=session.seed)
            seed = f"{session.seed} {step}"
            with demonstrating(tasks, self._says, seed=seed, encode=self._learner.encode) as (endpoints, _):
                found = session.rollouts(tasks, n=1, endpoint=endpoints, step=step)
        else:
            found = self._again(step, tasks_of_step(self._kept, n=n, step=step, seed=session.seed))
        self._check(found, step)
        return found

    def _again(self, step: int, chosen: Sequence[Rollout]) -> list[Rollout]:
        """Score and store demonstrations that were recorded, as rollouts of a step."""
        session, start, found = self._session, time.perf_counter(), list[Rollout]()
        for i, rollout in enumerate(chosen):
            name = f"{rollout.id}-{step}-{i}"
            trace = attrs.evolve(rollout.trace, rollout_id=name)
            found.append(attrs.evolve(rollout, id=name, group=f"train-{step}-{i}", step=step, trace=trace))
        if Path(self._source).is_dir():
            results = [
                Result(id=r.id, outcome=r.outcome, trace=r.trace, start=r.start, duration_s=r.duration_s) for r in found
            ]
            waiting = {r.id: (r.task, r.group) for r in found}
            found = session.engine.scored(results, waiting, step=step, mode="train")
        else:
            for rollout in found:
                session.plan.registry.notify("on_rollout_end", rollout=rollout)
        wall_s = time.perf_counter() - start
        session.file(found, mode="train", step=step, sampling={}, wall_s=wall_s, expected=len(chosen))
        return found

    def _check(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Name the demonstrations that the reward rejects, each task once, and stop if it rejects most."""
        scored = [r for r in rollouts if r.failure is None]
        wrong = [r for r in scored if not r.correct]
        self._seen, self._rejected = self._seen + len(scored), self._rejected + len(wrong)
        if self._rejected > REJECTED * self._seen:
            reward = self._session.plan.components["reward"].spec.name
            raise RunStopped(
                f"step {step}: the reward {reward} does not count {self._rejected} of {self._seen} demonstrations by "
                f"{self._who} as correct, so they are not learned:\n{_examples(wrong)}\n  Does the agent change what "
                "the model answers, or does the reward want another form? (docs/how-to/laptop.md)",
                cause="demonstrations-rejected",
            )
        new = [r for r in wrong if r.task.id not in self._named]
        self._named.update(r.task.id for r in new)
        if new:
            log.warning(
                "step %d: the reward does not count %d of %d demonstrations as correct; they are not learned:\n%s",
                *(step, len(wrong), len(scored), _examples(new)),
            )


def _judged_before(session: RunSession) -> tuple[int, int]:
    """Return how many demonstrations the reward rejected, and how many it scored, before the run was resumed."""
    scored = [
        (line["rollouts"] - sum(line["failures"].values()), line.get("accuracy") or 0.0) for line in session.lines
    ]
    return sum(n - round(n * right) for n, right in scored), sum(n for n, _ in scored)


def _of_run(path: Path, session: RunSession) -> list[Rollout]:
    """Return the training rollouts of a run that its reward accepted: of each task the different answers, once.

    Raises:
        ConfigError: It is no run directory, or has none, or none of this run's training tasks.
        RunFileError: A file of its rollouts is damaged.
    """
    if not (path / "config.toml").is_file():
        raise ConfigError(f"algorithm.demonstrations = {path}: the folder is no run directory, it has no config.toml")
    tasks = {task.id: task for task in session.train_tasks}
    found, strange, seen, all_ = list[Rollout](), 0, set[tuple[str, str]](), 0
    for batch in stored_rollouts(path / "rollouts", size=64, pattern="train-[0-9]*.parquet"):
        for rollout in sorted(batch, key=lambda r: r.id):
            all_ += 1
            key = rollout.task.id, json_text(rollout.outcome.answer)
            if not rollout.correct or key in seen:
                continue
            seen.add(key)
            task = tasks.get(rollout.task.id)
            if task is None or dict(task.input) != dict(rollout.task.input):
                strange += 1
            else:
                found.append(attrs.evolve(rollout, task=task))
    if not found:
        why = f"{strange} of them are accepted, of tasks that are not in this run's training split" if strange else ""
        raise ConfigError(
            f"algorithm.demonstrations = {path}: nothing to learn in its {all_} training rollouts: "
            f"{why or 'its reward accepted none'}"
        )
    if strange:
        session.note(f"{strange} accepted rollouts of {path} are of other tasks than this run's, and are left out")
    return sorted(found, key=lambda r: (r.step, r.id))


def _of_file(path: Path, session: RunSession) -> list[Rollout]:
    """Return the chats of a file as rollouts of one call, without those whose reward does not count as correct.

    Raises:
        ConfigError: There is no such file, or nothing in it to learn.
        AgentrigError: See `agentrig.demonstrations.read_demonstrations`.
    """
    if not path.is_file():
        raise ConfigError(f"algorithm.demonstrations = {path}: there is no such file or run directory")
    turns, found = read_demonstrations(path), list[Rollout]()
    for number, turn in enumerate(turns, 1):
        value = 1.0 if turn.reward is None else float(turn.reward)
        if not session.engine.scorer.correctness.decide("ok", value, True if turn.reward is None else None):
            continue
        request = {"messages": list(turn.messages), **({"tools": list(turn.tools)} if turn.tools else {})}
        attributes = {
            "request": request,
            "response": {"id": f"line-{number}", "choices": [{"index": 0, "message": turn.reply.message()}]},
            "prompt_token_ids": list(turn.prompt_token_ids),
            "response_token_ids": list(turn.response_token_ids),
        }
        call = Span(id="call", parent=None, name=LLM_CALL, start=0.0, end=0.0, attributes=attributes)
        asked = Call(messages=turn.messages).text
        rollout = Rollout(
            id=f"line-{number}",
            task=Task(id=turn.task or f"{path.name}:{number}", input={"question": asked}),
            group="",
            mode="train",
            step=0,
            outcome=Outcome(answer=turn.reply.content or json_text(list(turn.reply.tool_calls))),
            score=attrs.evolve(Score.ok(value), correct=True),
            trace=Trace(rollout_id=f"line-{number}", spans=(call,)),
        )
        found.append(rollout)
    if not found:
        raise ConfigError(f"algorithm.demonstrations = {path}: none of its {len(turns)} rewards counts as correct")
    if len(found) < len(turns):
        lost = len(turns) - len(found)
        session.note(f"{lost} of {len(turns)} demonstrations of {path} have a reward that does not count as correct")
    return found


def _encoded(rollout: Rollout, learner: Imitating) -> Rollout:
    """Return a rollout whose calls have the token ids of the learner's model, and its triplets if it is of one call.

    Raises:
        ValueError: A call can't be learned.
    """
    spans = [
        _encoded_call(span, learner)
        if span.name == LLM_CALL and span.error is None and SERVER not in span.attributes
        else span
        for span in rollout.trace.spans
    ]
    found = attrs.evolve(rollout, trace=attrs.evolve(rollout.trace, spans=tuple(spans)))
    triplets = [t for span in spans if span.name == LLM_CALL and (t := triplet_of(span)) is not None]
    return attrs.evolve(found, triplets=triplets)


def _encoded_call(span: Span, learner: Imitating) -> Span:
    said = dict(span.attributes)
    request = mapping(said.get("request"))
    messages = [*(request.get("messages") or ()), message_of(said)]
    turn: Turn = demonstration_of({"messages": messages, "tools": request.get("tools")})
    turn = attrs.evolve(
        turn,
        options=mapping(request.get("chat_template_kwargs")),
        prompt_token_ids=tuple(said.get("prompt_token_ids") or ()),
        response_token_ids=tuple(said.get("response_token_ids") or ()),
    )
    prompt, reply = learner.encode(turn)
    end = "tool_calls" if turn.reply.tool_calls else "stop"
    if list(reply) == list(turn.response_token_ids):  # it may have been cut at a limit
        end = str(said.get("finish_reason") or end)
    response = {key: value for key, value in mapping(said.get("response")).items() if key != "system_fingerprint"}
    response["choices"] = [{**response["choices"][0], "finish_reason": end}]
    ids = {"prompt_token_ids": list(prompt), "response_token_ids": list(reply), "finish_reason": end}
    said.pop("response_logprobs", None)  # of another policy: nothing was sampled here
    return attrs.evolve(span, attributes={**said, "response": response, **ids})


def line_of(rollout: Rollout) -> str:
    """Return a rollout's task, answer and score, for messages; or how it failed."""
    if rollout.failure:
        return f"{rollout.task.id}: failed: {rollout.failure}: {reason_of(rollout)[:200]}"
    details = str(dict(rollout.score.details)) if rollout.score and rollout.score.details else ""
    return f"{rollout.task.id}: {str(rollout.outcome.answer)[:120]!r} -> {rollout.value:g} {details[:200]}".rstrip()


def _examples(rollouts: Sequence[Rollout]) -> str:
    more = f"\n  … and {len(rollouts) - SHOWN} more" if len(rollouts) > SHOWN else ""
    return "\n".join(f"  {line_of(rollout)}" for rollout in rollouts[:SHOWN]) + more


def _lines(faults: Counter[str]) -> str:
    return "\n".join(f"  {count} x {fault}" for fault, count in faults.most_common(SHOWN))
