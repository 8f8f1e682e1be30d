"""The hooks. Eleven collect named components, five let a plugin observe a run.

Each `register_*` hook returns an iterable of specs; a run selects one of each kind (and any number of observers) by
name, so the installation order of plugins never matters. Observers return nothing and cannot change data.

Every docstring below says what a hook returns, when it is called, in which thread and process, and what happens when
it raises. For all of a kind:

- A `register_*` hook is called once whenever plugins are loaded, in each command and in each runner process. It returns
  a list of specs, or yields them; nothing else is accepted. Import nothing heavy in it. If it raises, the plugin fails
  to load, with all its components: `agentrig plugins` shows the error, and other plugins work. With `--strict-plugins`,
  or for a file given by `--plugin`, the command ends with the error.
- A hook `on_*` returns nothing; a returned value is ignored. Its argument is a read-only copy. If it raises, the run
  goes on: the first exception of a plugin is logged with its name and traceback, and all are counted in `summary.json`
  under `observer_errors`.
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
        CreditSpec,
        HardwareSpec,
        ObserverSpec,
        RecipeSpec,
        RewardSpec,
        RunnersSpec,
        ServerSpec,
        TasksSpec,
    )
    from agentrig.rollouts import Rollout

hookspec = pluggy.HookspecMarker("agentrig")


@hookspec
def register_tasks() -> Iterable[TasksSpec]:
    """Register task sets.

    Returns:
        An iterable of `TasksSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` and the `load` of what it returns run in
        the main process, before the run directory is made.

    If it raises:
        The plugin fails to load. If `build` or `load` raises, the run does not start.

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

    Returns:
        An iterable of `AgentSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in every runner process, once; the
        agent it returns is called there, in up to `runners.threads` threads at once.

    If it raises:
        The plugin fails to load. If `build` raises in the first runner, the run does not start. If the agent raises,
        its rollout fails with the kind `agent-error`.

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

    Returns:
        An iterable of `RewardSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, once; the reward
        it returns is called there, in several threads at once.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start. If the reward raises, the score is
        `invalid`: the rollout fails and is not trained on.

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

    Returns:
        An iterable of `AdapterSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, once; the adapter
        it returns is called there for each rollout that did not fail, in one thread.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start. If the adapter raises, the rollout fails
        with the kind `adapter-error`.

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

    What only says what each call of a step is worth is no algorithm but a credit: see `register_credits`.

    Returns:
        An iterable of `AlgorithmSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, once; `run` of
        what it returns is called there, in the thread `algorithm`.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start. If `run` raises, the run ends with that
        error, in `error.json` and `on_run_error`.

    Example:
        ```python
        @hookimpl
        def register_algorithms():
            yield AlgorithmSpec(name="best-of-n", summary="Clones the best.", config=Config, build=BestOfN)
        ```
    """
    raise NotImplementedError


@hookspec
def register_credits() -> Iterable[CreditSpec]:
    """Register credits: what the calls of a step are worth.

    `agentrig new credit NAME` writes a plugin with one.

    Returns:
        An iterable of `CreditSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, once; the credit
        it returns is called there once for each step, in the thread `algorithm`, and so is `admit` for each group.
        `refuses` is called there before tasks are loaded.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start; nor does it if `refuses` raises. If the
        credit or `admit` raises, the run ends with that error, in `error.json` and `on_run_error`.

    Example:
        ```python
        @hookimpl
        def register_credits():
            yield CreditSpec(name="rewards", summary="The rewards themselves.", build=lambda config: rewards)
        ```
    """
    raise NotImplementedError


@hookspec
def register_servers() -> Iterable[ServerSpec]:
    """Register model servers.

    Returns:
        An iterable of `ServerSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `refusal` runs in the main process, once the
        hardware is known. `build` runs there before tasks are loaded, and again when the algorithm asks for its server;
        what it returns, and the methods of the server (`agentrig.servers.Server`), are called in the thread
        `algorithm`.

    If it raises:
        The plugin fails to load. If `refusal` raises, `auto` leaves this server out with a warning, and a run that
        names it does not start. If `build` raises, the run does not start. If a method of the server raises, the run
        ends with that error, in `error.json` and `on_run_error`.

    Example:
        ```python
        @hookimpl
        def register_servers():
            yield ServerSpec(name="my-server", summary="Serves by HTTP.", build=lambda config: MyServer)
        ```
    """
    raise NotImplementedError


@hookspec
def register_hardware() -> Iterable[HardwareSpec]:
    """Register kinds of hardware.

    Returns:
        An iterable of `HardwareSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` and the `probe` of what it returns run in
        the main process, before torch is imported; for `hardware.use=auto` and `agentrig doctor` those of every
        installed hardware.

    If it raises:
        The plugin fails to load. If `build` or `probe` raises, `auto` leaves this hardware out with a warning; a run
        that names it does not start.

    Example:
        ```python
        @hookimpl
        def register_hardware():
            yield HardwareSpec(name="mps", summary="Apple GPUs.", build=lambda config: Mps())
        ```
    """
    raise NotImplementedError


@hookspec
def register_runners() -> Iterable[RunnersSpec]:
    """Register runners: where agents run.

    Returns:
        An iterable of `RunnersSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, before the run
        directory is made. What it returns is called there once, and makes the pool (`agentrig.pools.RunnerPool`), which
        one thread at a time uses.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start. If a method of the pool raises, the run
        ends with that error, in `error.json` and `on_run_error`.

    Example:
        ```python
        @hookimpl
        def register_runners():
            yield RunnersSpec(name="my-cluster", summary="Runs agents there.", build=lambda config: MyPool)
        ```
    """
    raise NotImplementedError


@hookspec
def register_observers() -> Iterable[ObserverSpec]:
    """Register observers: each has a name, settings, and methods that are called like the hooks `on_*`.

    Returns:
        An iterable of `ObserverSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. `build` runs in the main process, at the start of a
        run (or `agentrig eval`, `dev`) that names the observer. The methods `on_*` of what it returns are called when
        the hooks of these names are, in the same threads.

    If it raises:
        The plugin fails to load. If `build` raises, the run does not start. If a method raises, the run goes on, and
        the exception is logged and counted.

    Example:
        ```python
        @hookimpl
        def register_observers():
            yield ObserverSpec(name="chat", summary="Posts each step.", config=ChatConfig, build=Chat)
        ```
    """
    raise NotImplementedError


@hookspec
def register_recipes() -> Iterable[RecipeSpec]:
    """Register recipes.

    Returns:
        An iterable of `RecipeSpec`.

    Called:
        When plugins are loaded, in the main thread of each process. A recipe has no `build`: its settings are merged
        when a plan is made.

    If it raises:
        The plugin fails to load. If its settings do not fit the components, only a run of this recipe fails to start.

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

    Returns:
        Nothing.

    Called:
        Once in a run, before its first rollout: with `plan_steps`, once the agent is built. A resumed run calls it
        again. In the main process, in the thread `algorithm`. The run waits until it returns.

    If it raises:
        The run goes on.

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

    Returns:
        Nothing.

    Called:
        When its score is known, also for rollouts of validation and report (`rollout.mode`). Others still run then. In
        the main process, one call at a time: in the thread `algorithm`; in the thread `rollouts` for rollouts of the
        next step that run while one is learned (`algorithm.max_staleness`); for an algorithm of Agent Lightning, in the
        thread of its runner. Scoring waits until it returns, so be fast.

    If it raises:
        The run goes on.

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

    Returns:
        Nothing.

    Called:
        After the step's line of `metrics.jsonl` is written, and before its checkpoint. In the main process, in the
        thread `algorithm`. The next step waits until it returns.

    If it raises:
        The run goes on.

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

    Returns:
        Nothing.

    Called:
        Once, after `summary.json` is written and the runners have ended. The report is an observer too: its page may
        not be there yet. In the main process, in its main thread.

    If it raises:
        The run goes on to its end, and its files stay as they are. The exception is logged with the plugin's name and
        traceback.

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

    Returns:
        Nothing.

    Called:
        Once, instead of `on_run_end`, after `error.json` is written. A run that fails before its algorithm is called
        has no such event; neither has a resumed run that did not start again. In the main process, in its main thread.

    If it raises:
        The run goes on to its end, and its files stay as they are. The exception is logged with the plugin's name and
        traceback.

    Example:
        ```python
        @hookimpl
        def on_run_error(event):
            print(event.error)
        ```
    """
