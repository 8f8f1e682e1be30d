"""Which runners a run gets: by name, with keys of their own, or those that its algorithm brings."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from agentrig import AlgorithmSpec, Endpoint, RunnersSpec
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import Plan, resolve
from agentrig.pools import Job, Result, RunnerPool
from agentrig.runners.processes import Pool

TOY = str(Path(__file__).parents[1] / "support" / "toy_plugin.py")
MINE = """
import attrs
from functools import partial
from agentrig import RunnersSpec, hookimpl, setting
from agentrig.pools import RunnerSettings
from agentrig.runners.processes import Pool

@attrs.frozen(kw_only=True)
class Config(RunnerSettings):
    mark: str = setting("none", help="what its runners have in TOY_MARK")

def build(config):
    return lambda plan, **limits: Pool(plan, environment={"TOY_MARK": config.mark}, **limits)

@hookimpl
def register_runners():
    yield RunnersSpec(name="mine", summary="Marked processes.", config=Config, build=build)
"""
READER = """
import os
from agentrig import AgentSpec, hookimpl

@hookimpl
def register_agents():
    yield AgentSpec(name="reader", summary="x", build=lambda config: lambda given, endpoint: os.environ["TOY_MARK"])
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "reader.py").write_text(READER)
    return [TOY, str(tmp_path / "mine.py"), str(tmp_path / "reader.py")]


def drain(pool: RunnerPool) -> Result:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for result in pool.poll(0.2):
            return result
    raise AssertionError("no result came")


def chosen(plan: Plan) -> str:
    return plan.components["runners"].spec.name


def test_a_plugins_runners_run_the_agent_with_keys_of_their_own(files: list[str]) -> None:
    plan = resolve(
        "toy", overrides=["runners.mark=here", "runners.n=1"], uses={"runners": "mine", "agent": "reader"}, files=files
    )
    assert (plan.runners.n, plan.as_dict()["runners"]["mark"], plan.as_dict()["runners"]["use"]) == (1, "here", "mine")
    with plan.runner_pool(trains=True) as pool:
        pool.submit(Job(id="a", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="m")))
        assert drain(pool).outcome.answer == "here"


def test_processes_are_the_default_and_keys_of_all_runners_stay(files: list[str]) -> None:
    plan = resolve("toy", files=files)
    assert chosen(plan) == "processes"
    assert isinstance(plan.pool(), Pool)
    assert plan.as_dict()["runners"]["use"] == "processes"
    overrides = ["runners.n=7", "runners.mark=x", "runners.use=mine"]
    mine = resolve("toy", overrides=overrides, files=files)
    assert (mine.runners.n, mine.runners.threads) == (7, plan.runners.threads), "those of the recipe"
    with pytest.raises(ConfigError, match=r'processes .* has no key "mark"'):
        resolve("toy", overrides=["runners.mark=x"], files=files)
    with pytest.raises(AgentrigError, match=r'there are no runners called "mien"\. Did you mean "mine"'):
        resolve("toy", uses={"runners": "mien"}, files=files)


def test_own_runners_are_for_an_algorithm_that_has_some(files: list[str]) -> None:
    with pytest.raises(ConfigError, match="algorithm toy-number brings no runners of its own"):
        resolve("toy", uses={"runners": "own"}, files=files)


def test_an_algorithms_pool_is_told_which_runners_the_run_names(files: list[str]) -> None:
    told = []

    def pool(plan: object, *, make: object, n: int, **limits: object) -> str:
        told.append(make)
        return "its own"

    algorithm = SimpleNamespace(pool=pool)

    def of(use: str, spec: AlgorithmSpec) -> Plan:
        plan = resolve("toy", files=files, uses={"runners": use})
        component = attrs.evolve(plan.components["algorithm"], spec=spec)
        return attrs.evolve(plan, components={**plan.components, "algorithm": component})

    says = AlgorithmSpec(name="says", summary="", build=lambda config: algorithm, runners=True)
    silent = AlgorithmSpec(name="silent", summary="", build=lambda config: algorithm)
    plan = of("processes", says)
    assert plan.pool(plan.own_pool(algorithm)) == "its own"  # type: ignore[comparison-overlap]
    assert told == [Pool]
    default = of("processes", says)
    own = attrs.evolve(
        default.components["runners"], spec=RunnersSpec(name="own", summary="", build=lambda config: Pool)
    )
    default = attrs.evolve(default, components={**default.components, "runners": own})
    default.pool(default.own_pool(algorithm))
    assert told[1] is None
    assert of("processes", silent).own_pool(algorithm) is pool
    with pytest.raises(ConfigError, match="algorithm silent brings its own runners, so these would not be used"):
        of("mine", silent).own_pool(algorithm)
    assert plan.own_pool(None) is None


def test_a_spec_without_the_keys_of_all_runners_is_refused() -> None:
    @attrs.frozen(kw_only=True)
    class Alone:
        """Has no key of all runners."""

    with pytest.raises(ValueError, match=r"write `class Config\(agentrig.pools.RunnerSettings\)`"):
        RunnersSpec(name="alone", summary="", build=lambda config: Pool, config=Alone)
