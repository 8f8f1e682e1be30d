"""The checks of an agent: it is played in runner processes, against a scripted server."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import cloudpickle

from agentrig.agents import Agent, Outcome
from agentrig.demonstrations import Demonstrate, built
from agentrig.endpoints import LIMIT, GatewayAddress
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.learners import LoopSettings
from agentrig.pools import Job, Result
from agentrig.run.demonstration_server import Conversation
from agentrig.run.guards import GREEDY
from agentrig.runners.processes import Pool
from agentrig.settings import structure
from agentrig.tasks import Task
from agentrig.testing.elsewhere import packed
from agentrig.testing.kit import basic, needs
from agentrig.testing.scripted import Reply, Request, Script, ScriptedServer, reply_to, scripted_server
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject, TriedSubject, difference, texts_of
from agentrig.text import amount
from agentrig.traces import SERVER

START_S = 120.0
"""Seconds until an agent must be built, its imports included."""

READ_PRIVATE = "read-private"
"""Failure kind of an agent that asks for a key of `private`."""

SAMPLING: Mapping[str, Any] = {"temperature": 0.83, "top_p": 0.93, "max_tokens": 48, "seed": 7}
"""The endpoint's sampling fields."""

SAID = "ok"
"""What the scripted model says, if the kit's user names no script."""

ODD: Mapping[str, str | Reply] = {
    "an empty reply": "",
    "words without sense": "lorem ipsum; {dolor: ((sit ``` SELECT",
    "a reply cut by max_tokens": Reply(text='{"answer": [1, 2', finish_reason="length"),
    "a long reply": "word " * 4000,
    "a call of a tool that nobody offered": Reply(tool_calls=[("launch", {"now": True})]),
}
"""Replies of a weak model."""

OWN_ENDS = ("an empty reply", "a call of a tool that nobody offered")
"""Those that many libraries end a rollout on, by an error or a limit of turns of their own: no fault of the agent."""

FORMS = ("{}", "Answer: {}", "```\n{}\n```", "### ANSWER: {} ###", "### {} ###", "<answer>{}</answer>", "\\boxed{{{}}}")
"""How a model may write a right answer; the agent reads one of these."""


@attrs.frozen
class Play:
    """One rollout: its task, its result, and what the server got meanwhile."""

    task: Task
    result: Result
    requests: Sequence[Request] = ()

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

    @property
    def unanswered(self) -> bool:
        """Whether it ended without a failure, an answer and a reward of its own."""
        outcome = self.result.outcome
        return outcome.failure is None and outcome.answer is None and outcome.own_reward is None

    def differs(self, other: Play) -> str:
        """Return what differs when the task is played again, or ''; the order of calls does not count."""
        mine, others = (sorted(p.asked, key=lambda body: json.dumps(body, sort_keys=True)) for p in (self, other))
        return difference(
            {"failure": self.failure, "calls": mine, "answer": self.result.outcome.answer},
            {"failure": other.failure, "calls": others, "answer": other.result.outcome.answer},
        )


def ended(task: Task, outcome: Outcome) -> str:
    """Say how a task's rollout failed."""
    return f"task {task.id}: it ended with {outcome.failure}: {outcome.message}"


@attrs.frozen(kw_only=True)
class SentAgent:
    """How a runner process builds the agent under test: an `agentrig.pools.AgentSource` that needs no files."""

    name: str
    pickled: bytes = attrs.field(repr=False)
    environment: Sequence[str] = ()
    files: Sequence[str] = ()

    def build(self) -> Agent:
        """Load and build the agent."""
        subject: Subject = cloudpickle.loads(self.pickled)
        agent: Agent = subject.made
        return agent


class PrivateKeys(dict[str, Any]):
    """A task's input that ends the rollout when its reader asks for a key of `private`."""

    def __init__(self, given: Any, private: Sequence[str]) -> None:
        super().__init__(given)
        self.private = sorted(set(private) - set(given))

    def __reduce__(self) -> Any:
        """Pickle with the keys."""
        return PrivateKeys, (dict(self), self.private)

    def _refuse(self, key: Any) -> None:
        if key in self.private:
            raise AgentFailure(f'the agent asks for private["{key}"]', kind=READ_PRIVATE)

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        raise KeyError(key)

    def __contains__(self, key: Any) -> bool:
        self._refuse(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a key's value."""
        self._refuse(key)
        return super().get(key, default)


@attrs.define(kw_only=True, eq=False, slots=False)
class AgentSubject(TriedSubject):
    """An agent, which is played in runner processes, through a gateway if its spec or the settings ask for one.

    Attributes:
        script: What the scripted server answers (`agentrig.testing.scripted`), the same to the same request.
        deadline_s: Wall seconds for a rollout, as `runners.deadline_s`.
        gateway: Section `[gateway]`: `{"use": "on"}` plays the agent through the gateway.
        slow_s: Seconds that a slow server takes for each call.
    """

    builds = False

    limit: int = 4
    script: Any = SAID
    deadline_s: float = 30.0
    gateway: Any = None
    slow_s: float = 1.0
    _number: int = attrs.field(default=0, init=False)

    @cached_property
    def server(self) -> ScriptedServer:
        """The scripted server."""
        return self.opened.enter_context(scripted_server(self.script))

    @cached_property
    def pool(self) -> Pool:
        """One process, in which as many rollouts run at once as there are tasks."""
        return self.started(threads=max(2, self.limit))

    def started(self, *, threads: int) -> Pool:
        """Return a new runner process that has built the agent.

        Raises:
            AgentrigError: It cannot be built, or takes longer than `START_S`.
        """
        spec = self.spec
        environment = tuple(spec.environment) if spec else ()
        source = SentAgent(name=str(self), pickled=packed(self.sendable()), environment=environment)
        preload = spec.preload if spec else ()
        pool = Pool(source, n=1, threads=threads, deadline_s=self.deadline_s, retries=0, preload=preload)
        self.opened.callback(pool.close)
        if not pool.build_first(START_S):
            raise AgentrigError(f"it has not been built after {START_S:g} s")
        return pool

    @cached_property
    def gateway_address(self) -> GatewayAddress | None:
        """Where the gateway is, if the agent is played through one."""
        settings = structure(GatewaySettings, self.gateway or {}, owner="a run", section="gateway")
        asks = bool(settings.models) or (self.spec is not None and self.spec.calls == "gateway")
        if settings.use == "on" or (settings.use == "auto" and asks):
            return self.opened.enter_context(Gateway(settings)).address
        return None

    def job(self, task: Task) -> Job:
        """Return a job of a task; its input refuses to be asked for a key of `private`."""
        self._number += 1
        whole = bool(self.spec and self.spec.whole_rows)
        given = task.given(whole=True) if whole else PrivateKeys(task.given(whole=False), list(task.private))
        prompts = (self.spec.declared(self.config) if self.spec else None) or {}
        endpoint = self.server.endpoint(**SAMPLING)
        return Job(id=f"check-{self._number}", input=given, endpoint=endpoint, prompts=prompts)

    def play(self, jobs: Sequence[Job], pool: Pool | None = None) -> list[Result]:
        """Run jobs and return their results, in their order; a job that fails is a result too."""
        pool = pool or self.pool
        for job in jobs:
            pool.submit(attrs.evolve(job, endpoint=attrs.evolve(job.endpoint, gateway=self.gateway_address)))
        done: dict[str, Result] = {}
        end = time.monotonic() + START_S + pool.deadline_s * len(jobs)
        while len(done) < len(jobs):
            done |= {result.id: result for result in pool.poll(0.2)}
            if time.monotonic() > end:
                raise AgentrigError(f"{len(jobs) - len(done)} of {len(jobs)} rollouts have not ended")
        return [done[job.id] for job in jobs]

    def alone(self, task: Task, script: Any = None) -> Play:
        """Play a task while no other is played."""
        self.server.script = self.script if script is None else script
        self.server.requests.clear()
        (result,) = self.play([self.job(task)])
        return Play(task, result, tuple(self.server.requests))

    @cached_property
    def plays(self) -> list[Play]:
        """Every task, played alone."""
        return [self.alone(task) for task in self.rows]

    @cached_property
    def demonstrator(self) -> Demonstrate | None:
        """Who says what a right reply to a call is: the agent's spec, or else the task set; None if neither does."""
        if self.spec is not None and self.spec.demonstrate is not None:
            return built(self.spec.name, self.spec.demonstrate, self.config)
        return getattr(self.task_set.made, "demonstrate", None) if self.task_set else None

    @cached_property
    def odd(self) -> dict[str, Play]:
        """The first task, played with odd replies."""
        return {name: self.alone(self.rows[0], reply) for name, reply in ODD.items()}


def demonstrated(task: Task, says: Demonstrate) -> Script:
    """Return the script of a rollout whose model says what a demonstrator says."""
    conversation = Conversation(task, random.Random(task.id))

    def script(body: Mapping[str, Any]) -> Reply:
        answered = conversation.answer(says, body)
        if answered is None:
            return Reply(status=400, text=conversation.problem)
        said, _ = answered
        return Reply(text=said.content, tool_calls=[(c["name"], c.get("arguments", {})) for c in said.tool_calls])

    return script


def told_apart(body: Mapping[str, Any]) -> str:
    """Return a reply that no other conversation has."""
    return f"{SAID} {zlib.crc32(json.dumps(body['messages'], sort_keys=True).encode()):08x}"


@basic
def check_starts(subject: AgentSubject) -> None:
    """A runner process builds it.

    Why: No runner starts, so no run does.
    Cure: Mend what the message names. If `build` works for you: a runner is a fresh process, with no state of yours,
        and only the variables of `AgentSpec.environment`.
    """
    _ = subject.pool


@basic
def check_calls_endpoint(subject: AgentSubject) -> None:
    """Each task leads to a call to the endpoint that the agent was given.

    Why: The model that is trained is not asked: nothing can be learned.
    Cure: Make the client of `endpoint.base_url`, `endpoint.api_key` and `endpoint.model`, in every call of the agent.
        Anthropic's Messages and OpenAI's Responses need `gateway.use=on`.
    """
    for play in subject.plays:
        if not play.requests and play.failure != READ_PRIVATE:
            how = ended(play.task, play.result.outcome) if play.failure else f"task {play.task.id}: it answered"
            cure = "" if play.failure in (None, "llm-error") else "Mend the error: it comes before the first call."
            raise CheckFailed(f"{how}; no call of /chat/completions arrived at the endpoint", cure)


@basic
def check_answers(subject: AgentSubject) -> None:
    """Each task is answered with a JSON value, with an endpoint that works.

    Why: Failed rollouts are left out of training; over 25% of them stop the run.
    Cure: Mend the error that the message names; `agentrig dev` shows such a rollout with its spans. Return text,
        numbers, lists or dicts of them: the answer has to reach the reward in another process.
    """
    for play in subject.plays:
        if play.failure not in (None, READ_PRIVATE):
            raise CheckFailed(ended(play.task, play.result.outcome))
    silent = [play for play in subject.plays if play.unanswered]
    if 2 * len(silent) > len(subject.plays) and not _answers_another_reply(subject, silent[0].task):
        raise CheckFailed(
            f"the agent returned None for {len(silent)} of {amount(len(subject.plays), 'task')}, first for task "
            f"{silent[0].task.id}",
            "Return the answer: a function without `return` returns None. If it returns None where it finds no answer "
            "in a reply, return the reply's text, or give a script whose replies it can read (--script).",
            "The reward has no answer to judge: nothing can be learned.",
        )


def _answers_another_reply(subject: AgentSubject, task: Task) -> bool:
    """Whether the agent returns an answer to a right reply: it may find none in the scripted one."""
    scripts: list[Any] = []
    if subject.demonstrator is not None:
        scripts.append(demonstrated(task, subject.demonstrator))
    scripts += [Reply(text=form.format(text)) for text in texts_of(dict(task.private))[:1] for form in FORMS]
    return any(not subject.alone(task, script).unanswered for script in scripts)


def check_recorded(subject: AgentSubject) -> None:
    """Every call that arrives is recorded, with its token ids.

    Why: Calls without their token ids cannot be trained.
    Cure: Set `gateway.use=on`, or use a client on httpx (openai, langchain-openai, httpx itself).
    """
    for play in subject.plays:
        calls = [c for c in play.result.trace.llm_calls() if c.attributes.get("response_token_ids")]
        if play.failure is None and len(calls) != len(play.requests):
            raise CheckFailed(f"task {play.task.id}: {len(play.requests)} calls arrived, {len(calls)} were recorded")


def check_sampling(subject: AgentSubject) -> None:
    """Every call names the endpoint's model, and has its sampling fields, or a lower limit of tokens.

    Why: Log-probabilities are not those of the policy, or another model answers: the run ends in its first step.
    Cure: Pass `model=endpoint.model` with every call, and leave the sampling fields out, as the run adds its own. A
        temperature of the agent's own must be the run's (`algorithm.temperature`); here only that one's default passes.
    """
    wanted = {**SAMPLING, "model": subject.server.model}
    default = attrs.fields(LoopSettings).temperature.default
    for play in subject.plays:
        for request in play.requests:
            limit = min((request.body[name] for name in LIMIT if request.body.get(name)), default=None)
            got = {**{key: request.body.get(key) for key in wanted}, LIMIT[0]: limit}
            if got["temperature"] == default:  # trained as it is
                got["temperature"] = wanted["temperature"]
            if got != {**wanted, LIMIT[0]: limit} or limit is None or limit > SAMPLING[LIMIT[0]]:
                cure = f"Leave the temperature out of the agent's calls{GREEDY}." if got["temperature"] == 0 else ""
                if got["seed"] != SAMPLING["seed"]:
                    cure = "Leave the seed out of the agent's calls: with it, all rollouts of a task are the same."
                raise CheckFailed(f"task {play.task.id}: this check samples with {wanted}, a call with {got}", cure)


def check_private(subject: AgentSubject) -> None:
    """It asks for no key of `private`, and no private text is in its calls or its answer.

    Why: The agent knows the answer: rewards and accuracy mean nothing.
    Cure: Use only `task_input`. Keep gold out of the agent's modules, prompts and files.
    """
    if subject.spec and subject.spec.whole_rows:
        raise CheckSkipped("its spec asks for whole rows, gold included (whole_rows)")
    said = {}
    for play in subject.plays:
        if play.failure == READ_PRIVATE:
            raise CheckFailed(ended(play.task, play.result.outcome))
        said[play.task.id] = json.dumps([play.asked, play.result.outcome.answer], ensure_ascii=False)
    for play in subject.plays:
        given = json.dumps(dict(play.task.input), ensure_ascii=False)
        others = [text for task_id, text in said.items() if task_id != play.task.id]
        for text in texts_of(dict(play.task.private)):
            known = text in given or any(text in other for other in others)
            if len(text) >= 4 and text in said[play.task.id] and not known:  # a shorter one may be there by chance
                raise CheckFailed(
                    f"task {play.task.id}: {text!r:.60} of its private part is in a call or in the answer"
                )


@needs(check_recorded)
def check_same_twice(subject: AgentSubject) -> None:
    """With equal replies, a task leads to the same calls and the same answer again.

    Why: The difference between rollouts of a group is not the policy's, and no run can be repeated.
    Cure: Seed random choices from the task's input; put no clock and no counter into prompts.
    """
    for play in subject.plays:
        if different := play.differs(subject.alone(play.task)):
            raise CheckFailed(f"task {play.task.id}, played again: {different}")


@needs(check_same_twice)
def check_together(subject: AgentSubject) -> None:
    """Many rollouts at once make the same calls and give the same answers as alone: in one process, and in a second.

    Why: A runner plays several rollouts at once, and a run has several runners: they would mix up their tasks, or only
        one of them would work.
    Cure: Keep what belongs to a rollout in local variables, not in the agent object or in globals. Take no fixed port,
        file or lock; use `tempfile`, and port 0.
    """
    plays = subject.plays
    if subject.script == SAID:  # a reply that is another task's shows only where they differ
        plays = [subject.alone(task, told_apart) for task in subject.rows]
    subject.server.script = told_apart if subject.script == SAID else subject.script
    first, several = subject.pool, f"alone and with {len(plays)} at once"
    for how in (several, several, "in a second process, while there is a first"):
        pool = first if how == several else subject.started(threads=1)
        together = subject.play([subject.job(task) for task in subject.rows], pool)
        for alone, result in zip(plays, together, strict=True):
            if different := alone.differs(Play(alone.task, result)):
                raise CheckFailed(f"task {alone.task.id}, {how}: {different}")


def check_server_error(subject: AgentSubject) -> None:
    """If the server refuses a call, the rollout fails; it has no answer.

    Why: An answer made up after a failed call gets a reward: the policy is trained on a fault of the server.
    Cure: Let errors of the client pass, or raise `AgentFailure(message, kind=...)`; return no answer in their place.
    """
    play = subject.alone(subject.rows[0], Reply(status=400, text="the prompt is too long"))
    if play.failure is None:
        answered = f"it answered {play.result.outcome.answer!r:.60}"
        raise CheckFailed(f"task {play.task.id}: every call was refused with status 400, and {answered}")


def check_odd_replies(subject: AgentSubject) -> str:
    """Odd replies lead to an answer or to a typed failure, not to an exception.

    Malformed, cut and long texts must. That an empty reply, or a call of a tool that nobody offered, ends the rollout
    is how many libraries work: it is reported as a fact.

    Why: A weak model's odd replies end rollouts as faults of the agent: what it should learn from is left out.
    Cure: Catch errors of parsing: return what the model said as the answer, so that the reward can judge it.
    """
    bad = {n: p for n, p in subject.odd.items() if p.failure in ("runner-died", "bad-answer", "agent-error")}
    said = {n: f"your agent ends with {p.failure}, {p.result.outcome.message}" for n, p in bad.items()}
    bearable = [name for name in OWN_ENDS if name in bad and bad[name].failure == "agent-error"]
    return _facts(said, bearable, "Such rollouts are not trained on, and over 25% of them stop a run")


def check_deadline(subject: AgentSubject) -> str:
    """It ends by itself, also when the model never says what it waits for.

    A model that calls tools for ever may keep it going: that is reported as a fact.

    Why: Its runner is killed at the deadline, with what other rollouts had done; steps take as long as the deadline.
    Cure: Limit the number of turns, and give what is there when it is reached.
    """
    late = {name: play for name, play in subject.odd.items() if play.failure == "deadline"}
    said = {
        name: f"your agent has not ended after {subject.deadline_s:g} s and {len(play.requests)} calls"
        for name, play in late.items()
    }
    then = "Limit its turns (LangGraph: recursion_limit), or such rollouts hold a runner until then"
    return _facts(said, OWN_ENDS, then)


def _facts(said: Mapping[str, str], bearable: Sequence[str], then: str) -> str:
    """Raise for a reply that the agent must bear; return what the other ones led to."""
    for name, how in said.items():
        if name not in bearable:
            raise CheckFailed(f"on {name} {how}")
    return "\n".join([*(f"on {name} {how}" for name, how in said.items()), then]) if said else ""


@needs(check_same_twice)
def check_slow_server(subject: AgentSubject) -> None:
    """A server that takes its time for each call changes nothing.

    Why: During training a server is busy: impatient agents fail or make up answers.
    Cure: Use the client's default timeout, or one of minutes; the run ends a rollout at `runners.deadline_s`.
    """
    alone = subject.plays[0]
    if subject.slow_s * len(alone.requests) >= subject.deadline_s:
        raise CheckSkipped(f"{len(alone.requests)} slow calls take longer than the deadline")

    def slow(body: Mapping[str, Any]) -> Reply:
        return attrs.evolve(reply_to(body, subject.script), delay_s=subject.slow_s)

    if different := alone.differs(subject.alone(alone.task, slow)):
        raise CheckFailed(f"task {alone.task.id}, {subject.slow_s:g} s for each call: {different}")
