"""The eleven kinds of component specs that a plugin's `register_*` hooks return.

Every spec is frozen and keyword-only. `config` is a frozen `attrs` class whose fields are the keys
that a run file may set (see `agentrig.settings.setting`); `build` does the heavy imports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import attrs

from agentrig.pools import RunnerSettings
from agentrig.prompting import misfit

if TYPE_CHECKING:
    from pathlib import Path

    from agentrig.adapters import Adapter
    from agentrig.agents import Agent
    from agentrig.algorithms import Algorithm, LoopAlgorithm
    from agentrig.credit import Credit
    from agentrig.demonstrations import Demonstrate, MakeStart
    from agentrig.findings import Check, ModelHub
    from agentrig.hardware import Hardware
    from agentrig.hardware.memory import Workload
    from agentrig.pools import MakePool
    from agentrig.refusals import Learning
    from agentrig.rewards import Reward
    from agentrig.rollouts import Rollout
    from agentrig.servers import MakeServer, ServerMemory
    from agentrig.tasks import Tasks


def _named(spec: Spec, attribute: attrs.Attribute[str], name: Any) -> None:
    """Reject a name that is not lower case, digits and hyphens; it may end with `+`, as `reinforce++` does."""
    if isinstance(name, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\+*", name):
        return
    better = "-".join(re.findall(r"[a-z0-9]+", name.lower())) if isinstance(name, str) else ""
    cure = f': write name="{better}"' if better else ""
    raise ValueError(
        f"{type(spec).__name__}: the name {name!r} must be lower-case letters, digits and single hyphens{cure}"
    )


def _sections(spec: RecipeSpec, attribute: attrs.Attribute[Any], settings: Any) -> None:
    """Reject settings that are not sections with keys."""
    for section, keys in settings.items() if isinstance(settings, Mapping) else [("settings", settings)]:
        if not isinstance(keys, Mapping):
            raise ValueError(
                f"RecipeSpec {spec.name}: {section} is {keys!r:.80}; settings are sections with keys, for example "
                '{"tasks": {"use": "mini-sql"}}'
            )


def _recorded(spec: AgentSpec, attribute: attrs.Attribute[str], calls: Any) -> None:
    """Reject anything but the two ways in which calls are recorded."""
    if calls not in ("tap", "gateway"):
        raise ValueError(f'AgentSpec {spec.name}: calls is {calls!r:.80}; write calls="tap" or calls="gateway"')


def _templates(spec: AgentSpec, attribute: attrs.Attribute[Any] | None, prompts: Any) -> None:
    """Reject prompts that are no templates."""
    if callable(prompts):
        return
    if prompts is not None and not isinstance(prompts, Mapping):
        raise ValueError(f"AgentSpec {spec.name}: prompts is {prompts!r:.80}; write {{NAME: TEMPLATE}}")
    for name, template in (prompts or {}).items():
        if why := misfit(template, None):
            raise ValueError(f"AgentSpec {spec.name}: the prompt {name}: {why}")


def _texts(spec: Spec, attribute: attrs.Attribute[Sequence[str]], texts: Any) -> None:
    """Reject a text in place of several: it would count as its letters."""
    if isinstance(texts, str):
        raise ValueError(f'{type(spec).__name__} {spec.name}: write {attribute.name}=["{texts}"], a list of strings')


@attrs.frozen(kw_only=True)
class NoConfig:
    """The config class of a component without settings."""


@attrs.frozen(kw_only=True)
class Spec:
    """What all specs share.

    Attributes:
        name: The name in run files and options: lower case, digits and hyphens.
        summary: One line, shown by `agentrig plugins`.
        config: A frozen `attrs` class; its fields are this component's keys in a run file.
        checks: Additional checks for `agentrig doctor`: each is called with an `agentrig.findings.Situation` and
            returns `agentrig.findings.Finding` objects. The checks of all installed hardware run, because a
            broken backend can break torch for other hardware too.
    """

    kind: ClassVar[str] = "component"
    hook: ClassVar[str] = ""
    name: str = attrs.field(validator=_named)
    summary: str
    config: type = NoConfig
    checks: Sequence[Check] = ()


@attrs.frozen(kw_only=True)
class TasksSpec(Spec):
    """A task set; `build(config)` returns a `Tasks`. `convert` serves `agentrig data NAME --from SOURCE`.

    Attributes:
        convert: `convert(source, target) -> message`: makes this task set's files from an official
            download (a folder or an archive) or checks converted ones; None when there is nothing to convert.
        tools: Further commands under `agentrig data`: name to a callable that returns a `click.Command`.
    """

    kind: ClassVar[str] = "tasks"
    hook: ClassVar[str] = "register_tasks"
    build: Callable[[Any], Tasks]
    convert: Callable[[str, str | None], str] | None = None
    tools: Mapping[str, Callable[[], Any]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AgentSpec(Spec):
    """An agent; `build(config)` returns a callable `agent(task_input, endpoint) -> answer`.

    Attributes:
        graph: `graph(config)` returns the agent's graph as Mermaid text; None when it has none.
        preload: Modules that the runners import once, before they fork; makes runners start fast.
        environment: Names of environment variables that the agent needs, or patterns (`MY_TOOL_*`). Runners get these
            and a small base (`agentrig.processes.confine.BASE`), nothing else of the run's environment: no API keys.
        whole_rows: Whether it gets whole rows, gold columns included (`Task.row`), instead of a task's input: for an
            agent that computes its own reward. The run warns, and its manifest and report say so.
        demonstrate: `demonstrate(config)` returns what a right reply to each of this agent's calls is
            (`agentrig.demonstrations`), for `agentrig warmup`; None if the task set says it, or if each call is to be
            answered with the task's gold.
        calls: Who records its calls to the model. `tap`: the runner, in its process. `gateway`: the run's gateway, for
            an agent whose calls leave the runner's process: a program, a container, a service. `[gateway] use = "auto"`
            starts the gateway for such an agent.
        prompts: Its prompts, name to template (`{question}` is a field, as `str.format` has it). In a rollout
            `agentrig.prompts()` returns those in force: a run may replace them (`[prompts]`, `--prompts`), and an
            algorithm may improve them. A program or a service gets them in its input, as `prompts`. Prompts that depend
            on the settings are a function: `prompts(config)` returns them. None for an agent that takes whatever
            prompts a run names.
    """

    kind: ClassVar[str] = "agent"
    hook: ClassVar[str] = "register_agents"
    build: Callable[[Any], Agent]
    graph: Callable[[Any], str] | None = None
    preload: Sequence[str] = attrs.field(default=(), validator=_texts)
    environment: Sequence[str] = attrs.field(default=(), validator=_texts)
    whole_rows: bool = False
    demonstrate: Callable[[Any], Demonstrate] | None = None
    calls: str = attrs.field(default="tap", validator=_recorded)
    prompts: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = attrs.field(
        factory=dict, validator=_templates
    )

    def declared(self, config: Any) -> Mapping[str, str] | None:
        """Return the prompts of an agent with these settings; None if it takes any.

        Raises:
            ValueError: The spec's function returns no templates.
        """
        if not callable(self.prompts):
            return self.prompts
        found = self.prompts(config)
        _templates(self, None, found)
        return found


@attrs.frozen(kw_only=True)
class RewardSpec(Spec):
    """A reward; `build(config)` returns a callable `reward(task, outcome, budget_s) -> Score`.

    Attributes:
        correct_at: An answer with at least this value counts as correct, unless its score says otherwise
            (`Score.correct`); None for 1.0.
        sees_trace: Whether it is called as `reward(task, outcome, budget_s, trace)`, with the rollout's trace.
        parts: For a reward that is made of others: `parts(config)` returns a name for each of them, and its keys as in
            a section `[reward]`: `use` and its settings. They are looked up, checked and built for it, and `build` is
            called as `build(config, parts)`, with an `agentrig.rewards.Part` for each name. It raises ValueError for
            a config that makes no sense.
    """

    kind: ClassVar[str] = "reward"
    hook: ClassVar[str] = "register_rewards"
    build: Callable[..., Reward]
    correct_at: float | None = None
    sees_trace: bool = False
    parts: Callable[[Any], Mapping[str, Mapping[str, Any]]] | None = None


@attrs.frozen(kw_only=True)
class AdapterSpec(Spec):
    """An adapter; `build(config)` returns a callable `adapter(trace) -> Sequence[Triplet]`."""

    kind: ClassVar[str] = "adapter"
    hook: ClassVar[str] = "register_adapters"
    build: Callable[[Any], Adapter]


@attrs.frozen(kw_only=True)
class AlgorithmSpec(Spec):
    """An algorithm; `build(config)` returns a `LoopAlgorithm`, or an `Algorithm` with a loop of its own.

    Attributes:
        hardware: The names of the hardware that it can run on; empty for any.
        workload: `workload(config)` returns what training needs from one device, for the doctor's memory
            estimate; None if it is unknown.
        ready: `ready(config)` raises `ConfigError` if what a run starts from, such as its model, is not there. It is
            called before runners start, and must import nothing heavy; None if there is nothing to check.
        hub: `hub(environ)` returns where this algorithm finds models by name, for the doctor; None for the Hugging
            Face Hub.
        server: Whether it asks the run for the model's server: `session.server(plan)` in `run`, and the argument
            `server` of its `serve`. `[server] use` then says which one. False for an algorithm that brings its own, or
            that needs none.
        runners: Whether it decides when and where its runners start, because they need what it starts first. It then
            has a method `pool`: an `agentrig.pools.MakePool` with one more argument, `make`, which is the `MakePool`
            that `[runners] use` names, or None if the run leaves the choice to the algorithm.
        credit: The credit of a run that names none. Each algorithm in the run's loop names one, for example "dr-grpo";
            one with a loop of its own does if it uses `session.credit`. "" for an algorithm that takes no credit: a run
            that names one is refused.
        make_start: `make_start(config, plan, turns)` chooses a model for `agentrig warmup` and writes it, not trained
            yet (`agentrig.demonstrations.MakeStart`); None for an algorithm that can't.
        export: `export(checkpoint, target)` writes the plain model of a checkpoint that holds adapters only: one whose
            `starting_model.json` names this algorithm (`agentrig.run.checkpoints`). None for one without such.
        formulas: Which formulas of `grpo` it has, so that the auditor can compute them again: `update` (settings,
            sampling of tasks, loss, optimizer). What else an algorithm does is not looked at.
        learning: `learning(config)` returns how it learns what a credit says (`agentrig.refusals.Learning`), for an
            algorithm with a loop of its own that takes a credit; None for one in the run's loop, whose keys say it.
        trains: What it changes. One that trains `prompts` changes no weights: its rollouts need no token ids, it
            reports no `weight_change`, it samples failed rollouts again itself (`Session.check_failures`), and nothing
            has to arrive at the model's server.
    """

    kind: ClassVar[str] = "algorithm"
    hook: ClassVar[str] = "register_algorithms"
    build: Callable[[Any], Algorithm | LoopAlgorithm]
    hardware: Sequence[str] = attrs.field(default=(), validator=_texts)
    workload: Callable[[Any], Workload | None] | None = None
    ready: Callable[[Any], None] | None = None
    hub: Callable[[Mapping[str, str]], ModelHub | None] | None = None
    server: bool = False
    runners: bool = False
    credit: str = ""
    make_start: MakeStart | None = None
    export: Callable[[Path, Path], None] | None = None
    formulas: Sequence[Literal["update"]] = ()
    learning: Callable[[Any], Learning] | None = None
    trains: Literal["weights", "prompts"] = "weights"


def _has_a_limit(spec: CreditSpec, attribute: attrs.Attribute[Any], admit: Any) -> None:
    """Reject a gate whose config class does not say how often a step samples again."""
    if admit is not None and "max_num_gen_batches" not in attrs.fields_dict(spec.config):
        raise ValueError(
            f"CreditSpec {spec.name}: admit needs a limit; write `class Config(agentrig.credit.GateConfig)`, which has "
            "the key max_num_gen_batches"
        )


@attrs.frozen(kw_only=True)
class CreditSpec(Spec):
    """A credit; `build(config)` returns a callable `credit(groups)`: what each rollout, or each call, is worth.

    Attributes:
        relative: Whether a worth is 0 exactly where a rollout's reward equals what its group is compared with. The
            ledger then looks for the reason of each 0 in the rewards of the group, and stops the run if there is none.
        admit: A gate: `admit(group)` gets all rollouts of a task, and returns whether the step learns from them. A step
            samples other tasks in the place of groups that it does not admit, up to `max_num_gen_batches`: `config`
            extends `agentrig.credit.GateConfig`, which has that key. None admits every group.
        refuses: `refuses(config, learning)` gets the credit's settings and an `agentrig.refusals.Learning`, and returns
            why the credit has no meaning there, or '' if it has one. None for a credit that has one anywhere.
        rewarded: Whether worths come from rewards. If they do, a run stops whose rewards stay equal.
    """

    kind: ClassVar[str] = "credit"
    hook: ClassVar[str] = "register_credits"
    build: Callable[[Any], Credit]
    relative: bool = False
    admit: Callable[[Sequence[Rollout]], bool] | None = attrs.field(default=None, validator=_has_a_limit)
    refuses: Callable[[Any, Learning], str] | None = None
    rewarded: bool = True


@attrs.frozen(kw_only=True)
class ServerSpec(Spec):
    """A model server; `build(config)` returns a callable `server(plan) -> agentrig.servers.Server`.

    Attributes:
        rank: `[server] use = "auto"` takes the server with the highest rank that can serve on the run's hardware; None
            for one that is used only if it is named. agentrig's own have 0 (`embedded`) and 10 (`vllm`).
        refusal: `refusal(hardware)` returns why it can't serve on that hardware, in a few words, or '' if it can. It
            must import nothing heavy. None for a server that runs on any hardware.
        sequences: `sequences(config)` returns how many requests it samples at once at most, for the doctor's memory
            estimate; None if it is unknown.
        memory: `memory(config)` returns an `agentrig.servers.ServerMemory`, so that a run can plan the device's memory
            for server and learner together; None for a server whose memory is not planned.
    """

    kind: ClassVar[str] = "server"
    hook: ClassVar[str] = "register_servers"
    build: Callable[[Any], MakeServer]
    rank: int | None = None
    refusal: Callable[[Hardware], str] | None = None
    sequences: Callable[[Any], int] | None = None
    memory: Callable[[Any], ServerMemory] | None = None


def _extends_runner_settings(spec: RunnersSpec, attribute: attrs.Attribute[type], config: Any) -> None:
    """Reject a config class without the keys of all runners."""
    if not (isinstance(config, type) and issubclass(config, RunnerSettings)):
        raise ValueError(
            f"RunnersSpec {spec.name}: config is {config!r:.80}; write `class Config(agentrig.pools.RunnerSettings)`, "
            "so that it has the keys of all runners (n, threads, deadline_s, …) beside its own"
        )


@attrs.frozen(kw_only=True)
class RunnersSpec(Spec):
    """Where agents run; `build(config)` returns a callable that makes the pool, an `agentrig.pools.MakePool`.

    Attributes:
        config: `agentrig.pools.RunnerSettings`, or a class that extends it by keys of its own.
        wanted: `wanted(environ)` says whether the environment asks for these runners; a run that names no others then
            has them. None if no variable does.
    """

    kind: ClassVar[str] = "runners"
    hook: ClassVar[str] = "register_runners"
    build: Callable[[Any], MakePool]
    config: type = attrs.field(default=cast(type, RunnerSettings), validator=_extends_runner_settings)
    wanted: Callable[[Mapping[str, str]], bool] | None = None


@attrs.frozen(kw_only=True)
class HardwareSpec(Spec):
    """A kind of hardware; `build(config)` returns a `Hardware`. `probe` must not import torch."""

    kind: ClassVar[str] = "hardware"
    hook: ClassVar[str] = "register_hardware"
    build: Callable[[Any], Hardware]


@attrs.frozen(kw_only=True)
class ObserverSpec(Spec):
    """An observer; `build(config)` returns an object with methods `on_run_start`, `on_step_end` and so on.

    The methods are those of the hooks `on_*` of `agentrig.plugins.hookspecs`, each with one argument; at least one of
    them. They need no `@hookimpl`. A run calls them if `[observer] use` or `--observer` names this observer. If it has
    a method `settle`, a run calls that at its end: it waits, a bounded time, for work in a thread of the observer's
    own, and returns counts for `summary.json` (`observer_writes`).

    Attributes:
        tracker: Whether it is an experiment tracker: `[trackers] use` and `--tracker` name it, and its keys are in
            `[trackers.NAME]`. `agentrig.trackers.Tracking` makes one of a client.
    """

    kind: ClassVar[str] = "observer"
    hook: ClassVar[str] = "register_observers"
    build: Callable[[Any], object]
    tracker: bool = False


@attrs.frozen(kw_only=True)
class RecipeSpec(Spec):
    """A named, complete run configuration.

    Attributes:
        settings: Section name to keys, as a run file has them, for example
            `{"tasks": {"use": "mini-sql"}, "algorithm": {"use": "grpo", "lr": 3e-4}}`.
    """

    kind: ClassVar[str] = "recipe"
    hook: ClassVar[str] = "register_recipes"
    settings: Mapping[str, Mapping[str, Any]] = attrs.field(validator=_sections)


KINDS: Mapping[str, type[Spec]] = {
    spec.kind: spec
    for spec in (
        TasksSpec,
        AgentSpec,
        RewardSpec,
        AdapterSpec,
        AlgorithmSpec,
        CreditSpec,
        ServerSpec,
        HardwareSpec,
        RunnersSpec,
        ObserverSpec,
        RecipeSpec,
    )
}
"""Every kind of component, in the order of a run file's sections; the only list of them."""

PURPOSES: Mapping[str, str] = {
    "tasks": "what the agent is asked",
    "agent": "the program that answers tasks by asking the model",
    "reward": "scores each answer",
    "adapter": "chooses which of the agent's calls to the model are trained on",
    "algorithm": "changes the model so that it answers better",
    "credit": "says what each of the agent's calls is worth, from the rewards",
    "server": "answers the agent's calls with the model",
    "hardware": "what the model is trained on",
    "runners": "the processes that run the agent",
    "observer": "is told what happens in a run: trackers, collectors",
    "recipe": "a complete configuration with a name",
}
"""What each kind does in a run, for help texts and lists."""

RUN_KINDS: Sequence[str] = tuple(kind for kind in KINDS if kind not in (ObserverSpec.kind, RecipeSpec.kind))
"""The kinds of which a run has exactly one component each, in a section of that name."""
