"""One attempt: calls the agent in this thread and returns a typed result."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.agents import Agent, Judged, Outcome
from agentrig.endpoints import without_proxy
from agentrig.errors import FAILURE_KIND, AgentFailure, AgentrigError, place_of
from agentrig.gateway.client import GatewayAttempt, GatewayError
from agentrig.pools import AgentSource, Job, Result
from agentrig.processes.confine import hint, key_advice
from agentrig.processes.ends import forks_ended, no_silent_end
from agentrig.processes.put_back import restored, restored_since, tell
from agentrig.processes.shared import CURE, SharedByRollouts, import_clients
from agentrig.prompting import prompted
from agentrig.runners.loops import RunnerLoop, awaited
from agentrig.tasks import field_hint
from agentrig.text import check_characters, cut, masked, plain_json, storable, words_of
from agentrig.traces import GIVEN, RETURNED, RUNNER, Trace, value_digest

if TYPE_CHECKING:
    from agentrig.tracing.recorder import Recorder

log = logging.getLogger(__name__)

CLIENTS = ("openai", "anthropic", "httpx", "httpx2", "httpcore", "httpcore2")
"""Packages whose exceptions mean that a call to the model failed."""

ANSWER_SHOWN = 300
"""Most characters of a server's answer that a failure's message has."""

ANSWER_LIMIT = 10_000_000
"""Longest answer, in characters of JSON."""


def build_agent(plan: AgentSource) -> tuple[Agent | None, str]:
    """Build a runner's agent; return it and '', or None and why it cannot be built. Nothing is raised.

    What records its calls, and all of its clients, is imported here: it does not count towards a rollout's deadline.
    """
    try:
        from agentrig.tracing.recording import install

        install()
        with no_silent_end():
            agent = plan.build()
            import_clients()
            return agent, ""
    except BaseException as error:
        own = isinstance(error, AgentrigError)
        text = storable(str(error)) if own else words_of(error)
        return None, f"{'' if own else 'no runner can start: '}{key_advice(text)}{text}{hint(text)}"


def run_agent(agent: Agent, job: Job, loop: RunnerLoop | None = None) -> Result:
    """Run one rollout in this thread; exceptions become typed failures.

    Args:
        loop: The loop of an `async` agent. All its rollouts in a process share one loop,
            because a client is bound to the loop of its first call. None for a new loop.
    """
    start, clock = time.time(), time.perf_counter()
    address, visit = job.endpoint.gateway, None
    if address is not None and not getattr(agent, "reads_own_trace", False):
        visit = GatewayAttempt(address, job.id)
        try:
            job = attrs.evolve(job, endpoint=visit.open(job.attempt, job.endpoint, measured=_measured(job)))
        except GatewayError as error:
            failed = Outcome(failure="llm-error", message=words_of(error))
            return Result(id=job.id, outcome=failed, trace=Trace(rollout_id=job.id), start=start, duration_s=0.0)
    with masked(job.endpoint.api_key if visit is not None else "", "<the rollout's key>"):
        recorder, outcome = _called(agent, job, loop, visit)
        trace = recorder.trace()
    return Result(id=job.id, outcome=outcome, trace=trace, start=start, duration_s=time.perf_counter() - clock)


def _called(agent: Agent, job: Job, loop: RunnerLoop | None, visit: GatewayAttempt | None) -> tuple[Recorder, Outcome]:
    """Call the agent and record its calls; those that went through the gateway are fetched there at the end."""
    from agentrig.tracing.recording import recording

    endpoint, began = job.endpoint, time.monotonic()
    without_proxy(endpoint.base_url)
    muted = bool(getattr(agent, "records_itself", False))
    with (
        recording(
            job.id,
            token_ids=endpoint.token_ids,
            muted=muted,
            base_url=endpoint.base_url,
            gateway=visit is not None,
            sampling=endpoint.sampling,
            # A LitAgent has a temperature of its own for validation.
            replace=_measured(job) and not getattr(agent, "reads_own_trace", False),
            key="" if endpoint.api_key == "none" else endpoint.api_key,
            headers=endpoint.headers,
        ) as recorder,
        prompted(job.prompts),
    ):
        recorder.about[RUNNER] = f"{os.getpid()}@{platform.node()}"
        try:
            if isinstance(job.input, Mapping) and (digest := value_digest(job.input)):  # the agent may change it
                recorder.about[GIVEN] = digest
            whole = getattr(agent, "run_job", None)
            job = attrs.evolve(job, endpoint=endpoint.unmarked())
            with forks_ended("the agent"):
                answer = whole(job) if whole is not None else agent(job.input, job.endpoint)
            if inspect.isawaitable(answer):
                import asyncio

                answer = loop.result(answer) if loop else asyncio.run(awaited(answer))
            restored()
            own = answer if isinstance(answer, Judged) else Judged(answer=answer)
            digest = value_digest(own.answer)
            outcome = Outcome(answer=json_values(own.answer), own_reward=_number(own.reward))
            if digest:
                recorder.about[RETURNED] = digest
        except BaseException as error:  # BaseException: nothing else in this thread would handle a CancelledError
            restored()
            blocked = loop.blocked_since(began) if loop else ""
            outcome = _failed(error, job, restored_since(began), blocked)
            recorder.fail(outcome.message.removeprefix(key_advice(words_of(error))))
    if visit is not None:
        try:
            calls = visit.close()
            recorder.join(calls.spans, cut=calls.cut)
        except GatewayError as error:
            outcome = Outcome(failure="llm-error", message=f"the rollout's calls are lost: {words_of(error)}")
            recorder.fail(outcome.message)
    return recorder, outcome


def _measured(job: Job) -> bool:
    """Whether a rollout is a measurement: then the run's sampling replaces the agent's."""
    return job.measured or job.mode in ("val", "test")


def _failed(error: BaseException, job: Job, told: str = "", blocked: str = "") -> Outcome:
    """Return the outcome of a rollout whose agent raised an exception.

    Args:
        blocked: Is added to that of a timeout, which then is no failure of the model's server.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    kind = failure_kind(error)
    message = words_of(error)
    if not FAILURE_KIND.fullmatch(kind):
        named = f"(its kind {cut(storable(kind), 60)!r} is no short name: letters, digits, -, _ and ., at most 40)"
        kind, message = "agent-error", f"{message} {named}"
    own = kind == "agent-error"
    place = place_of(error) + field_hint(error, input=job.input) if own else _answer_of(error, message)
    if blocked and any("Timeout" in type(each).__name__ for each in _chain(error)):
        kind, told = "agent-error" if kind == "llm-error" else kind, told + blocked
    hints = hint(message) or _await_hint(message)
    return Outcome(failure=kind, message=key_advice(message) + message + place + hints + told)


def _await_hint(message: str) -> str:
    """Return what to do about an agent that used, or returned, what a call to an async client gives before `await`."""
    return " (is an `await` missing before the call that gave the coroutine?)" if "coroutine" in message else ""


def _answer_of(error: BaseException, message: str) -> str:
    """Return what a model's server answered with a failed call, unless the exception's message has it already."""
    response = next((r for each in _chain(error) if (r := getattr(each, "response", None)) is not None), None)
    try:
        text = str(getattr(response, "text", None) or "")
    except RuntimeError:  # httpx: the answer was a stream that nobody has read
        return ""
    said = cut(storable(" ".join(text.split())), ANSWER_SHOWN)
    return f": {said}" if said and said not in message and "Error code: " not in message else ""


def json_values(answer: Any) -> Any:
    """Return an answer as the JSON values that the reward gets; two halves of a character, side by side, become it.

    Raises:
        AgentFailure: It is no plain data, too long, nested too deep, or has a lone surrogate; the kind is `bad-answer`.
    """
    try:
        text = plain_json(answer, "its answer", strict=True)
        if len(text) > ANSWER_LIMIT:
            raise ValueError(f"its answer has {len(text)} characters of JSON, {ANSWER_LIMIT} are allowed")
        values = json.loads(text)
        check_characters(values, "its answer")
        return values
    except ValueError as error:
        raise AgentFailure(str(error), kind="bad-answer") from None
    except Exception as error:  # a dict's or list's own methods may raise anything
        raise AgentFailure(
            f"the agent answered with {type(answer).__name__}: {words_of(error)}; return text, numbers, lists or dicts",
            kind="bad-answer",
        ) from None


def _number(reward: Any) -> float | None:
    """Return an agent's own reward as a plain number."""
    if reward is not None and not hasattr(reward, "__float__"):
        raise AgentFailure(f"its own reward is of the type {type(reward).__name__}; return a number", kind="bad-answer")
    number = None if reward is None else float(reward)
    if number is not None and not math.isfinite(number):
        raise AgentFailure(f"the agent returned {number} as its reward; return a finite number", kind="bad-answer")
    return number


def packed(
    agent: Agent,
    job: Job,
    loop: RunnerLoop | None = None,
    shared: SharedByRollouts | None = None,
) -> bytes:
    """Run a rollout and return its `Result`, packed. An error is one, so that no rollout waits for its deadline.

    Args:
        shared: Compares what the rollouts of this process share; what this one has changed is put back.

    Raises:
        InterpreterChanged: It changed something while other rollouts were under way here.
    """
    started, why, result = time.monotonic(), "", None
    what = "the rollout cannot be run in its process"
    turn = shared.begin() if shared is not None else None
    try:
        result = run_agent(agent, job, loop)
        what = "the rollout's result cannot be sent from its process"
        data = result.packed()
    except BaseException as error:
        restored()
        why = f"{what}: {words_of(error)}{restored_since(started)}"
    if shared is not None and turn is not None:
        replaced, did = shared.end(turn)
        tell(did)
        said = f"the agent {replaced}, {'which nothing can undo here' if shared.lasting else 'and it is put back'}"
        if replaced and shared.several:
            why = f"{said}: {CURE}"
        elif replaced and result is not None:
            log.info("%s: the next rollout begins without it", said)
            why, data = "", result.packed()
    return job.failed("agent-error", why, started).packed() if why else data


def failure_kind(error: BaseException) -> str:
    """Return the failure kind of an exception that an agent raised; of a group, that of all of its exceptions."""
    for each in _chain(error):
        if isinstance(each, BaseExceptionGroup):
            kinds = {failure_kind(one) for one in each.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent-error"
        if isinstance(each, AgentFailure):
            return each.kind if isinstance(each.kind, str) else f"<{type(each.kind).__name__}>"
        if type(each).__module__.split(".")[0] in CLIENTS:
            return "llm-error"
    return "agent-error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, the one that it was raised from or in handling of, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
