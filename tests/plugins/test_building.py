"""Building: an error or a wrong result of a plugin's `build` ends a command early, with plugin, file and line."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_server import ModelServer

from agentrig import AgentSpec, RewardSpec, TasksSpec
from agentrig.errors import AgentrigError, PluginError
from agentrig.plugins.building import built, defined_at
from agentrig.plugins.registry import Component

FORKS = """
import os, sys
from agentrig import Outcome, Score
from agentrig.credit import worths_of_calls
from agentrig.plugins.building import built
from agentrig.plugins.loading import load
from agentrig.run.splits import read_split
from agentrig.runners.engine import RolloutEngine
from agentrig.rollouts import Rollout
from agentrig.tasks import Task
from agentrig.traces import Trace

registry = load(files=[sys.argv[1]], block=["report"])
made = {kind: built(registry.find(kind, "forks"), None) for kind in ("tasks", "adapter", "credit", "observer")}
(task,) = read_split(made["tasks"], "train", who="task set forks")
rollout = Rollout(
    id="r", step=1, task=task, group="g", mode="train", outcome=Outcome(answer="a"), score=Score.ok(1.0),
    trace=Trace(rollout_id="r"),
)
engine = RolloutEngine(None, scorer=None, adapter=made["adapter"])
assert engine._adapt(rollout).failure is None
worths_of_calls(made["credit"], [rollout])
registry.add_observer(made["observer"], "forks")
registry.notify("on_run_end", event=None)
print(f"the end in {os.getcwd()}", os.waitstatus_to_exitcode(os.wait()[1]) if "FORKS" in os.environ else "")
"""

SOURCE = """
from agentrig import AdapterSpec, AgentSpec, AlgorithmSpec, RewardSpec, TasksSpec, hookimpl

def build(config):
    {body}

class Unread:
    splits = ("train", "validation", "test")
    roles = {{"train": "train", "validation": "validation", "report": "test"}}

    def load(self, split):
        raise AssertionError("tasks were loaded")

@hookimpl
def register_tasks():
    yield TasksSpec(name="unread", summary="", build=lambda config: Unread())

@hookimpl
def register_algorithms():
    yield AlgorithmSpec(name="mine", summary="", build=build)

@hookimpl
def register_agents():
    yield AgentSpec(name="mine", summary="", build=build)

@hookimpl
def register_rewards():
    yield RewardSpec(name="mine", summary="", build=build)

@hookimpl
def register_adapters():
    yield AdapterSpec(name="mine", summary="", build=build)
"""

MAIN = """
import sys
from agentrig.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("SEEN", end.code, sorted({"agentlightning", "torch"} & set(sys.modules)))
"""


RAISES = "return {}['prompts']", "the {kind} mine cannot be built: KeyError: 'prompts' (mine.py:5 in build)"
NONE = "pass", "the {kind} mine cannot be built: `build` (mine.py:4) returned None; it must return a callable"
TEXT = (
    "return 'no'",
    "the {kind} mine cannot be built: `build` (mine.py:4) returned 'no' (str); it must return a callable",
)


@pytest.mark.parametrize(
    ("place", "who"),
    [
        ("import", "plugin forking_plugin"),
        ("build", "the task set forks"),
        ("load", "`load` of task set forks, split train,"),
        ("adapter", "the adapter"),
        ("credit", "the credit"),
        ("observer", "observer forks"),
    ],
)
def test_what_a_plugin_forks_or_where_it_goes_changes_nothing_for_the_command(
    place: str, who: str, tmp_path: Path
) -> None:
    """A `load` that went elsewhere took the run's directory with it; then the reward was blamed, and the run ended."""
    file = Path(__file__).parents[1] / "support" / "forking_plugin.py"

    def does(**how: str) -> subprocess.CompletedProcess[str]:
        command, env = [sys.executable, "-c", FORKS, os.path.relpath(file, tmp_path)], {**os.environ, **how}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)

    done = does(FORKS=place)
    assert (done.stdout, done.returncode) == (f"the end in {tmp_path} 1\n", 0), done.stderr
    assert done.stderr.startswith(f"agentrig: {who}"), done.stderr
    assert "forking_plugin.py:" in done.stderr
    assert "and the child came back: it is ended. End a child by os._exit" in done.stderr
    done = does(MOVES=place)
    assert (done.stdout, done.returncode) == (f"the end in {tmp_path} \n", 0), done.stderr
    assert done.stderr.startswith(who.partition(",")[0]), done.stderr
    said = " changed the current directory to /, and all code in its process shares that: put back"
    assert done.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("command", "kind", "case"),
    [
        ("train", "agent", RAISES),
        ("train", "algorithm", RAISES),
        pytest.param("eval", "reward", NONE, marks=pytest.mark.slow),
        pytest.param("dev", "adapter", TEXT, marks=pytest.mark.slow),
    ],
)
def test_a_component_that_cannot_be_built_ends_a_command_before_anything_heavy_starts(
    tmp_path: Path, model: ModelServer, toy_file: str, command: str, kind: str, case: tuple[str, str]
) -> None:
    body, said = case
    (tmp_path / "mine.py").write_text(SOURCE.format(body=body))
    words = [command, "toy", "--plugin", toy_file, "--plugin", "mine.py", f"--{kind}", "mine"]
    words += ["--tasks", "unread"] if kind == "algorithm" else [f"algorithm.endpoint={model.url}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=100,
        check=False,
    )
    assert said.format(kind=kind) in done.stderr
    assert re.search(r"it comes from plugin mine \(file \S*mine\.py\)", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "SEEN 1 []"
    assert model.requests == []
    assert not (tmp_path / "runs").exists()


class Odd:
    """Its objects cannot be called."""

    def __init__(self, config: Any) -> None:
        raise ValueError("no")


def component(spec: Any) -> Component:
    return Component(kind=spec.kind, spec=spec, plugin="p", distribution="d", version="1")


def test_a_file_that_every_package_has_is_named_with_its_folder() -> None:
    import agentrig_agent_match

    assert defined_at(agentrig_agent_match.register_adapters).startswith(" (agentrig_agent_match/__init__.py:")
    assert defined_at(test_a_components_own_message_is_not_changed).startswith(" (test_building.py:")


def test_the_error_of_a_build_without_an_argument_names_its_line() -> None:
    spec = AgentSpec(name="mine", summary="", build=lambda: None)  # type: ignore[arg-type,misc]
    with pytest.raises(PluginError, match=r"but 1 was given \(test_building\.py:\d+\); write build\(config\)"):
        built(component(spec), None)


def test_the_errors_of_partials_and_classes_name_their_lines() -> None:
    assert defined_at(functools.partial(functools.partial(component), 1)).startswith(" (test_building.py:")
    assert defined_at(Odd).startswith(" (test_building.py:")
    assert defined_at(print) == defined_at(7) == ""
    with pytest.raises(PluginError, match=r"ValueError: no \(test_building\.py:\d+ in __init__\)"):
        built(component(RewardSpec(name="odd", summary="", build=Odd)), None)  # type: ignore[arg-type]


def test_a_components_own_message_is_not_changed() -> None:
    def build(config: Any) -> Any:
        raise AgentrigError("make the files first")

    with pytest.raises(AgentrigError, match=r"^make the files first$"):
        built(component(TasksSpec(name="mine", summary="", build=build)), None)


def test_a_reward_may_score_batches_only() -> None:
    class Many:
        def score_many(self, items: Any, budget_s: float) -> list[Any]:
            return []

    assert isinstance(built(component(RewardSpec(name="m", summary="", build=lambda c: Many())), None), Many)  # type: ignore[arg-type,return-value]


def test_one_variable_is_no_list_of_its_letters() -> None:
    with pytest.raises(ValueError, match=r'AgentSpec mine: write environment=\["MY_KEY"\], a list of strings'):
        AgentSpec(name="mine", summary="A test.", build=lambda config: print, environment="MY_KEY")
