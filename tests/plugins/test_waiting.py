"""Components that hold up or end a command while they are built or called: named, with file and line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_server import ModelServer

from agentrig.errors import PluginError
from agentrig.plan import resolve
from agentrig.plugins import waiting
from agentrig.plugins.loading import load
from agentrig.run.training import train

MINE = """
import ctypes
import os
import time
from agentrig import AlgorithmSpec, RewardSpec, Score, TasksSpec, hookimpl

def build_slow(config):
    time.sleep(0.6)
    return lambda task, outcome, budget_s: Score.ok(1.0)

def leave(config):
    os._exit(3)

def crash(config):
    os.abort()

def hang(config):
    native, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        native.pthread_mutex_lock(lock)  # the second never returns, and keeps Python's lock: no thread can run

def late(config):
    def judge(task, outcome, budget_s):
        os._exit(5)
    return judge

def crash_late(config):
    return lambda task, outcome, budget_s: os.abort()

class Unread:
    splits = ("train", "validation", "test")
    roles = {"train": "train", "validation": "validation", "report": "test"}

    def load(self, split):
        raise AssertionError("tasks were loaded")

def broken(config):
    return {}["weights"]

@hookimpl
def register_rewards():
    yield RewardSpec(name="slow", summary="", build=build_slow)
    yield RewardSpec(name="leaves", summary="", build=leave)
    yield RewardSpec(name="crashes", summary="", build=crash)
    yield RewardSpec(name="hangs", summary="", build=hang)
    yield RewardSpec(name="crashes-late", summary="", build=crash_late)
    yield RewardSpec(name="leaves-late", summary="", build=late)

@hookimpl
def register_tasks():
    yield TasksSpec(name="unread", summary="", build=lambda config: Unread())

@hookimpl
def register_algorithms():
    yield AlgorithmSpec(name="broken", summary="", build=broken)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "toy_waiting.py"
    file.write_text(MINE)
    return str(file)


def test_a_slow_build_and_a_slow_observer_are_named_while_they_run(
    mine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from agentrig.plugins.building import built

    monkeypatch.setattr(waiting, "PATIENCE_S", 0.2)
    registry = load(files=[mine], block=["report"])

    class Slow:
        def on_step_end(self, event: object) -> None:
            waiting.threading.Event().wait(0.6)

    with caplog.at_level(logging.WARNING):
        component = registry.find("reward", "slow")
        built(component, component.spec.config())
        registry.watch({"tracker": Slow()})
        registry.notify("on_step_end", event=1)
    build, observer = [r.getMessage() for r in caplog.records]
    assert build.startswith(
        "the build of the reward slow (file -) has not ended after 0.2 s (toy_waiting.py:8 in build_slow). Ctrl-C ends"
    )
    assert observer.startswith("on_step_end of observer tracker has not ended after 0.2 s (test_waiting.py:")
    assert "do slow work in a thread of its own" in observer


def test_every_component_is_built_before_tasks_are_loaded(mine: str, toy_file: str, tmp_path: Path) -> None:
    own = [f"run.directory={tmp_path}/runs", "runners.n=1"]
    plan = resolve("toy", overrides=own, uses={"tasks": "unread", "algorithm": "broken"}, files=[toy_file, mine])
    with pytest.raises(PluginError, match=r"the algorithm broken cannot be built: KeyError: 'weights' \(toy_waiting"):
        train(plan)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("reward", "status", "said"),
    [
        (
            "leaves",
            3,
            "agentrig: the code of plugin toy_waiting has ended this process by os._exit(3) (toy_waiting.py:12 in",
        ),
        ("leaves-late", 5, "has ended this process by os._exit(5) (toy_waiting.py:24 in judge)"),
        (
            "crashes",
            -6,
            "agentrig: this process has ended in the build of the reward crashes (file -). Mend its `build` "
            "(toy_waiting.py:14), use another reward, or block the plugin (AGENTRIG_BLOCK=toy_waiting)",
        ),
        (
            "crashes-late",
            -6,
            "agentrig: this process has ended in the reward crashes-late (file -) (judging 1 answers). Mend it",
        ),
        (
            "hangs",
            -6,
            "agentrig: the build of the reward hangs (file -) has not ended after 5 s, and the command is ended. ",
        ),
    ],
)
def test_a_reward_that_ends_the_process_has_last_words(
    mine: str, tmp_path: Path, toy_file: str, model: ModelServer, reward: str, status: int, said: str
) -> None:
    """A crash in native code, and the end of a build that hangs, also show Python's own stack, with file and line."""
    words = ["eval", "toy", "--plugin", toy_file, "--plugin", mine, "--reward", reward, "--endpoint", model.url]
    command = [sys.executable, "-m", "agentrig", *words, "--limit", "1"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")}
    environment |= {"AGENTRIG_BUILD_S": "5"} if reward == "hangs" else {}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == status
    assert said in done.stderr.replace(f"{tmp_path}/", "")
    stack = {"crashes": 'toy_waiting.py", line 15 in crash', "hangs": 'toy_waiting.py", line 20 in hang'}
    stack["crashes-late"] = 'toy_waiting.py", line 28 in <lambda>'
    assert stack.get(reward, "") in done.stderr
    assert done.stderr.count("agentrig: ") == 1


def test_one_thread_watches_all_blocks() -> None:
    watch, told, before = waiting.Watch(), [], waiting.threading.active_count()
    rest = waiting.threading.Event()
    with watch.over(30, lambda: told.append("long")):
        for _ in range(200):
            with watch.over(0.3, lambda: told.append("short")):
                pass
        assert waiting.threading.active_count() == before + 1
        with watch.over(0.1, lambda: told.append("outer")), watch.over(0.2, lambda: told.append("inner")):
            rest.wait(0.6)
        assert told == ["outer", "inner"]
        with watch.over(0.1, lambda: told.append("again")):
            rest.wait(0.4)
    assert told == ["outer", "inner", "again"]


def test_a_fork_watches_its_own_blocks_only() -> None:
    watch, told = waiting.Watch(), []
    reading, writing = os.pipe()
    with watch.over(0.2, lambda: told.append("the parent's")):
        child = os.fork()
        if child == 0:
            told.clear()
            waiting.threading.Event().wait(0.5)
            with watch.over(0.1, lambda: told.append("the child's")):
                waiting.threading.Event().wait(0.5)
            os.write(writing, repr(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 1000) == b'["the child\'s"]'
    assert told == ["the parent's"]
