"""A trial of an agent with its tasks, its reward and an adapter: what would be trained, and what it costs."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.adapters import Adapter, Triplet
from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint
from agentrig.pools import Job
from agentrig.rewards import Score
from agentrig.tasks import Task
from agentrig.testing.agent import FORMS, AgentSubject, Play, demonstrated
from agentrig.testing.kit import CheckFailed, CheckSkipped, basic, needs
from agentrig.testing.reward import NO_SCORE, RewardSubject
from agentrig.testing.scripted import Reply
from agentrig.testing.subject import Subject
from agentrig.text import cut, json_text, with_kind
from agentrig.traces import items, mapping, message_of, reply_of, token_count

NONSENSE = "lorem ipsum"
"""What a model says that knows nothing."""

FAILURES = 0.25
"""Share of failed rollouts at which a run stops (`run.failure_limit`)."""

PRIVATE_SHOWN = 300
"""Most characters of a task's private part in a message."""

ANSWERS_SHOWN = 200
"""Most characters of what tools answered in a message."""

STEP = 128
"""Rollouts in the step whose costs are stated where no recipe says how many a step has: 16 tasks, 8 rollouts each."""


@attrs.frozen(kw_only=True)
class Trial:
    """One rollout, scored and adapted.

    Attributes:
        said: What the scripted model says: `gold` (right replies), `nonsense` or `script`; `model` for a real one.
        score: None for a rollout that failed.
    """

    play: Play
    said: str
    score: Score | None
    triplets: Sequence[Triplet]

    @property
    def failure(self) -> str | None:
        """The failure's kind, as `Rollout.failure`."""
        return self.play.failure or ("reward-invalid" if self.score and self.score.status == "invalid" else None)


@attrs.define(kw_only=True, eq=False, slots=False)
class PlaySubject(AgentSubject):
    """An agent with its tasks, its reward and an adapter; `AgentSubject` has the other options.

    Attributes:
        reward: The reward.
        adapter: The adapter.
        endpoint: A real model's server; None for the scripted one.
        step: Rollouts of a step of the recipe that uses the agent; None without one.
    """

    limit: int = 12
    script: Any = None
    reward: RewardSubject | None = None
    adapter: Subject | None = None
    endpoint: Endpoint | None = None
    step: int | None = None

    @cached_property
    def judge(self) -> RewardSubject:
        """Scores answers as a run does."""
        assert self.reward is not None
        return attrs.evolve(self.reward, tasks=self.rows, limit=len(self.rows))

    @property
    def adapt(self) -> Adapter:
        """The adapter, built."""
        assert self.adapter is not None
        adapter: Adapter = self.adapter.made
        return adapter

    @cached_property
    def real(self) -> Endpoint | None:
        """The real model's server; it is asked once whether it returns token ids."""
        return self.endpoint and attrs.evolve(self.endpoint, token_ids=_returns_ids(self.endpoint))

    def job(self, task: Task) -> Job:
        """Return a job of a task, for the real model if there is one."""
        job = super().job(task)
        return attrs.evolve(job, endpoint=self.real) if self.real else job

    def trial(self, task: Task, said: str, script: Any) -> Trial:
        """Play, score and adapt a task."""
        play = self.alone(task, script)
        outcome: Outcome = play.result.outcome
        if outcome.failure is not None:
            return Trial(play=play, said=said, score=None, triplets=())
        (score,) = self.judge.scores([(task, outcome.answer)], late=True)
        return Trial(play=play, said=said, score=score, triplets=tuple(self.adapt(play.result.trace)))

    @cached_property
    def right(self) -> list[str]:
        """What a model says that knows each task's answer.

        Raises:
            CheckSkipped: The right answers are not known.
        """
        return [gold if isinstance(gold, str) else json.dumps(gold) for gold in self.judge.golds]

    @cached_property
    def form(self) -> str:
        """The form of a right answer that the agent reads; the first if it reads none."""
        task, right = self.rows[0], self.right[0]
        low = _value(self.trial(task, "nonsense", NONSENSE))
        found = (f for f in FORMS if _value(self.trial(task, "gold", Reply(text=f.format(right)))) > low)
        return next(found, FORMS[0])

    @cached_property
    def trials(self) -> list[Trial]:
        """Every task: with the real model, with the script, or once with right replies and once with nonsense.

        Right replies are those of the demonstrator, calls of tools included; without one, the task's gold as text.
        """
        if self.endpoint is not None:
            return [self.trial(task, "model", None) for task in self.rows]
        if self.script is not None:
            return [self.trial(task, "script", self.script) for task in self.rows]
        right: list[Any] = []
        if self.demonstrator is not None:
            right = [demonstrated(task, self.demonstrator) for task in self.rows]
        else:
            with contextlib.suppress(CheckSkipped):  # the right answers are not known
                right = [Reply(text=self.form.format(text)) for text in self.right]
        found = [self.trial(task, "gold", script) for task, script in zip(self.rows, right, strict=False)]
        return [*found, *(self.trial(task, "nonsense", NONSENSE) for task in self.rows)]

    @property
    def demonstrated_answers(self) -> dict[str, Any]:
        """Task id to the agent's answer if the model says what the demonstrator says; empty unless all are correct."""
        right = [t for t in self.trials if t.said == "gold"] if self.demonstrator is not None else []
        if not all(t.score and t.score.correct for t in right):
            return {}
        return {t.play.task.id: t.play.result.outcome.answer for t in right}

    def mean(self, said: str) -> float | None:
        """Return the mean reward of the rollouts in which the model said this; None if none was scored."""
        values = [t.score.value for t in self.trials if t.said == said and t.score and t.score.value is not None]
        return round(math.fsum(values) / len(values), 4) if values else None

    def figures(self) -> dict[str, Any]:
        """Return what would be trained, and what it costs, as JSON values."""
        trials = self.trials
        n = max(1, len(trials))
        calls = [c.attributes for t in trials for c in t.play.result.trace.llm_calls()]
        triplets = [triplet for t in trials for triplet in t.triplets]
        costs = {
            "calls": len(calls),
            "prompt_tokens": sum(token_count(call, "prompt") or 0 for call in calls),
            "response_tokens": sum(token_count(call, "response") or 0 for call in calls),
        }
        size, example = (STEP, "example_") if self.step is None else (self.step, "")
        return {
            "agent": str(self),
            "reward": str(self.judge),
            "adapter": str(self.adapter),
            "rollouts": len(trials),
            "failures": dict(Counter(t.failure for t in trials if t.failure)),
            "reward_mean": {said: self.mean(said) for said in dict.fromkeys(t.said for t in trials)},
            "trained_by_node": dict(Counter(triplet.node or "(no node)" for triplet in triplets)),
            **{f"{name}_per_rollout": round(total / n, 2) for name, total in costs.items()},
            "trained_calls_per_rollout": round(len(triplets) / n, 2),
            "trained_tokens_per_rollout": round(sum(len(triplet.response_ids) for triplet in triplets) / n, 1),
            "seconds_per_rollout": round(sum(t.play.result.duration_s for t in trials) / n, 3),
            f"{example}step_of_{size}_rollouts": {name: round(total / n * size) for name, total in costs.items()},
        }


@basic
def check_parts(subject: PlaySubject) -> None:
    """Tasks, reward and adapter are found and built.

    Why: A run with these components does not start.
    Cure: Mend what the message names: the tasks, the reward or the adapter.
    """
    _ = subject.rows, subject.judge.made, subject.adapt


@basic
def check_rollouts(subject: PlaySubject) -> None:
    """At most a quarter of the rollouts fail.

    Why: Failed rollouts are left out of training, and more than 25% of them stop the run.
    Cure: See the checks of the agent above; `agentrig dev` shows such a rollout with its spans.
    """
    failed = [t for t in subject.trials if t.play.failure]
    if len(failed) > FAILURES * len(subject.trials):
        raise CheckFailed(f"{len(failed)} of {len(subject.trials)} rollouts failed; the first: {failed[0].play.says()}")


def check_scored(subject: PlaySubject) -> None:
    """The reward can read what the agent answers.

    Why: An `invalid` score leaves the rollout out, as if the environment had failed.
    Cure: Let the agent return what the reward reads (its type, its form), or change the reward.
    """
    for trial in subject.trials:
        if trial.score is not None and trial.score.status == "invalid":
            reason = trial.score.details.get("reason")
            answer = trial.play.result.outcome.answer
            raised = str(reason).startswith(NO_SCORE)
            cure = (
                "Mend the reward. What it reads of a task must be in its `private` (tasks.private)." if raised else ""
            )
            raise CheckFailed(
                f"task {trial.play.task.id}, answer {answer!r:.80}: the score is invalid ({reason})", cure
            )


@needs(check_scored)
def check_readable(subject: PlaySubject) -> str:
    """A model that says the right answers gets more reward than one that says nonsense.

    Why: Right answers earn nothing: there is nothing to learn from.
    Cure: Compare the agent's answer with what the reward expects, and the demonstrator's calls with the agent's tools.
        If the agent needs several replies, and there is no demonstrator, give a script.
    """
    right, nonsense = subject.mean("gold"), subject.mean("nonsense")
    if right is None:
        if subject.endpoint is not None or subject.script is not None:
            raise CheckSkipped(
                f"{'a real model' if subject.endpoint else 'the script'} answered, and no right answers were played: "
                f"leave out {'--endpoint and --model' if subject.endpoint else '--script'} to play them"
            )
        _ = subject.right  # says why they are not known
        raise CheckSkipped("no rollout with a right answer was scored")
    gold = [t for t in subject.trials if t.said == "gold"]
    first = gold[0]
    tools, cure = tools_of(first.play)
    if not right > (nonsense or 0.0):
        private = "".join(f", private.{key} is {with_kind(value)}" for key, value in first.play.task.private.items())
        raise CheckFailed(
            f"the model said the right answer of each task, and the mean reward was {right}; with nonsense "
            f"it was {nonsense}. Task {first.play.task.id}: the agent's answer is "
            f"{with_kind(first.play.result.outcome.answer)}{cut(private, PRIVATE_SHOWN)}"
            f"{tools}{'' if subject.demonstrator else subject.judge.guess}",
            cure,
        )
    if subject.demonstrator is not None and not any(t.score and t.score.correct for t in gold):
        replies = [reply_of(call.attributes) for call in first.play.result.trace.llm_calls()]
        raise CheckFailed(
            f"the model said what the demonstrator says, and the answer of no task was judged correct (mean reward "
            f"{right}). Task {first.play.task.id}: the model said {'; '.join(replies)!r:.160}, and the agent answered "
            f"{first.play.result.outcome.answer!r:.80}{tools}",
            cure,
        )
    if nonsense is None or 2 * nonsense < right:
        return ""
    return (
        f"nonsense gets a mean reward of {nonsense:.3g}, right answers {right:.3g}: a reward that gives nonsense less "
        "leaves more to learn from"
    )


def tools_of(play: Play) -> tuple[str, str]:
    """Return what went wrong with the tools of a rollout, as the end of a message, and the cure; else two empty texts.

    It is a tool that the model called and the agent did not offer, or else what the tools answered: the agent sends
    that to the model with its next call.
    """
    answers: dict[str, None] = {}
    for call in play.result.trace.llm_calls():
        request = mapping(call.attributes.get("request"))
        offered = [_name(tool) for tool in items(request.get("tools"))]
        called = [_name(tool) for tool in items(message_of(call.attributes).get("tool_calls"))]
        if absent := [name for name in called if name not in offered]:
            has = f"the agent's tools are {', '.join(offered)}" if offered else "the agent offered the model no tools"
            return f". The model called {absent[0]}, and {has}", (
                "Give the tool one name: in the `tools` of the agent's request, where the agent does its calls, and in "
                "the demonstrator."
            )
        said = [mapping(message) for message in items(request.get("messages"))]
        answers |= {_text(message.get("content")): None for message in said if message.get("role") == "tool"}
    if not answers:
        return "", ""
    quoted = ", then ".join(repr(text) for text in answers)
    return f". To the model's calls the tool answered {cut(quoted, ANSWERS_SHOWN)}", (
        "If that is an error, compare the demonstrator's calls with what the tool takes: the agent gets a call's "
        "`arguments` as JSON text (json.loads reads it). Else compare the agent's answer with what the reward expects."
    )


def _name(tool: Any) -> str:
    return str(mapping(mapping(tool).get("function")).get("name"))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json_text(content)


def check_trains(subject: PlaySubject) -> None:
    """The adapter keeps calls of the agent.

    Why: No call would be trained: the run stops in its first step.
    Cure: Set `adapter.match` to a regular expression that finds one of these names; `adapter.match=""` keeps all.
    """
    if subject.real and not subject.real.token_ids:
        raise CheckSkipped(
            f"{subject.real.base_url} returns no token ids (`return_token_ids`, as vLLM does), and without them no "
            "call can be trained; without an endpoint, the scripted model shows what the adapter keeps"
        )
    if not any(t.triplets for t in subject.trials):
        traces = [t.play.result.trace for t in subject.trials]
        nodes = sorted({node for trace in traces for call in trace.llm_calls() for node in trace.nodes(call)})
        calls = sum(len(trace.llm_calls()) for trace in traces)
        raise CheckFailed(
            f"of {calls} calls the adapter keeps none; the calls are under: {', '.join(nodes) or 'no node'}"
        )


def _returns_ids(endpoint: Endpoint) -> bool:
    """Ask a server for one token with its id; False if it refuses, does not answer, or gives none."""
    import httpx

    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": "1"}],
        "max_tokens": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    try:
        reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        reply.raise_for_status()
        return bool(reply.json()["choices"][0].get("token_ids"))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):  # the rollouts show what is wrong
        return False


def _value(trial: Trial) -> float:
    return trial.score.value if trial.score and trial.score.value is not None else -math.inf
