"""The checks of an agent: it is played in runner processes, against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.endpoints import LIMIT, Endpoint
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job, Result
from agentrig.settings import structure
from agentrig.tasks import Task
from agentrig.testing.checks import CheckFailed, CheckSkipped, Report
from agentrig.testing.playing import READ_PRIVATE, Players, Screaming
from agentrig.testing.samples import difference, some_tasks, texts_of
from agentrig.testing.scripted import Reply, Request, Script, ScriptedServer, scripted_server
from agentrig.testing.table import Bench, Table
from agentrig.traces import SERVER

SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 48, "seed": 7}
"""The endpoint's sampling fields."""

ODD: Mapping[str, str | Reply] = {
    "an empty reply": "",
    "words without sense": "lorem ipsum; {dolor: ((sit ``` SELECT",
    "a reply cut by max_tokens": Reply(text='{"answer": [1, 2', finish_reason="length"),
    "a long reply": "word " * 4000,
    "a tool that nobody offered": Reply(tool_calls=[("launch", {"now": True})]),
}
"""Replies of a weak model."""

OWN_ENDS = ("an empty reply", "a tool that nobody offered")
"""Those that many libraries end a rollout on, by an error or a limit of turns of their own: no fault of the agent."""

SHORT = 4
"""Shorter private texts are not searched for in calls and answers: they would occur by chance."""


@attrs.frozen
class Play:
    """One rollout: its task, its result, and what the server got meanwhile."""

    task: Task
    result: Result
    requests: Sequence[Request]

    @property
    def failure(self) -> str | None:
        """The failure's kind, or None."""
        return self.result.outcome.failure

    @property
    def asked(self) -> list[Any]:
        """The requests' bodies as the tracer recorded them, without what it added."""
        added = ("return_token_ids", "logprobs")
        calls = [c for c in self.result.trace.llm_calls() if SERVER not in c.attributes]
        return [{k: v for k, v in c.attributes["request"].items() if k not in added} for c in calls]

    def says(self) -> str:
        """Describe the rollout for a message."""
        outcome = self.result.outcome
        return f"task {self.task.id}: it ended with {outcome.failure}: {outcome.message}"


@attrs.define(kw_only=True, eq=False, slots=False)
class AgentBench(Bench):
    """What the checks of an agent share.

    Attributes:
        tasks: A list of `Task`, or a task set (`agentrig.testing.samples.some_tasks`); None for the plugin's own.
        tasks_settings: The task set's keys.
        split: Its split.
        limit: How many tasks are played.
        script: What the scripted server answers (`agentrig.testing.scripted`), the same to the same request.
        deadline_s: Wall seconds for a rollout, as `runners.deadline_s`.
        gateway: Section `[gateway]`: `{"use": "on"}` plays the agent through the gateway.
        slow_s: Seconds that a slow server takes for each call.
    """

    tasks: Any = None
    tasks_settings: Any = None
    split: str = ""
    limit: int = 4
    script: Script | str | Reply = "ok"
    deadline_s: float = 30.0
    gateway: Any = None
    slow_s: float = 1.0
    _number: int = attrs.field(default=0, init=False)

    @cached_property
    def rows(self) -> list[Task]:
        """The tasks that are played."""
        return some_tasks(
            self.tasks, subject=self.subject, settings=self.tasks_settings, split=self.split, n=self.limit
        )

    @cached_property
    def server(self) -> ScriptedServer:
        """The scripted server."""
        server: ScriptedServer = self.holding(scripted_server(self.script))
        return server

    @cached_property
    def players(self) -> Players:
        """One process, in which as many rollouts run at once as there are tasks."""
        return self.processes_of(n=1, threads=max(2, self.limit))

    def processes_of(self, *, n: int, threads: int) -> Players:
        """Return new processes with the agent, which end when the bench is closed."""
        settings = structure(GatewaySettings, self.gateway or {}, owner="a run", section="gateway")
        players: Players = self.holding(
            Players(self.subject, n=n, threads=threads, deadline_s=self.deadline_s, gateway=settings)
        )
        return players

    def job(self, task: Task) -> Job:
        """Return a job of a task; its input screams if a key of `private` is read."""
        self._number += 1
        spec = self.subject.spec
        whole = bool(spec and spec.whole_rows)
        endpoint = Endpoint(
            base_url=self.server.url,
            model=self.server.model,
            sampling=SAMPLING,
            token_ids=True,
        )
        given = task.given(whole=whole)
        return Job(
            id=f"check-{self._number}",
            input=given if whole else Screaming(given, list(task.private)),
            endpoint=endpoint,
        )

    def alone(self, task: Task, script: Script | str | Reply | None = None) -> Play:
        """Play a task while no other is played."""
        self.server.script = self.script if script is None else script
        self.server.requests.clear()
        (result,) = self.players.play([self.job(task)])
        return Play(task, result, tuple(self.server.requests))

    def together(self, players: Players) -> list[Play]:
        """Play all tasks at once."""
        self.server.script = self.script
        results = players.play([self.job(task) for task in self.rows])
        return [Play(task, result, ()) for task, result in zip(self.rows, results, strict=True)]

    @cached_property
    def plays(self) -> list[Play]:
        """Every task, played alone."""
        return [self.alone(task) for task in self.rows]

    @cached_property
    def odd(self) -> dict[str, Play]:
        """The first task, played with odd replies."""
        return {name: self.alone(self.rows[0], reply) for name, reply in ODD.items()}


TABLE = Table("agent", AgentBench, builds=False)
check = TABLE.check


@check(
    "starts",
    why="No runner starts, so no run does.",
    cure="Build it in a fresh process: no state of yours, only the variables of `AgentSpec.environment`.",
)
def starts(bench: AgentBench) -> None:
    """A runner process builds it."""
    bench.players.start()


@check(
    "calls-endpoint",
    why="The model that is trained is not asked: nothing can be learned.",
    cure="Make the client of `endpoint.base_url`, `endpoint.api_key` and `endpoint.model`, in every call of the agent. "
    "Anthropic's Messages and OpenAI's Responses need `gateway.use=on`.",
    needs=["starts"],
)
def calls_endpoint(bench: AgentBench) -> None:
    """Each task leads to a call to the endpoint that the agent was given."""
    for play in bench.plays:
        if not play.requests and play.failure in (None, "llm-error"):
            how = play.says() if play.failure else f"task {play.task.id}: it answered"
            raise CheckFailed(f"{how}; no call of /chat/completions arrived at the endpoint")


@check(
    "answers",
    why="Failed rollouts are left out of training; over 25% of them stop the run.",
    cure="Mend the error that the message names; `agentrig dev` shows such a rollout with its spans.",
    needs=["calls-endpoint"],
)
def answers(bench: AgentBench) -> None:
    """Each task is answered, with an endpoint that works."""
    for play in bench.plays:
        if play.failure not in (None, "bad-answer", READ_PRIVATE):
            raise CheckFailed(play.says())


@check(
    "json-answer",
    why="The answer has to reach the reward in another process: each such rollout fails with `bad-answer`.",
    cure="Return text, numbers, lists or dicts of them; no objects, bytes or sets.",
    needs=["answers"],
)
def json_answer(bench: AgentBench) -> None:
    """Each answer is a JSON value."""
    for play in bench.plays:
        if play.failure == "bad-answer":
            raise CheckFailed(play.says())


@check(
    "recorded",
    why="Calls without their token ids cannot be trained.",
    cure="Set `gateway.use=on`, or use a client on httpx (openai, langchain-openai, httpx itself).",
    needs=["answers"],
)
def recorded(bench: AgentBench) -> None:
    """Every call that arrives is recorded, with its token ids."""
    for play in bench.plays:
        calls = [c for c in play.result.trace.llm_calls() if c.attributes.get("response_token_ids")]
        if play.failure is None and len(calls) != len(play.requests):
            raise CheckFailed(f"task {play.task.id}: {len(play.requests)} calls arrived, {len(calls)} were recorded")


@check(
    "sampling",
    why="Log-probabilities are not those of the policy: the run ends in its first step.",
    cure="Leave these fields out of the calls, as the run adds its own; or set the run's to the agent's "
    "(`algorithm.temperature`).",
    needs=["answers"],
)
def sampling(bench: AgentBench) -> None:
    """Every call arrives with the endpoint's sampling fields, or with a lower limit of tokens."""
    for play in bench.plays:
        for request in play.requests:
            limit = min((request.body[name] for name in LIMIT if request.body.get(name)), default=None)
            got = {**{key: request.body.get(key) for key in SAMPLING}, LIMIT[0]: limit}
            if got != {**SAMPLING, LIMIT[0]: limit} or limit is None or limit > SAMPLING[LIMIT[0]]:
                raise CheckFailed(f"task {play.task.id}: the run samples with {dict(SAMPLING)}, a call with {got}")


@check(
    "model",
    why="A server with several models, such as one per adapter, answers with another one.",
    cure="Pass `model=endpoint.model` with every call.",
    needs=["answers"],
)
def model(bench: AgentBench) -> None:
    """Every call names the endpoint's model."""
    for play in bench.plays:
        for request in play.requests:
            if request.body.get("model") != bench.server.model:
                raise CheckFailed(f"task {play.task.id}: a call names {request.body.get('model')!r}")


@check(
    "private",
    why="The agent knows the answer: rewards and accuracy mean nothing.",
    cure="Use only `task_input`. Keep gold out of the agent's modules, prompts and files.",
    needs=["answers"],
)
def private(bench: AgentBench) -> None:
    """It asks for no key of `private`, and no private text is in its calls or its answer."""
    if bench.subject.spec and bench.subject.spec.whole_rows:
        raise CheckSkipped("its spec asks for whole rows, gold included (whole_rows)")
    for play in bench.plays:
        if play.failure == READ_PRIVATE:
            raise CheckFailed(play.says())
    said = {
        play.task.id: json.dumps([play.asked, play.result.outcome.answer], ensure_ascii=False) for play in bench.plays
    }
    for play in bench.plays:
        given = json.dumps(dict(play.task.input), ensure_ascii=False)
        others = [text for task_id, text in said.items() if task_id != play.task.id]
        for text in texts_of(dict(play.task.private)):
            known = text in given or any(text in other for other in others)
            if len(text) >= SHORT and text in said[play.task.id] and not known:
                raise CheckFailed(
                    f"task {play.task.id}: {text!r:.60} of its private part is in a call or in the answer"
                )


@check(
    "same-twice",
    why="The difference between rollouts of a group is not the policy's, and no run can be repeated.",
    cure="Seed random choices from the task's input; put no clock and no counter into prompts.",
    needs=["recorded"],
)
def same_twice(bench: AgentBench) -> None:
    """With equal replies, a task leads to the same calls and the same answer again."""
    for play in bench.plays:
        again = bench.alone(play.task)
        different = difference(_seen(play), _seen(again))
        if different:
            raise CheckFailed(f"task {play.task.id}, played again: {different}")


@check(
    "threads",
    why="A runner plays several rollouts at once: they would mix up their tasks.",
    cure="Keep what belongs to a rollout in local variables, not in the agent object or in globals.",
    needs=["same-twice"],
)
def threads(bench: AgentBench) -> None:
    """Many rollouts at once in one process make the same calls and give the same answers as alone."""
    for _ in range(2):
        for play, alone in zip(bench.together(bench.players), bench.plays, strict=True):
            different = difference(_seen(alone), _seen(play))
            if different:
                raise CheckFailed(f"task {play.task.id}, alone and with {len(bench.plays)} at once: {different}")


@check(
    "processes",
    why="A run has several runner processes: only one of them would work.",
    cure="Take no fixed port, file or lock; use `tempfile`, and port 0.",
    needs=["same-twice"],
)
def processes(bench: AgentBench) -> None:
    """Two processes at once build it, and give the same answers."""
    players = bench.processes_of(n=2, threads=1)
    players.start()
    for play, alone in zip(bench.together(players), bench.plays, strict=True):
        different = difference(_seen(alone), _seen(play))
        if different:
            raise CheckFailed(f"task {play.task.id}, in two processes: {different}")


@check(
    "server-error",
    why="An answer made up after a failed call gets a reward: the policy is trained on a fault of the server.",
    cure="Let errors of the client pass, or raise `AgentFailure(message, kind=...)`; return no answer in their place.",
    needs=["answers"],
)
def server_error(bench: AgentBench) -> None:
    """If the server refuses a call, the rollout fails; it has no answer."""
    play = bench.alone(bench.rows[0], Reply(status=400, text="the prompt is too long"))
    if play.failure is None:
        answer = play.result.outcome.answer
        raise CheckFailed(
            f"task {play.task.id}: every call was refused with status 400, and it answered {answer!r:.60}"
        )


@check(
    "odd-replies",
    why="A weak model's odd replies end rollouts as faults of the agent: what it should learn from is left out.",
    cure="Catch errors of parsing: return what the model said as the answer, so that the reward can judge it.",
    needs=["answers"],
)
def odd_replies(bench: AgentBench) -> str:
    """Odd replies lead to an answer or to a typed failure, not to an exception.

    Malformed, cut and long texts must. That an empty reply, or a call of a tool that nobody offered, ends the rollout
    is how many libraries work: it is reported as a fact.
    """
    facts = []
    for name, play in bench.odd.items():
        if play.failure == "agent-error" and name in OWN_ENDS:
            facts.append(f"{name}: {play.says()}")
        elif play.failure in ("agent-error", "runner-died", "bad-answer"):
            raise CheckFailed(f"{name}: {play.says()}")
    return _no_fault(facts, "Rollouts that end so are not trained on; over 25% of them stop a run")


@check(
    "deadline",
    why="Its runner is killed at the deadline, with what other rollouts had done; steps take as long as the deadline.",
    cure="Limit the number of turns, and give what is there when it is reached.",
    needs=["answers"],
)
def deadline(bench: AgentBench) -> str:
    """It ends by itself, also when the model never says what it waits for.

    A model that calls tools for ever may keep it going: that is reported as a fact.
    """
    facts = []
    for name, play in bench.odd.items():
        if play.failure == "deadline":
            what = f"{name}: after {bench.deadline_s:g} s and {len(play.requests)} calls it had not ended"
            if name not in OWN_ENDS:
                raise CheckFailed(what)
            facts.append(what)
    return _no_fault(facts, "Limit its turns (LangGraph: recursion_limit), or such rollouts hold a runner until then")


def _no_fault(facts: Sequence[str], then: str) -> str:
    return "\n".join([f"a fact, no fault: {facts[0]}", *facts[1:], then]) if facts else ""


@check(
    "slow-server",
    why="During training a server is busy: impatient agents fail or make up answers.",
    cure="Use the client's default timeout, or one of minutes; the run ends a rollout at `runners.deadline_s`.",
    needs=["same-twice"],
)
def slow_server(bench: AgentBench) -> None:
    """A server that takes its time for each call changes nothing."""
    alone = bench.plays[0]
    if bench.slow_s * len(alone.requests) >= bench.deadline_s:
        raise CheckSkipped(f"{len(alone.requests)} slow calls take longer than the deadline")

    def slow(body: Mapping[str, Any]) -> Reply:
        made = bench.script(body) if callable(bench.script) else bench.script
        return attrs.evolve(Reply(text=made) if isinstance(made, str) else made, delay_s=bench.slow_s)

    play = bench.alone(alone.task, slow)
    different = difference(_seen(alone), _seen(play))
    if different:
        raise CheckFailed(f"task {play.task.id}, {bench.slow_s:g} s for each call: {different}")


def _seen(play: Play) -> dict[str, Any]:
    """Return what must be the same when a task is played again."""
    outcome = play.result.outcome
    calls = sorted(play.asked, key=lambda body: json.dumps(body, sort_keys=True))  # some may run at once
    return {"failure": outcome.failure, "calls": calls, "answer": outcome.answer}


def check_agent(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of an agent; see `agentrig.testing.check`, and `AgentBench` for the options.

    Example:
        ```python
        check_agent("my_agent.py:mine", tasks="my-tasks", script="SELECT 1")
        ```
    """
    return TABLE.check_all(subject, settings, only, raise_failed, options)
