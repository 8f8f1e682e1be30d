"""A trial of an agent with its tasks, its reward and an adapter: what would be trained, and what it costs."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import attrs

from agentrig.credit import rewards_of_calls
from agentrig.endpoints import Endpoint
from agentrig.figures import mean
from agentrig.plan import RunSettings
from agentrig.pools import Job
from agentrig.rollouts import Rollout
from agentrig.run.guards import FORM_ONLY, ONE_FORM
from agentrig.run.metrics import count_failures, count_nodes
from agentrig.run.warmup import no_call_shown
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.runtime import Runtime
from agentrig.tasks import Task
from agentrig.testing.agent import FORMS, AgentSubject, demonstrated, ended
from agentrig.testing.kit import basic, needs
from agentrig.testing.reward import NO_SCORE, RewardSubject
from agentrig.testing.scripted import Reply
from agentrig.testing.subject import CheckFailed, CheckSkipped
from agentrig.text import amount, cut, differs_in_form_only, json_kind, json_text, with_kind
from agentrig.traces import items, mapping, message_of, reply_of, token_count

NONSENSE = "lorem ipsum"
"""What a model says that knows nothing."""

STEP = 128
"""Rollouts in the step whose costs are stated where no recipe says how many a step has: 16 tasks, 8 rollouts each."""

COUNTED = 500
"""Most tasks whose right answers are counted, to say what guessing reaches."""


@attrs.define(kw_only=True, eq=False, slots=False)
class PlaySubject(AgentSubject):
    """An agent with its tasks, its reward and an adapter; `AgentSubject` has the other options.

    Attributes:
        reward: The reward, a `RewardSubject`.
        adapter: The adapter, a `Subject`.
        endpoint: A real model's server; None for the scripted one.
        step: Rollouts of a step of the recipe that uses the agent; None without one.
    """

    reward: Any = None
    adapter: Any = None
    limit: int = 12
    script: Any = None
    endpoint: Endpoint | None = None
    step: int | None = None

    @cached_property
    def judge(self) -> RewardSubject:
        """The reward, with the agent's tasks."""
        judge: RewardSubject = attrs.evolve(self.reward, tasks=self.rows, limit=len(self.rows))
        return judge

    @cached_property
    def engine(self) -> RolloutEngine:
        """Scores and adapts what was played, as in a run."""
        return RolloutEngine(Runtime(self.pool), scorer=self.judge.scorer(), adapter=self.adapter.made)

    @cached_property
    def real(self) -> Endpoint | None:
        """The real model's server; it is asked once whether it returns token ids."""
        return self.endpoint and attrs.evolve(self.endpoint, token_ids=_returns_ids(self.endpoint))

    def job(self, task: Task) -> Job:
        """Return a job of a task, for the real model if there is one."""
        job = super().job(task)
        return attrs.evolve(job, endpoint=self.real) if self.real else job

    def trial(self, task: Task, script: Any) -> Rollout:
        """Play, score and adapt a task."""
        result = self.alone(task, script).result
        (rollout,) = self.engine.scored([result], {result.id: (task, task.id)}, step=0, mode="dev")
        return rollout

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
        low = _value(self.trial(task, NONSENSE))
        return next((f for f in FORMS if _value(self.trial(task, Reply(text=f.format(right)))) > low), FORMS[0])

    @cached_property
    def trials(self) -> dict[str, list[Rollout]]:
        """Every task by what the model says: `model` (a real one), `script`, or `gold` (right replies) and `nonsense`.

        Right replies are those of the demonstrator, calls of tools included; without one, the task's gold as text.
        """
        if self.endpoint is not None:
            return {"model": [self.trial(task, None) for task in self.rows]}
        if self.script is not None:
            return {"script": [self.trial(task, self.script) for task in self.rows]}
        right: list[Any] = []
        if self.demonstrator is not None:
            right = [demonstrated(task, self.demonstrator) for task in self.rows]
        else:
            with contextlib.suppress(CheckSkipped):  # the right answers are not known
                right = [Reply(text=self.form.format(text)) for text in self.right]
        gold = [self.trial(task, script) for task, script in zip(self.rows, right, strict=False)]
        nonsense = {"nonsense": [self.trial(task, NONSENSE) for task in self.rows]}
        return {"gold": gold, **nonsense} if gold else nonsense

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them."""
        return list(chain(*self.trials.values()))

    @property
    def right_answers(self) -> dict[str, Any]:
        """Task id to the agent's answer if the model says what the demonstrator says, where that is correct."""
        right = self.trials.get("gold", []) if self.demonstrator is not None else []
        return {r.task.id: r.outcome.answer for r in right if r.correct}

    @property
    def not_gold(self) -> str:
        """Why a task's gold is no answer: the agent never answers with such a JSON value; '' if it may be one."""
        answers = [r.outcome.answer for r in self.rollouts if r.outcome.answer is not None]
        try:
            golds = self.judge.golds
        except CheckSkipped:
            return ""
        if not answers or {_shape(answer) for answer in answers} & {_shape(gold) for gold in golds}:
            return ""
        return (
            f'the right answer is not known: private["{self.judge.gold_key}"] is {json_kind(golds[0])}, and the agent '
            f"answers with {json_kind(answers[0])}. Let AgentSpec(demonstrate=...) or the task set's method "
            "demonstrate(task, call) say what the model replies (docs/how-to/laptop.md)"
        )

    def mean(self, said: str) -> float | None:
        """Return the mean reward of the rollouts in which the model said this; None if none was scored."""
        found = mean([r.value for r in self.trials.get(said, []) if r.value is not None])
        return None if found is None else round(found, 4)

    @cached_property
    def most_frequent_answer(self) -> float:
        """The share of the split's tasks with the most frequent right answer; 0 if all differ, or none is known.

        A model that only guesses can be right so often. 0 too if the agent asks more than once.
        """
        if sum(len(rollout.trace.llm_calls()) for rollout in self.rollouts) > len(self.rollouts):
            return 0.0
        tasks = self.tasks if self.task_set is None else self.task_set
        try:
            golds = attrs.evolve(self.reward, tasks=tasks, split=self.split, limit=COUNTED).golds
        except CheckSkipped:
            return 0.0
        most = max(Counter(map(json_text, golds)).values())
        return round(most / len(golds), 3) if most > 1 else 0.0

    def figures(self) -> dict[str, Any]:
        """Return what would be trained, and what it costs, as JSON values.

        A rollout costs what the right replies cost, where these are played: nonsense ends sooner.
        """
        rollouts = self.rollouts
        right = [r for r in self.trials.get("gold", []) if r.correct]
        counted = right or rollouts
        n = max(1, len(counted))
        calls = [call.attributes for r in counted for call in r.trace.llm_calls()]
        triplets = [triplet for r in counted for triplet in r.triplets]
        costs = {
            "calls": len(calls),
            "prompt_tokens": sum(token_count(call, "prompt") or 0 for call in calls),
            "response_tokens": sum(token_count(call, "response") or 0 for call in calls),
        }
        firsts = {said: rollouts[0] for said, rollouts in self.trials.items() if rollouts}
        of_calls = {said: list(rewards_of_calls(rollout)) for said, rollout in firsts.items()}
        size, example = (STEP, "example_") if self.step is None else (self.step, "")
        return {
            "agent": str(self),
            "reward": str(self.judge),
            "adapter": str(self.adapter),
            "rollouts": len(rollouts),
            "failures": count_failures(rollouts),
            "reward_mean": {said: self.mean(said) for said in self.trials},
            "most_frequent_answer": self.most_frequent_answer,
            "trained_by_node": count_nodes(rollouts)["trained"],
            **({"figures_below": f"of {amount(n, 'rollout')} with right replies"} if right else {}),
            **{f"{name}_per_rollout": round(total / n, 2) for name, total in costs.items()},
            **({"first_rewards_of_calls": of_calls} if {*chain(*of_calls.values())} - {None} else {}),
            "trained_calls_per_rollout": round(len(triplets) / n, 2),
            "trained_tokens_per_rollout": round(sum(len(triplet.response_ids) for triplet in triplets) / n, 1),
            "seconds_per_rollout": round(sum(r.duration_s for r in counted) / n, 3),
            f"{example}step_of_{size}_rollouts": {name: round(total / n * size) for name, total in costs.items()},
        }


@basic
def check_parts(subject: PlaySubject) -> None:
    """Tasks, reward and adapter are found and built.

    Why: A run with these components does not start.
    Cure: Mend what the message names: the tasks, the reward or the adapter.
    """
    _ = subject.rows, subject.judge.made, subject.adapter.made


@basic
def check_rollouts(subject: PlaySubject) -> None:
    """At most a quarter of the rollouts fail.

    Why: Failed rollouts are left out of training, and more than 25% of them stop the run.
    Cure: See the checks of the agent above; `agentrig dev` shows such a rollout with its spans.
    """
    failed = [r for r in subject.rollouts if r.outcome.failure]
    if len(failed) > RunSettings().failure_limit * len(subject.rollouts):
        first = ended(failed[0].task, failed[0].outcome)
        raise CheckFailed(f"{len(failed)} of {len(subject.rollouts)} rollouts failed; the first: {first}")


def check_scored(subject: PlaySubject) -> None:
    """The reward can read what the agent answers.

    Why: An `invalid` score leaves the rollout out, as if the environment had failed.
    Cure: Let the agent return what the reward reads (its type, its form), or change the reward.
    """
    for rollout in subject.rollouts:
        if rollout.score is not None and rollout.score.status == "invalid":
            reason = rollout.score.details.get("reason")
            raised = str(reason).startswith(NO_SCORE)
            raise CheckFailed(
                f"task {rollout.task.id}, answer {rollout.outcome.answer!r:.80}: the score is invalid ({reason})",
                "Mend the reward. What it reads of a task must be in its `private` (tasks.private)." if raised else "",
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
    gold = subject.trials["gold"]
    first = gold[0]
    why, cure = tools_of(first)
    guess = "" if subject.demonstrator else subject.judge.guess
    answer = first.outcome.answer
    if not why and any(differs_in_form_only(answer, value) for value in first.task.private.values()):
        why, cure, guess = f": {FORM_ONLY}", ONE_FORM, ""
    if not right > (nonsense or 0.0):
        private = "".join(f", private.{key} is {with_kind(value)}" for key, value in first.task.private.items())
        raise CheckFailed(
            f"the model said the right answer of each task, and the mean reward was {right}; with nonsense "
            f"it was {nonsense}. Task {first.task.id}: the agent's answer is "
            f"{with_kind(answer)}{cut(private, 300)}{why}{guess}",
            cure,
        )
    if subject.demonstrator is not None and not any(r.correct for r in gold):
        replies = [reply_of(call.attributes) for call in first.trace.llm_calls()]
        raise CheckFailed(
            f"the model said what the demonstrator says, and the answer of no task was judged correct (mean reward "
            f"{right}). Task {first.task.id}: the model said {'; '.join(replies)!r:.160}, and the agent answered "
            f"{answer!r:.80}{why}",
            cure,
        )
    facts = []
    if subject.demonstrator is None and (offered := _offered(gold)):
        facts.append(f"warning, if you use `agentrig warmup`: {no_call_shown(offered)}")
    if nonsense is not None and 2 * nonsense >= right:
        facts.append(
            f"nonsense gets a mean reward of {nonsense:.3g}, right answers {right:.3g}: a reward that gives nonsense "
            "less leaves more to learn from"
        )
    return "\n".join(facts)


def _offered(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the names of the tools that calls offer the model."""
    requests = [mapping(call.attributes.get("request")) for r in rollouts for call in r.trace.llm_calls()]
    return list(dict.fromkeys(_name(tool) for request in requests for tool in items(request.get("tools"))))


def tools_of(rollout: Rollout) -> tuple[str, str]:
    """Return what went wrong with the tools of a rollout, as the end of a message, and the cure; else two empty texts.

    It is a tool that the model called and the agent did not offer, or else what the tools answered: the agent sends
    that to the model with its next call.
    """
    answers: dict[str, None] = {}
    for call in rollout.trace.llm_calls():
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
        told = [message.get("content") for message in said if message.get("role") == "tool"]
        answers |= dict.fromkeys(text if isinstance(text, str) else json_text(text) for text in told)
    if not answers:
        return "", ""
    quoted = ", then ".join(repr(text) for text in answers)
    return f". To the model's calls the tool answered {cut(quoted, 200)}", (
        "If that is an error, compare the demonstrator's calls with what the tool takes: the agent gets a call's "
        "`arguments` as JSON text (json.loads reads it). Else compare the agent's answer with what the reward expects."
    )


def _shape(value: Any) -> str:
    return json_kind(value) if isinstance(value, dict | list) else "a single value"


def _name(tool: Any) -> str:
    return str(mapping(mapping(tool).get("function")).get("name"))


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
    if not any(rollout.triplets for rollout in subject.rollouts):
        calls = [(r.trace, call) for r in subject.rollouts for call in r.trace.llm_calls()]
        nodes = sorted({node for trace, call in calls for node in trace.nodes(call)})
        raise CheckFailed(
            f"of {len(calls)} calls the adapter keeps none; the calls are under: {', '.join(nodes) or 'no node'}"
        )


def _returns_ids(endpoint: Endpoint) -> bool:
    """Ask a server for one token with its id and its prompt's; False if it refuses, does not answer, or gives none."""
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
        answer = reply.json()
        choice = answer["choices"][0]
        return bool(choice.get("token_ids") and (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):  # the rollouts show what is wrong
        return False


def _value(rollout: Rollout) -> float:
    return -math.inf if rollout.value is None else rollout.value
