"""A set of small components in one plugin file, for the tests of the core.

The tasks are numbers; the agent asks the model whether its number is odd and returns the reply; the model
server of the tests says `odd` to all, so that half of the tasks are answered well. What else an agent may do
is a field of the task's input: see `misbehave`.
"""

from __future__ import annotations

import array
import ctypes
import datetime
import gc
import hashlib
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import attrs
import httpx

import agentrig
from agentrig import (
    AdapterSpec,
    AgentFailure,
    AgentSpec,
    AlgorithmSpec,
    Endpoint,
    HardwareSpec,
    ObserverSpec,
    RecipeSpec,
    RewardSpec,
    Score,
    Task,
    TasksSpec,
    hookimpl,
    setting,
)
from agentrig.adapters import triplet_of
from agentrig.agents import Judged
from agentrig.errors import ConfigError
from agentrig.hardware import Hardware, Probe
from agentrig.processes.shared import umask

SECRET = re.compile(r"gold-[0-9a-f]{12}")


def secret(number):
    """The private part of a task. It is computed, so that this file has no copy of it."""
    return "-".join(("gold", hashlib.sha256(str(number).encode()).hexdigest()[:12]))


# --- tasks ---


@attrs.frozen(kw_only=True)
class TasksConfig:
    do: list[str] = setting(list, help="what the agents of training tasks do, in turn")
    marker: str = setting("", help="a folder where agents leave marks")


@attrs.frozen
class ToyTasks:
    """Numbers; each split has its own."""

    config: TasksConfig
    splits = ("train", "validation", "test")
    roles = {"train": "train", "validation": "validation", "report": "test"}  # noqa: RUF012

    def load(self, split):
        first = 100 * self.splits.index(split)
        return [self.task(split, first + i) for i in range(24)]

    def task(self, split, number):
        do = self.config.do[number % len(self.config.do)] if self.config.do and split == "train" else ""
        given = {"number": number, "do": do, "marker": self.config.marker}
        private = {"parity": "odd" if number % 2 else "even", "gold": secret(number)}
        slices = {"half": "first" if number % 24 < 12 else "second", "split": split}
        return Task(id=f"{split}-{number}", input=given, private=private, slices=slices)


# --- agents ---


def ask(endpoint, content):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=20)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def misbehave(do, task_input):
    if do.startswith("daemon"):  # it leaves the family: a session of its own, no parent, no variables
        subprocess.run(["env", "-i", "setsid", "-f", "setsid", "-f", "sleep", task_input["sleep"]], check=True)
        do = do.removeprefix("daemon-")
    mark = Path(task_input.get("marker") or os.devnull) / f"seen-{task_input.get('number')}"
    if do == "raise":
        raise ValueError("this agent cannot count")
    if do == "typed":
        raise AgentFailure("there is no plan", kind="no-plan")
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "die-once" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "hang":
        if mark.parent.is_dir():
            mark.touch()
        time.sleep(600)
    if do == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do.startswith("closes"):
        os.closerange(3, 256)
    if do == "closes-and-opens":  # files get the numbers
        for _ in range(3, 256):
            os.open(Path(task_input["marker"]) / "file", os.O_CREAT | os.O_RDWR)
    if do == "writes-everywhere":
        for number in range(3, 256):
            with suppress(OSError):
                os.write(number, b"\xff no message of anyone\n")
    if do == "forks" and os.fork():
        time.sleep(1.0)  # the child comes back first
    if do == "limits-files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if do == "clears-modules":
        sys.modules.clear()
    if do == "moves":
        os.chdir("/")
        os.umask(0o777)
        os.environ.clear()
    if do == "moves-back":
        with chdir("/"):
            time.sleep(0.6)
    if do == "makes-pipes-odd":
        for number in range(3, 64):
            with suppress(OSError):
                os.set_blocking(number, False)
    if do == "holds":
        ctypes.PyDLL(None).sleep(600)  # it does not release the interpreter
    if do == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if do == "replaces":
        json.loads = lambda text: {}
    if do == "prints":
        for _ in range(2000):
            os.write(1, b"printed " * 125)
    if do in ("slow", "slower"):
        time.sleep(0.6 if do == "slow" else 4.0)


class Unwritable(dict):
    def items(self):
        raise OSError("the rows are gone")


class Speechless(Exception):
    """An exception whose message cannot be read."""

    def __str__(self):
        raise RuntimeError("no words")


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


class Touches:
    """Touches a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path(self.marker).touch, ())


def ring(keys):
    """Return a list and a dict that contain themselves and each other, several times."""
    found, named = [], {}
    found += [found, named] * 2
    named |= dict.fromkeys(keys, found) | {"self": named}
    return found


def noted(value):
    """Record a value in a span."""
    from agentrig.tracing.recorder import current

    current().add("note", time.time(), {"value": value})
    return "odd"


def write_to_run(data):
    """Write to the connection to the run, as hostile code could."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family == socket.AF_UNIX and found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == 1:
                os.write(found.fileno(), data)
    time.sleep(600)


def speechless():
    raise Speechless


def long_kind():
    raise AgentFailure("the plan is missing", kind="a very long text about what went wrong, \ud800 and where, " * 9)


PLAIN = {
    "large": 2**80,
    "small": 5e-324,
    "text": "\u2028é",
    "none": [None, True],
}

HOSTILE = {
    "noise": b"\x80\x05 noise\n" * 3,
    "length": b"\x7f\xff\xff\xff half of a message",
    "form": b'result job-0 {"outcome": {"answer": 1}, "spans": [{"id": 3}]}\n',
    "deep": b"result job-0 " + b"[" * 100_000 + b"\n",
}


class Anything:
    def __getattr__(self, name):
        return self


ODD_ANSWERS = {
    "anything": Anything,
    "mock": lambda: [1, MagicMock()],
    "mock-of-dict": lambda: {"rows": MagicMock(spec=dict)},
    "mock-of-text": lambda: {"rows": [MagicMock(spec=str)]},
    "bytes": lambda: {"rows": [{"name": b"x"}]},
    "set": lambda: {"found": {1}},
    "array": lambda: {"scores": array.array("f", [1.0])},
    "date": lambda: [datetime.date(2024, 1, 1)],
    "key": lambda: {"a": {(1, 2): 3}},
    "own-reward": lambda: Judged(answer=1, reward="high"),
    "unwritable": lambda: Unwritable(a=1),
    "nested": lambda: nested(700),
    "deep": lambda: nested(100_000),
    "ring": lambda: ring("ab"),
    "odd-ring": lambda: ring([1, "1"]),
    "unsendable-ring": lambda: noted(ring("ab")),
    "not-finite": lambda: {"rows": [1.0, math.inf]},
    "numbers-as-keys": lambda: {"rows": [{1: 2, "1": 3, None: 4}]},
    "huge": lambda: "x" * 11_000_000,
    "unsendable": lambda: noted({"rows": [0, lambda: 0]}),
    "speechless": speechless,
    "long-kind": long_kind,
    "surrogate": lambda: {"half \ud800": ["\udfff"]},
    "halves": lambda: ["whole \ud83d\ude00", "é\u2028"],
}


def toy_agent(task_input, endpoint):
    """Ask once, under the name `write_query`."""
    do = task_input.get("do", "")
    misbehave(do, task_input)
    if do == "touches":
        return noted(Touches(task_input["marker"]))
    if do.startswith("writes-") and do != "writes-everywhere":
        return write_to_run(HOSTILE[do.removeprefix("writes-")])
    if do == "plain":
        return (noted({**PLAIN, "nan": [math.nan, math.inf, -math.inf]}), PLAIN)
    if do in ODD_ANSWERS:
        return ODD_ANSWERS[do]()
    if do == "where":
        return [os.getcwd(), umask(), "HOME" in os.environ]
    if do in ("no-call", "writes-everywhere") or do.startswith("closes"):
        return "odd"
    if do == "even":
        return "even"
    if do == "nothing":
        ask(endpoint, f"Is {task_input['number']} odd?")
        return None
    if do in ("cold", "as-run"):
        endpoint = endpoint.with_sampling(temperature=0.1 if do == "cold" else 1)
    if do == "seeded":
        endpoint = endpoint.with_sampling(seed=5)
    with agentrig.span("write_query"):
        return ask(endpoint, f"Is {task_input['number']} odd? {task_input.get('wish', '')}")


def spy(task_input, endpoint):
    """Return what this process has: its arguments, and everything in memory that looks like a gold answer."""
    ask(endpoint, "hello")
    seen = set()
    for thing in gc.get_objects():
        values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set) else ()
        seen.update(v for v in list(values) if isinstance(v, str) and SECRET.search(v))
    tasks = sum(isinstance(thing, Task) for thing in gc.get_objects())
    return {"input": dict(task_input), "secrets": sorted(seen), "tasks": tasks, "pid": os.getpid()}


class SharedClient:
    """An `async` agent with one client for all rollouts, as in typical code."""

    def __init__(self):
        self.client = None

    async def __call__(self, task_input, endpoint):
        """Ask once; a task may say that it blocks the event loop."""
        misbehave(task_input.get("do", ""), task_input)
        self.client = self.client or httpx.AsyncClient(timeout=20)
        body = {"model": endpoint.model, "messages": [{"role": "user", "content": f"Is {task_input['number']} odd?"}]}
        with agentrig.span("write_query"):
            reply = await self.client.post(f"{endpoint.base_url}/chat/completions", json=body)
        return reply.json()["choices"][0]["message"]["content"]


@attrs.frozen(kw_only=True)
class BrokenConfig:
    how: str = setting("raise", help="how it fails", choices=("raise", "die", "exit", "hang", "threads"))


def build_broken(config):
    if config.how == "die":
        ctypes.CDLL(None)._exit(7)  # as a library in C does
    if config.how == "exit":
        os._exit(0)
    if config.how == "hang":
        time.sleep(600)
    if config.how == "threads":
        threading.stack_size(1 << 46)  # there is not so much memory
        return toy_agent
    raise RuntimeError("its prompts are missing")


# --- reward, adapter ---


@attrs.frozen(kw_only=True)
class RewardConfig:
    right: float = setting(1.0, help="the value of a right answer", ge=0)
    wrong: float = setting(0.0, help="the value of a wrong answer")
    says: bool = setting(False, help="say itself what is correct")
    invalid: bool = setting(False, help="judge nothing")
    odd: bool = setting(False, help="add details to the score that no file can store")
    calls: bool = setting(False, help="value two calls: half, and none")
    build_s: float = setting(0.0, help="seconds that its build takes", ge=0)
    spin: bool = setting(False, help="keep the interpreter for 25 s for the answer `spin`, whatever is raised")


@attrs.frozen
class ToyReward:
    """1 if the parity is right."""

    config: RewardConfig

    def __call__(self, task, outcome, budget_s):
        if self.config.invalid:
            return Score.invalid("the judge is out", gold=task.private["gold"])
        end = time.monotonic() + 25 if self.config.spin and outcome.answer == "spin" else 0.0
        while time.monotonic() < end:
            with suppress(BaseException):
                while time.monotonic() < end:
                    pass
        right = outcome.answer == task.private["parity"]
        if self.config.odd:
            ring = {"half": "\ud800", ("a", 1): {3}}
            ring["ring"] = ring
            return Score(status="ok", value=float(right), details=[{"half": "\ud800"}, ring][task.id[-1] in "02468"])
        if self.config.calls:
            return Score(status="ok", value=float(right), calls=[0.5, None])
        value = self.config.right if right else self.config.wrong
        return Score.ok(value, correct=right if self.config.says else None, parity=float(right))


def build_reward(config):
    time.sleep(config.build_s)
    return ToyReward(config)


@attrs.frozen(kw_only=True)
class AdapterConfig:
    match: str = setting("", help="keep the calls under nodes whose name matches")


@attrs.frozen
class ToyAdapter:
    """Keeps the calls under a node that matches."""

    config: AdapterConfig

    def __call__(self, trace):
        kept = [c for c in trace.llm_calls() if any(re.search(self.config.match, n) for n in trace.nodes(c) or [""])]
        return [t for c in kept if (t := triplet_of(c, node=(trace.nodes(c) or [""])[0]))]


# --- algorithm ---


@attrs.frozen(kw_only=True)
class NumberConfig:
    endpoint: str = setting(help="the model server")
    steps: int = setting(3, help="training steps", ge=0)
    tasks: int = setting(6, help="tasks a step", ge=1)
    group: int = setting(2, help="rollouts a task", ge=1)
    change: float = setting(1.0, help="the weight change that it reports")
    token_ids: bool = setting(True, help="ask for token ids")
    wait_s: float = setting(0.0, help="seconds to wait in each step", ge=0)
    report: bool = setting(True, help="measure before and after")
    validate_first: bool = setting(False, help="validate before the first step, of a resumed run too")
    keys: dict[str, int] = setting(dict, help="more settings, in a table")
    figures: dict[str, Any] = setting(dict, help="more figures that it reports")
    cut_after: int = setting(0, help="the step after which the power is cut; 0 for none")
    plans: bool = setting(True, help="say how many steps there will be")
    refuse: str = setting("", help="why it takes no settings; empty if it does")


class Number:
    """Learns one number: each step adds its mean reward, times the step."""

    def __init__(self, config):
        self.config = config
        self.number = 0.0

    def endpoint(self):
        return Endpoint(
            base_url=self.config.endpoint,
            model="toy-model",
            api_key="key-1",
            token_ids=self.config.token_ids,
            sampling={"temperature": 0.8},
        )

    def run(self, session):
        if self.config.refuse:
            raise ConfigError(self.config.refuse)
        if session.checkpoint is not None:
            self.number = json.loads((session.checkpoint / "number.json").read_text())["number"]
        if self.config.plans:
            session.plan_steps(self.config.steps)
        if self.config.report:
            session.report(self.endpoint(), when="before", step=0)
        if self.config.validate_first:
            session.validate(self.endpoint(), step=session.first_step - 1)
        for step in range(session.first_step, self.config.steps + 1):
            if session.stopping:
                return
            if session.solved:
                break
            first = (step * self.config.tasks) % len(session.train_tasks)
            tasks = [session.train_tasks[(first + i) % len(session.train_tasks)] for i in range(self.config.tasks)]
            rollouts = session.rollouts(tasks, n=self.config.group, endpoint=self.endpoint(), step=step)
            values = [r.value for r in rollouts if r.value is not None]
            self.number += step * sum(values) / len(values)
            time.sleep(self.config.wait_s)
            session.validate(self.endpoint(), step=step)
            session.end_step(
                step,
                metrics={"weight_change": self.config.change, "number": self.number, **self.config.figures},
                time_s={"update": 0.001},
            )
            session.save_checkpoint(step, self.write)
            if step == self.config.cut_after:
                raise ConnectionAbortedError("the power was cut")
        if self.config.report:
            session.report(self.endpoint(), when="after", step=len(session.lines))

    def write(self, folder):
        (folder / "config.json").write_text("{}")
        (folder / "number.json").write_text(json.dumps({"number": self.number}))

    @contextmanager
    def serve(self, *, hardware, checkpoint):
        yield self.endpoint()


# --- observer ---


@attrs.frozen(kw_only=True)
class NotesConfig:
    file: str = setting("notes.txt", help="the file, in the run directory")
    every: int = setting(1, help="note every this many steps", ge=1)


class Notes:
    """Notes what it is told in a file of the run directory."""

    def __init__(self, config):
        self.config = config
        self.lines = []

    def on_run_start(self, event):
        self.file = event.directory / self.config.file
        self.lines.append(json.dumps(event.config["observer"]))

    def on_step_end(self, event):
        """Note the step; fail in the second one."""
        if event.step % self.config.every == 0:
            self.lines.append(f"step {event.step}")
        if event.step == 2:
            sys.exit("no more")

    def on_run_end(self, event):
        self.file.write_text("\n".join([*self.lines, f"end {event.summary['steps']}"]))


# --- hardware ---


@attrs.frozen(kw_only=True)
class BrokenAccelerator(Hardware):
    name: str = "toy-npu"
    torch_device: str = "npu"

    def probe(self):
        return Probe(
            available=False, evidence=("/dev/toy0 is there",), problems=("the driver does not answer: load toy.ko",)
        )


# --- hooks ---


@hookimpl
def register_tasks():
    yield TasksSpec(name="toy-tasks", summary="Numbers.", config=TasksConfig, build=ToyTasks)


@hookimpl
def register_agents():
    yield AgentSpec(name="toy", summary="Asks once.", build=lambda config: toy_agent)
    yield AgentSpec(name="toy-spy", summary="Looks around.", build=lambda config: spy)
    yield AgentSpec(name="toy-shared", summary="Asks by one client.", build=lambda config: SharedClient())
    yield AgentSpec(name="toy-broken", summary="Cannot be built.", config=BrokenConfig, build=build_broken)


@hookimpl
def register_rewards():
    yield RewardSpec(name="toy-parity", summary="Is it right?", config=RewardConfig, build=build_reward)


@hookimpl
def register_adapters():
    yield AdapterSpec(name="toy-match", summary="Matching calls.", config=AdapterConfig, build=ToyAdapter)


@hookimpl
def register_algorithms():
    yield AlgorithmSpec(name="toy-number", summary="Learns a number.", config=NumberConfig, build=Number)


@hookimpl
def register_observers():
    yield ObserverSpec(name="toy-notes", summary="Notes.", config=NotesConfig, build=Notes)


if os.environ.get("TOY_HARDWARE"):  # only in some tests: `auto` would find it

    @hookimpl
    def register_hardware():
        yield HardwareSpec(name="toy-npu", summary="Broken.", build=lambda config: BrokenAccelerator())


@hookimpl
def register_recipes():
    yield RecipeSpec(
        name="toy",
        summary="The number.",
        settings={
            "tasks": {"use": "toy-tasks"},
            "agent": {"use": "toy"},
            "reward": {"use": "toy-parity"},
            "adapter": {"use": "toy-match"},
            "algorithm": {"use": "toy-number", "endpoint": "http://127.0.0.1:9/v1"},
            "hardware": {"use": "cpu"},
            "run": {"validation_tasks": 4, "report_tasks": 4},
            "runners": {"n": 1, "threads": 4, "deadline_s": 20.0},
        },
    )
