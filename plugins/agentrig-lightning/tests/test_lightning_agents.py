"""What an agent of Agent Lightning gets for a rollout, and the forms in which `lightning.agent` takes it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agentlightning as agl
import agentrig_lightning as lightning
import attrs
import pytest

from agentrig import Endpoint
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import resolve
from agentrig.pools import Job
from agentrig.run.warmup import choose_labels, demonstrate
from agentrig.runners.attempt import run_agent
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.loops import RunnerLoop
from agentrig.runners.processes import Pool
from agentrig.settings import structure

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="toy-model", sampling={"temperature": 0.5})


def build(source: Any, **more: Any) -> Any:
    spec = lightning.agent(source, name="mine", summary="Mine.", **more)
    return spec.build(spec.config())


def answer(agent: Any, job: Job, loop: Any = None) -> Any:
    result = run_agent(agent, job, loop)
    assert result.outcome.failure is None, result.outcome.message
    return result.outcome.answer


def job(number: int = 0, **more: Any) -> Job:
    return Job(id=f"r{number}", input={"number": number}, endpoint=ENDPOINT, **more)


class Keeping(agl.LitAgent[Any]):
    """Keeps its task in `self` while it waits for others."""

    number = -1
    threads: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.threads = set()

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.number = task["number"]
        self.threads.add(threading.get_ident())
        time.sleep(0.0002)  # lets the other threads run
        return float(self.number) if len(self.threads) == 1 else -1.0


class KeepingAsync(agl.LitAgent[Any]):
    """The same, asynchronously."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.number = task["number"]
        await asyncio.sleep(0)
        return float(self.number)


class Locked(Keeping):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.threads = type("Any", (set,), {"__len__": lambda self: 1})()


CASES = {
    "class": (Keeping, 1000),
    "instance": (Keeping(), 200),
    "async class": (KeepingAsync, 1000),
    "async instance": (KeepingAsync(), 200),
    "instance that can't be copied": (Locked(), 200),
}


@pytest.mark.parametrize("case", CASES)
def test_rollouts_of_an_agent_with_state_are_not_mixed_up(case: str) -> None:
    source, n = CASES[case]
    agent, loop = build(source), RunnerLoop()
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: answer(agent, job(i), loop), range(n)))
    assert answers == [float(i) for i in range(n)]


def test_an_instance_that_cannot_be_copied_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(Locked())
    assert "the agent Locked can't be copied (TypeError: cannot pickle '_thread.lock' object)" in caplog.text
    assert "one at a time" in caplog.text


def test_a_function_that_returns_the_same_agent_twice_is_named() -> None:
    one = Keeping()
    agent = build(lambda: one)
    assert answer(agent, job(3)) == 3.0
    with ThreadPoolExecutor(1) as other:
        result = other.submit(run_agent, agent, job(4)).result()
    assert "returned the same agent twice" in result.outcome.message


@agl.rollout
def decorated(task: Any, llm: Any) -> float:
    """Ends with the temperature: it has been given the endpoint."""
    return task["number"] + llm.sampling_parameters["temperature"]


async def plain(task: Any, llm: Any, rollout: Any) -> float:
    """A function that nobody has decorated."""
    return task["number"] + llm.sampling_parameters["temperature"]


@pytest.mark.parametrize("source", [decorated, plain, lambda: decorated], ids=["decorated", "plain", "factory"])
def test_functions(source: Any) -> None:
    assert answer(build(source), job(2), RunnerLoop()) == 2.5


class Tuned(agl.LitAgent[Any]):
    """Takes arguments, as LitSQLAgent does."""

    def __init__(
        self,
        trained: str | None = "write",
        val_temperature: float | None = None,
        turns: int = 3,
        tool: Any = None,
    ) -> None:
        super().__init__()
        self.turns, self.val_temperature = turns, val_temperature

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return self.turns + (self.val_temperature or 0.0)


def test_the_arguments_of_a_lit_agent_are_its_keys() -> None:
    spec = lightning.agent(Tuned, name="mine", summary="Mine.", environment=["SEARCH_KEY"])
    assert spec.environment == ("VERL_SPIDER_DATA_DIR", "SEARCH_KEY")
    assert list(attrs.fields_dict(spec.config)) == ["trained", "val_temperature", "turns"]
    assert answer(spec.build(spec.config()), job()) == 3
    config = structure(spec.config, {"val_temperature": 0.5, "turns": 5}, owner="mine", section="agent")
    assert answer(spec.build(config), job()) == 5.5
    with pytest.raises(ConfigError, match="turns = 'many' does not fit mine: expected an integer"):
        structure(spec.config, {"turns": "many"}, owner="mine", section="agent")
    with pytest.raises(ConfigError, match="its keys: trained, val_temperature, turns"):
        structure(spec.config, {"temperature": 1}, owner="mine", section="agent")


def test_what_is_no_agent_is_named() -> None:
    with pytest.raises(TypeError, match=r"takes a LitAgent class, an instance, .* this is 'agent'"):
        lightning.agent("agent", name="mine", summary="Mine.")
    with pytest.raises(AgentrigError, match=r"this function made 7, which is no LitAgent"):
        build(lambda: 7)


class Telling(agl.LitAgent[Any]):
    """Keeps what it was given."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.seen.append(("train", task, resources, rollout))
        return 1.0

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.seen.append(("validation", task, resources, rollout))
        return 2.0


def test_the_mode_decides_which_method_is_called() -> None:
    """As in Agent Lightning, everything but `train` is a validation."""
    agent = build(lambda: Telling([]))
    assert [answer(agent, job(mode=mode)) for mode in ("train", "val", "test", None)] == [1.0, 2.0, 2.0, 2.0]


TRAINED_ONLY = """
import agentlightning as agl
import agentrig_lightning as lightning
from agentrig import Endpoint, hookimpl
from warmup_plugin import say


class Asks(agl.LitAgent):
    def training_rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        say(task, Endpoint(base_url=llm.endpoint, model=llm.model, api_key=llm.api_key))
        return 1.0

    def validation_rollout(self, task, resources, rollout):
        raise FileNotFoundError(f"{task['number']} is not in the test databases")


@hookimpl
def register_agents():
    yield lightning.agent(Asks, name="asks", summary="Asks twice.")
"""


def test_demonstrations_of_training_tasks_call_training_rollout(tmp_path: Path) -> None:
    """In the mode of a validation, LitSQLAgent looks for them in the test databases."""
    (tmp_path / "asks.py").write_text(TRAINED_ONLY)
    files = [str(Path(__file__).parents[3] / "tests" / "support" / "warmup_plugin.py"), str(tmp_path / "asks.py")]
    plan = resolve("colors", overrides=["runners.n=1"], uses={"agent": "asks", "reward": "own"}, files=files)
    labels = choose_labels(plan, 2, seed=0).tasks
    assert [turn.reply.content for turn in demonstrate(plan, labels).turns] == [t.private["gold"] for t in labels]


def test_an_agent_gets_the_whole_rollout() -> None:
    seen: list[Any] = []
    agent = build(
        lambda: Telling(seen), initial_resources={"prompt": agl.PromptTemplate(template="{x}", engine="f-string")}
    )
    config = {"timeout_seconds": 9.0, "max_attempts": 3, "retry_condition": ["failed"]}
    answer(agent, job(1, mode="test", attempt=2, attempt_id="at-2", metadata={"source": "me"}, config=config))
    ((_, task, resources, rollout),) = seen
    assert task == rollout.input == {"number": 1}
    assert (rollout.rollout_id, rollout.mode, rollout.metadata) == ("r1", "test", {"source": "me"})
    assert (rollout.attempt.sequence_id, rollout.attempt.attempt_id) == (2, "at-2")
    assert (rollout.config.timeout_seconds, rollout.config.max_attempts) == (9.0, 3)
    assert list(resources) == ["prompt", "main_llm"]
    assert resources["prompt"].format(x="y") == "y"
    assert (resources["main_llm"].endpoint, resources["main_llm"].model) == (ENDPOINT.base_url, "toy-model")
    assert resources["main_llm"].sampling_parameters == {"temperature": 0.5}


def test_prompts_in_force_arrive_as_templates_also_through_a_store() -> None:
    from agentrig_lightning.resources import job_of, lightning_llm, templates_of
    from agentrig_lightning.store import Store

    own = {"ask": agl.PromptTemplate(template="Ask {x}", engine="f-string"), "n": agl.LLM(endpoint="e", model="m")}
    spec = lightning.agent(lambda: Telling([]), name="mine", summary="Mine.", initial_resources=own)
    assert spec.prompts == {"ask": "Ask {x}"}

    prompts = {"ask": "Better: {x}"}

    async def handed_out() -> Job:
        store = Store()
        update = await store.add_resources({**templates_of(prompts), "llm": lightning_llm(ENDPOINT)})
        await store.enqueue_rollout({"number": 1}, "train", update.resources_id)
        return job_of(await store.dequeue_rollout(), update)

    for found in (job(prompts=prompts), asyncio.run(handed_out())):
        seen: list[Any] = []
        answer(build(lambda seen=seen: Telling(seen), initial_resources=own), found)
        ((_, _, resources, _),) = seen
        assert resources["ask"].format(x=1) == "Better: 1"
        assert (resources["n"], resources["main_llm"].model) == (own["n"], "toy-model")


def test_resources_of_an_algorithm_arrive_as_they_are() -> None:
    """Through a real store: several LLMs, a proxy and a prompt template."""
    from agentrig_lightning.resources import job_of
    from agentrig_lightning.store import Store

    given = {
        "prompt": agl.PromptTemplate(template="{x}", engine="f-string"),
        "proxy": agl.ProxyLLM(endpoint="http://127.0.0.1:9/v1", model="a", sampling_parameters={"top_p": 0.5}),
        "judge": agl.LLM(endpoint="http://127.0.0.1:8/v1", model="b"),
    }

    async def handed_out() -> Job:
        store = Store()
        update = await store.add_resources(given)
        config = agl.RolloutConfig(max_attempts=2)
        await store.enqueue_rollout({"number": 1}, "val", update.resources_id, config, {"a": 1})
        return job_of(await store.dequeue_rollout(), update)

    found = asyncio.run(handed_out())
    seen: list[Any] = []
    answer(build(lambda: Telling(seen)), found)
    ((_, _, resources, rollout),) = seen
    assert resources == given
    assert [type(r) for r in resources.values()] == [agl.PromptTemplate, agl.ProxyLLM, agl.LLM]
    assert (rollout.mode, rollout.metadata, rollout.config.max_attempts) == ("val", {"a": 1}, 2)
    assert rollout.attempt.attempt_id == found.attempt_id
    address = f"http://127.0.0.1:9/rollout/{found.id}/attempt/{found.attempt_id}/v1"
    assert found.endpoint.base_url == resources["proxy"].get_base_url(found.id, found.attempt_id) == address
    assert (found.endpoint.model, found.endpoint.sampling) == ("a", {"top_p": 0.5})


class Noting(agl.Hook):
    """Notes when it is called, for one agent."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes

    def __deepcopy__(self, memo: Any) -> Any:
        return Noting(self.notes)  # the notes of all copies

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.notes.append(("rollout start", agent.runner is runner, runner.get_worker_id(), rollout.rollout_id))

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.notes.append(("trace start", tracer is runner.tracer))

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        raise OSError("a hook that raises stops nothing")

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        self.notes.append(("rollout end", [s.name for s in spans]))


def test_hooks_are_called_as_by_a_runner_of_agent_lightning(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[Any] = []
    agent = build(Keeping, hooks=[Noting(notes)])
    assert answer(agent, job(5)) == 5.0
    assert notes == [("rollout start", True, "Worker-0", "r5"), ("trace start", True), ("rollout end", ["rollout"])]
    assert "on_trace_end" in caplog.text
    assert "stops nothing" in caplog.text
    notes.clear()
    failing = build(lambda: agl.LitAgent(), hooks=[Noting(notes)])
    assert run_agent(failing, job(6)).outcome.failure == "agent-error"
    assert [note[0] for note in notes] == ["rollout start", "trace start", "rollout end"]


DYING = """
import os

import agentlightning as agl

import agentrig_lightning as lightning
from agentrig import hookimpl


class Dying(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        if rollout.attempt.sequence_id < 3:
            os._exit(3)
        return float(rollout.attempt.sequence_id)


@hookimpl
def register_agents():
    yield lightning.agent(Dying, name="dying", summary="Its runner dies in its first two attempts.")
"""


@pytest.mark.slow
def test_an_attempt_after_a_runner_died_has_its_number(tmp_path: Path) -> None:
    """In real processes: the third one answers."""
    file = tmp_path / "dying.py"
    file.write_text(DYING)
    plan = AgentPlan(name="dying", config={}, files=(str(file),))
    pool = Pool(plan, n=1, threads=1, deadline_s=60.0, retries=2, preload=("agentrig_lightning.recorder_tracer",))
    try:
        pool.start()
        pool.submit(job(1))
        results: list[Any] = []
        end = time.monotonic() + 120
        while not results and time.monotonic() < end:
            results += pool.poll(0.5)
    finally:
        pool.close()
    assert [(r.outcome.failure, r.outcome.answer) for r in results] == [(None, 3.0)]
