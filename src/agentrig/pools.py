"""Pools: the runners of a run, and what the run asks of them.

`[runners] use` selects where agents run: `processes` of this machine, or what a plugin brings by `register_runners`.
`RunnersSpec.build(config)` returns a `MakePool`. The run calls it once and owns the pool that it returns: rollouts go
in as jobs, each comes back as one result, and the agent's process never sees more of a task than its input.

`agentrig.runners.pools.BasePool` has the bookkeeping of a pool whose runners can die: queue, deadlines, repetitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure
from agentrig.settings import setting
from agentrig.text import MESSAGE_LIMIT, check_depth, cut, json_text, plain_json, whole_json, words_of
from agentrig.traces import LLM_CALL, Span, Trace

RESULT_BYTES = 256_000_000
"""Largest result that a runner may send, as JSON."""

AROUND = 3
"""Levels of a result around the answer of an agent, or around the attributes of a span."""


@attrs.frozen(kw_only=True)
class RunnerSettings:
    """Section `[runners]`: the keys of all runners. The config class of a `RunnersSpec` is this one, or extends it."""

    n: int = setting(2, help="runners; each holds the agent, often 100 MB and more", ge=1, le=1024)
    threads: int = setting(8, help="rollouts at once in each runner", ge=1, le=1024)
    deadline_s: float = setting(
        120.0, help="time limit of a rollout in seconds; then its runner is killed and the rollout fails", gt=0
    )
    retries: int = setting(1, help="how often a rollout is restarted when its runner dies", ge=0)
    environment: list[str] = setting(
        list, help="environment variables, or patterns, that runners get in addition to those that the agent declares"
    )


@attrs.frozen(kw_only=True)
class Job:
    """One rollout to run; of the task, a runner gets only `input`.

    An agent is called with `input` and `endpoint`. One with a method `run_job` is called with the whole job instead.

    Attributes:
        id: The rollout's id.
        input: JSON values; a mapping, except under an algorithm of Agent Lightning, which may enqueue anything.
        endpoint: The model's server.
        mode: `train`, `val` or `test`, as Agent Lightning has them; None if an algorithm set none.
        measured: Whether it is a measurement whatever its mode: the run's sampling replaces the agent's.
        attempt: The number of this attempt, from 1; a rollout whose runner died has more than one.
        attempt_id: The id of the store's attempt; empty outside Agent Lightning's store. A rollout whose runner died
            keeps it; one that the store hands out again has another.
        config: The rollout's `RolloutConfig`, as JSON values; empty for the default.
        metadata: What an algorithm stored with the rollout.
        resources: The resources that an algorithm of Agent Lightning stored, by name, as JSON values; empty if there
            are none besides the endpoint.
        resources_id: Their id in the store.
        prompts: The agent's prompts in force, name to template; empty if it has none.
    """

    id: str
    input: Any
    endpoint: Endpoint
    mode: str | None = "train"
    measured: bool = False
    attempt: int = 1
    attempt_id: str = ""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    metadata: Mapping[str, Any] | None = None
    resources: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, repr=False)
    resources_id: str | None = None
    prompts: Mapping[str, str] = attrs.field(factory=dict, repr=False)

    @property
    def given(self) -> Any:
        """The input for an agent outside of the runner's process: with the prompts in force, as `prompts`.

        Raises:
            AgentFailure: The task has a `prompts` of its own, or its input is no mapping.
        """
        if not self.prompts:
            return self.input
        if not isinstance(self.input, Mapping) or "prompts" in self.input:
            raise AgentFailure(
                'the agent gets its prompts as "prompts" of its input, and a task has that too', kind="wrong-task"
            )
        return {**self.input, "prompts": dict(self.prompts)}

    def again(self) -> Job:
        """Return the job of the next attempt, after its runner died or was killed."""
        return attrs.evolve(self, attempt=self.attempt + 1)

    def failed(self, kind: str, message: str, started: float) -> Result:
        """Return the failed result of a job that did not finish; `started` is on the monotonic clock."""
        duration = time.monotonic() - started
        return Result(
            id=self.id,
            outcome=Outcome(failure=kind, message=message),
            trace=Trace(rollout_id=self.id),
            start=time.time() - duration,
            duration_s=duration,
        )


@attrs.frozen(kw_only=True)
class Result:
    """The result of a job. `start` is Unix time, `duration_s` the agent's wall time."""

    id: str
    outcome: Outcome
    trace: Trace
    start: float
    duration_s: float

    def packed(self) -> bytes:
        """Return it as JSON, in which it leaves a runner: a run never unpickles what an agent's process sends.

        Raises:
            ValueError: Something in it is no plain data, or it is larger than `RESULT_BYTES`; the message names it.
        """
        spans = [{field.name: getattr(span, field.name) for field in attrs.fields(Span)} for span in self.trace.spans]
        sent = {
            "outcome": attrs.asdict(self.outcome, recurse=False),
            "start": self.start,
            "duration_s": self.duration_s,
            "spans": spans,
        }
        try:
            text = plain_json(sent, "the result", around=AROUND)
        except ValueError:
            for span in spans:
                if span["name"] == LLM_CALL:  # a program may send a request of any depth: the server refuses it
                    span["attributes"] = {key: _shallow(key, value) for key, value in span["attributes"].items()}
                plain_json(span["attributes"], f'its span "{span["name"]}": attributes')
            text = plain_json(sent, "the result", around=AROUND)
        if len(text) > RESULT_BYTES:
            raise ValueError(f"it has {len(text) / 1e6:.0f} MB of JSON, {RESULT_BYTES / 1e6:.0f} are allowed")
        return text.encode()

    @classmethod
    def unpacked(cls, id: str, data: bytes | str) -> Result:
        """Return the result that `packed` described.

        Raises:
            ValueError: It is no JSON, or has another form.
        """
        try:
            sent = whole_json(data if isinstance(data, str) else data.decode())
            check_depth(sent, "it", around=AROUND)
            result = cls(
                id=id,
                outcome=Outcome(**sent["outcome"]),
                trace=Trace(rollout_id=id, spans=tuple(Span(**span) for span in sent["spans"])),
                start=float(sent["start"]),
                duration_s=float(sent["duration_s"]),
            )
        except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the result of rollout {id} is not as a runner sends it: {words_of(error)}") from None
        outcome = result.outcome
        texts = [outcome.message, outcome.failure or ""]
        numbers = [0.0 if outcome.own_reward is None else outcome.own_reward]
        for span in result.trace.spans:
            texts += [span.id, span.parent or "", span.name, span.error or ""]
            numbers += [span.start, span.end]
            if not (isinstance(span.attributes, dict) and isinstance(span.otel, dict)):
                raise ValueError(f"the result of rollout {id} has a span whose attributes are no dict")
        if not all(isinstance(x, str) for x in texts) or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(f"the result of rollout {id} has a field of another type than a runner sends")
        return result


def _shallow(key: str, value: Any) -> Any:
    """Return a body of a call that is nested too deep to be sent as text, anything else as it is."""
    try:
        check_depth({key: value}, key)
        return value
    except ValueError:
        return cut(json_text(value), MESSAGE_LIMIT) if key in ("request", "response") else value


class AgentSource(Protocol):
    """How a runner builds its agent; plain values, so it can be pickled and sent. `AgentPlan` is the one of a run."""

    @property
    def name(self) -> str:
        """The agent's name."""

    @property
    def files(self) -> Sequence[str]:
        """Plugin files, as paths of the run's machine; they are loaded before the agent is built."""

    @property
    def environment(self) -> Sequence[str]:
        """Names or patterns of the variables that the agent gets beside `agentrig.processes.confine.BASE`."""

    def build(self) -> Agent:
        """Load the plugins and build the agent, in the runner.

        Raises:
            agentrig.errors.AgentrigError: It cannot be built; the message names the plugin's file and line.
        """


class RunnerPool(Protocol):
    """Runners with a queue in front, as the run uses them: from one thread, except `submit` and `wake`.

    What a pool promises, and the checks `runners.…` of `agentrig.testing` check:

    - every submitted job comes back from `poll` exactly once, as a `Result` with its id: an agent that raises, a result
      that cannot be sent and a dead runner are failures with a kind, never exceptions of `poll`;
    - a rollout that runs past `deadline_s` fails with `deadline`, its runner ends, and other rollouts of that runner
      start again;
    - a rollout whose runner died starts again (`Job.again`), at most `retries` times; then it fails with `runner-died`;
    - after `close`, and after the run's process was killed, no process that a runner or its agent started is left.

    Attributes:
        built: Set once a runner has built the agent.

    A pool may also have `warnings`, a sequence of texts: what the run's summary says of its runners; and `untouched`,
    whether jobs wait for runners from elsewhere, and none of them has begun: the first signal then ends the run.
    """

    built: threading.Event

    @property
    def n(self) -> int:
        """Number of runners; 0 for a pool that runs nothing."""

    @property
    def deadline_s(self) -> float:
        """Time limit of a rollout in seconds."""

    @property
    def retries(self) -> int:
        """How often a rollout starts again when its runner died."""

    @property
    def room(self) -> int:
        """How many more jobs could start now; the run's queue does not become much longer than this."""

    @property
    def pending(self) -> int:
        """Number of jobs that were submitted and have not come back."""

    @property
    def replaced(self) -> int:
        """How many runners were replaced."""

    def build_first(self, timeout_s: float) -> bool:
        """Start one runner and wait until it has built the agent, at most `timeout_s` seconds; it goes on after that.

        Returns:
            Whether the agent is built.

        Raises:
            agentrig.errors.AgentrigError: The agent cannot be built.
        """

    def start(self) -> None:
        """Start the missing runners; they build the agent in the background."""

    def submit(self, job: Job) -> None:
        """Queue a job; called in any thread."""

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""

    def poll(self, timeout_s: float) -> Sequence[Result]:
        """Send jobs to runners, wait for events at most this long, and return the finished results.

        Raises:
            agentrig.errors.AgentrigError: The agent cannot be built, or there is no place for any runner: the run ends.
        """

    def processes(self) -> Sequence[int]:
        """Return the process ids of the runners on this machine; empty if they are elsewhere."""

    def close(self) -> None:
        """End all runners and what they started; their current rollouts are lost. A second call does nothing."""


class MakePool(Protocol):
    """What `RunnersSpec.build(config)` returns, and what an algorithm's `pool` is: makes the pool, starts nothing."""

    def __call__(
        self, plan: AgentSource, *, n: int, threads: int, deadline_s: float, retries: int, preload: Iterable[str] = ()
    ) -> RunnerPool:
        """Return the pool.

        Args:
            plan: How a runner builds the agent.
            threads: Rollouts at once in each.
            deadline_s: Time limit of a rollout in seconds.
            retries: How often a rollout starts again when its runner died.
            preload: Modules that the agent needs and that a runner may import before it builds the agent.
        """
