"""The hooks. Seven collect named components, five let a plugin observe a run.

Each `register_*` hook returns an iterable of specs; a run selects one of each kind by name, so the
installation order of plugins never matters. Observers return nothing and cannot change data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
    from agentrig.plugins.specs import (
        AdapterSpec,
        AgentSpec,
        AlgorithmSpec,
        HardwareSpec,
        RecipeSpec,
        RewardSpec,
        TasksSpec,
    )
    from agentrig.rollouts import Rollout

hookspec = pluggy.HookspecMarker("agentrig")


@hookspec
def register_tasks() -> Iterable[TasksSpec]:
    """Register task sets.

    Example:
        ```python
        @hookimpl
        def register_tasks():
            yield TasksSpec(name="arithmetic", summary="Sums.", build=lambda config: Arithmetic())
        ```
    """
    raise NotImplementedError


@hookspec
def register_agents() -> Iterable[AgentSpec]:
    """Register agents.

    Example:
        ```python
        @hookimpl
        def register_agents():
            yield AgentSpec(name="one-shot", summary="Asks once.", build=lambda config: ask_once)
        ```
    """
    raise NotImplementedError


@hookspec
def register_rewards() -> Iterable[RewardSpec]:
    """Register rewards.

    Example:
        ```python
        @hookimpl
        def register_rewards():
            yield RewardSpec(name="exact", summary="1 if equal.", build=lambda config: exact)
        ```
    """
    raise NotImplementedError


@hookspec
def register_adapters() -> Iterable[AdapterSpec]:
    """Register adapters.

    Example:
        ```python
        @hookimpl
        def register_adapters():
            yield AdapterSpec(name="last-call", summary="Trains the last call.", build=lambda config: last_call)
        ```
    """
    raise NotImplementedError


@hookspec
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register algorithms.

    Example:
        ```python
        @hookimpl
        def register_algorithms():
            yield AlgorithmSpec(name="best-of-n", summary="Clones the best.", config=Config, build=BestOfN)
        ```
    """
    raise NotImplementedError


@hookspec
def register_hardware() -> Iterable[HardwareSpec]:
    """Register kinds of hardware.

    Example:
        ```python
        @hookimpl
        def register_hardware():
            yield HardwareSpec(name="mps", summary="Apple GPUs.", build=lambda config: Mps())
        ```
    """
    raise NotImplementedError


@hookspec
def register_recipes() -> Iterable[RecipeSpec]:
    """Register recipes.

    Example:
        ```python
        @hookimpl
        def register_recipes():
            yield RecipeSpec(name="sums", summary="Learns sums.", settings={"tasks": {"use": "arithmetic"}})
        ```
    """
    raise NotImplementedError


@hookspec
def on_run_start(event: RunStart) -> None:
    """Called when a run starts.

    Example:
        ```python
        @hookimpl
        def on_run_start(event):
            print(event.directory)
        ```
    """


@hookspec
def on_rollout_end(rollout: Rollout) -> None:
    """Called for every rollout that was scored or that failed.

    Example:
        ```python
        @hookimpl
        def on_rollout_end(rollout):
            print(rollout.id, rollout.failure or rollout.value)
        ```
    """


@hookspec
def on_step_end(event: StepEnd) -> None:
    """Called when a training step has ended.

    Example:
        ```python
        @hookimpl
        def on_step_end(event):
            print(event.step, event.metrics["reward"])
        ```
    """


@hookspec
def on_run_end(event: RunEnd) -> None:
    """Called when a run has ended successfully.

    Example:
        ```python
        @hookimpl
        def on_run_end(event):
            print(event.summary["accuracy"])
        ```
    """


@hookspec
def on_run_error(event: RunError) -> None:
    """Called when a run has ended by an error or by Ctrl-C.

    Example:
        ```python
        @hookimpl
        def on_run_error(event):
            print(event.error)
        ```
    """
