"""agentrig's own components, registered with the same hooks as every plugin."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentrig import (
    AgentSpec,
    CreditSpec,
    HardwareSpec,
    ObserverSpec,
    Outcome,
    RewardSpec,
    RunnersSpec,
    Score,
    ServerSpec,
    Task,
    TasksSpec,
    credit,
    hookimpl,
    refusals,
)
from agentrig.errors import AgentrigError
from agentrig.external.checks import check_service
from agentrig.external.config import ENVIRONMENT, CommandConfig, EndpointConfig, HttpConfig
from agentrig.otlp.exporting import OtlpConfig
from agentrig.plugins.auto import OWN, PROCESSES
from agentrig.rewards import given
from agentrig.traces import LLM_CALL, Trace
from agentrig.trackers import config as trackers
from agentrig.trackers.tracking import Tracking

POOL = "agentrig.runners.processes:Pool"
"""By name, as an entry point has it: runners load plugins, so no plugin is imported together with them."""


TRACKERS = {
    trackers.TensorBoardConfig: "TensorBoard: event files in the run directory.",
    trackers.WandbConfig: "Weights & Biases: its server, or files to send later.",
    trackers.MlflowConfig: "MLflow: a server, or a database beside the run directory.",
    trackers.TrackioConfig: "trackio: its database on this machine, a server, or a Space.",
    trackers.SwanlabConfig: "SwanLab: its server, or files to send later.",
}
"""Settings of each tracker, which are named as its client, and its summary."""


def imported(name: str) -> Callable[[Any], Any]:
    """Return a `build` that imports the class `MODULE:NAME` when it is called."""
    return lambda config: pkgutil.resolve_name(name)(config)


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    """Register `cpu`."""
    yield cpu_spec()


def cpu_spec() -> HardwareSpec:
    """Return the spec of the host's processor."""
    from agentrig.hardware.cpu import Cpu, CpuConfig

    def build(config: Any) -> Cpu:
        return Cpu(config=config)

    return HardwareSpec(name="cpu", summary="The host's processor: gloo, sdpa, fp32.", config=CpuConfig, build=build)


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register `table`."""
    from agentrig.tasks import TableConfig, table

    yield TasksSpec(
        name="table", summary="The rows of a file, columns named in [tasks].", config=TableConfig, build=table
    )


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register `command` and `http`."""
    yield AgentSpec(
        name="command",
        summary="A program in any language, run once for each rollout.",
        config=CommandConfig,
        build=imported("agentrig.external.command:CommandAgent"),
        environment=ENVIRONMENT,
        calls="gateway",
        prompts=None,
    )
    yield AgentSpec(
        name="http",
        summary="A service of your own, which gets each task by HTTP.",
        config=HttpConfig,
        build=imported("agentrig.external.http:HttpAgent"),
        calls="gateway",
        prompts=None,
        checks=[check_service],
    )


def own(task: Task, outcome: Outcome, budget_s: float, trace: Trace) -> Score:
    """Use the number that the agent itself returned; without one, the last reward that it gave (`agentrig.reward`)."""
    answer = outcome.answer if outcome.own_reward is None else outcome.own_reward
    if isinstance(answer, int | float):
        return Score.ok(float(answer))
    if rewards := given(trace):
        return Score.ok(rewards[-1][1])
    failed = [span.error for span in trace.spans if span.name == LLM_CALL and span.error]  # an agent may hide these
    after = f", after a call to the model that failed: {failed[-1]:.300}" if failed else ""
    return Score.invalid(
        f"the reward `own` needs an agent that returns a number; this one returned {answer!r:.200}{after}"
    )


own.takes_own_reward = True  # type: ignore[attr-defined]  # an outcome without an answer is scored too


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register `own`."""

    def build(config: Any) -> Any:
        return own

    yield RewardSpec(name="own", summary="The number that the agent itself returned.", build=build, sees_trace=True)


@hookimpl
def register_credits() -> Iterable[CreditSpec]:
    """Register the named credits of `agentrig.credit`, and `own`."""

    def own(config: Any) -> Any:
        def decided(groups: Any) -> Any:
            raise AgentrigError(
                "an algorithm that uses `session.credit` names a default credit in its spec: "
                'AlgorithmSpec(credit="dr-grpo")'
            )

        return decided

    relative: dict[str, Any] = {"relative": True}
    replies: dict[str, Any] = {"refuses": refusals.refuses_replies}
    gated: dict[str, Any] = {"admit": credit.differ, "refuses": refusals.refuses_dapo}
    for name, function, config, more, summary in (
        ("dr-grpo", credit.dr_grpo, credit.GroupConfig, relative, "Reward minus the group's mean (Dr. GRPO)."),
        ("grpo", credit.grpo, credit.GroupConfig, relative, "dr-grpo, over the group's standard deviation (GRPO)."),
        ("rloo", credit.rloo, credit.RelativeConfig, relative, "Reward minus the mean of the group's others (RLOO)."),
        (
            *("reinforce++", credit.reinforce_pp, credit.RelativeConfig, relative),
            "Reward minus the group's mean, over the step's standard deviation (REINFORCE++ with baseline).",
        ),
        (
            *("dapo", credit.dapo, credit.DapoConfig, gated),
            "grpo, with overlong replies punished and groups of equal rewards sampled again (DAPO).",
        ),
        (
            *("best-of-group", credit.best_of_group, credit.ImitationConfig, replies),
            "Imitates the best of each group (RAFT).",
        ),
        ("rft", credit.rft, credit.ImitationConfig, replies, "Imitates each correct answer of a group once (RFT)."),
        ("turn", credit.turn, credit.TurnConfig, replies, "Call by call, for scores of calls or agentrig.reward."),
    ):

        def build(settings: Any, function: Any = function) -> Any:
            return partial(function, config=settings)

        yield CreditSpec(name=name, summary=summary, config=config, build=build, **more)
    yield CreditSpec(
        name="opd",
        summary="Token by token, what a teacher says of what was sampled (on-policy distillation).",
        config=credit.TeacherConfig,
        build=imported("agentrig.teacher:Distillation"),
        refuses=refusals.refuses_opd,
        rewarded=False,
    )
    yield CreditSpec(name=OWN, summary="What the algorithm itself decides.", build=own, relative=True)


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `own` and `endpoint`."""

    def build(config: Any) -> Any:
        raise AgentrigError(f"the server `{OWN}` is the algorithm's own: an algorithm that has none can't use it")

    yield ServerSpec(name=OWN, summary="The one that the algorithm brings itself.", build=build)
    yield ServerSpec(
        name="endpoint",
        summary="A model behind an OpenAI-compatible address; its weights can't be trained.",
        config=EndpointConfig,
        build=imported("agentrig.external.model:make"),
    )


@hookimpl
def register_observers() -> Iterable[ObserverSpec]:
    """Register the trackers, and `otlp`."""
    build_otlp = imported("agentrig.otlp.exporting:Otlp")
    yield ObserverSpec(
        name="otlp", summary="Traces to an OpenTelemetry collector.", config=OtlpConfig, build=build_otlp
    )
    for config, summary in TRACKERS.items():
        name = config.__name__.removesuffix("Config")

        def build(settings: Any, name: str = name) -> Tracking:
            client = pkgutil.resolve_name(f"agentrig.trackers.{name.lower()}:{name}")
            return Tracking(name.lower(), client(settings), settings)

        yield ObserverSpec(name=name.lower(), summary=summary, config=config, build=build, tracker=True)


@hookimpl
def register_runners() -> Iterable[RunnersSpec]:
    """Register `processes` and `own`."""

    def processes(config: Any) -> Any:
        return pkgutil.resolve_name(POOL)

    def build(config: Any) -> Any:
        raise AgentrigError(f"the runners `{OWN}` are the algorithm's own: an algorithm that has none can't use them")

    yield RunnersSpec(name=PROCESSES, summary="Processes of this machine.", build=processes)
    yield RunnersSpec(name=OWN, summary="Those that the algorithm brings itself.", build=build)
