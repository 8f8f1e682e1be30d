"""Plans: a recipe, a run file and overrides, merged into one checked configuration, and what a run builds from it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.correctness import Correctness
from agentrig.errors import AgentrigError, ConfigError, ModelAbsent, PluginError, nearest, nearest_path
from agentrig.gateway.settings import GatewaySettings
from agentrig.plugins import auto, composing, observing, selecting
from agentrig.plugins.building import built
from agentrig.plugins.selecting import SECTIONS, check_section, plain_name
from agentrig.plugins.specs import RUN_KINDS
from agentrig.pools import RunnerSettings as RunnerSettings
from agentrig.prompting import checked
from agentrig.refusals import Learning, refuses_gate
from agentrig.rows import utf8_text
from agentrig.secrets import sources
from agentrig.settings import meant, meant_in_file, setting, structure
from agentrig.tasks import Tasks, check_set
from agentrig.text import check_regular, json_fault, read_text

if TYPE_CHECKING:
    from agentrig.adapters import Adapter
    from agentrig.algorithms import Algorithm
    from agentrig.demonstrations import Demonstrate
    from agentrig.gateway.process import Gateway
    from agentrig.hardware import Hardware
    from agentrig.plugins.registry import Component, Registry
    from agentrig.pools import MakePool, RunnerPool
    from agentrig.runners.engine import RolloutEngine
    from agentrig.runners.jobs import AgentPlan
    from agentrig.runners.runtime import Runtime
    from agentrig.runners.scorer import Scorer
    from agentrig.servers import MakeServer, ServerMemory
    from agentrig.tasks import Task

log = logging.getLogger(__name__)

FIRST_RUNNER_S = 5.0
"""Seconds that a run with runners of the algorithm's own waits for the test of a build; a slower one goes on."""

TASKS_CURE = "Let it leave them alone, or do that in a process of its own (subprocess)"
"""What to do about a task set that changes the process of the run."""

TASKS_SLOW_S = 15.0
"""After so many seconds a line says that a task set is still being made or loaded."""


@attrs.frozen(kw_only=True)
class RunSettings:
    """Section `[run]`: settings of the run itself."""

    name: str = setting("", help="the run directory's name; empty for RECIPE-DATE-TIME")
    directory: str = setting("runs", help="the folder for run directories")
    seed: int = setting(0, help="seed of every random stream", ge=0)
    train: str = setting("", help="the training split; empty for the task set's default")
    validation: str = setting("", help="the split to measure during training; empty for the task set's default")
    report: str = setting("", help="the held-out split for summary.json; empty for the task set's default")
    train_tasks: int = setting(0, help="use only the first n training tasks; 0 for all", ge=0)
    validation_tasks: int = setting(0, help="use only the first n validation tasks; 0 for all", ge=0)
    report_tasks: int = setting(0, help="use only the first n report tasks; 0 for all", ge=0)
    failure_limit: float = setting(
        0.25, help="largest share of a step's rollouts that may fail before the run stops", ge=0, le=1
    )
    reward_budget_s: float = setting(10.0, help="seconds a reward may take for one outcome", gt=0)
    correct_at: float | None = setting(
        None, help="an answer counts as correct if its reward is at least this; by default the reward decides"
    )
    second_reward: list[str] = setting(
        list,
        one=True,
        help="rewards that are logged at every step beside the trained one; their keys are in [second_reward.NAME]",
    )
    delivery: bool = setting(
        True, help="after every transfer of weights, prove that the model's server answers with them"
    )
    audit: bool = setting(
        True, help="check the first steps, and some later ones, with code that shares nothing with the trainer"
    )
    block: list[str] = setting(list, help="plugins or distributions that are not loaded")
    plugins: list[str] = setting(list, help="Python files that are plugins too, relative to the run file")


JUDGES_NOTHING = ("agentrig", "own")
"""Distribution and name of the reward that only reads a number: it needs no process of its own."""

RESUME = "agentrig train --resume {run}"
"""Resumes a run."""


def resume_command(resumes: str, directory: Path, setting: str = "") -> str:
    """Return the command that resumes the run of a directory.

    Args:
        resumes: `Plan.resumes`.
        setting: One more setting, `section.key=value`.
    """
    more = f" {'' if resumes == RESUME else '--set '}{setting}" if setting else ""
    return resumes.replace("{run}", f"{directory}{more}")


FEW_LABELS = "--labels 10 --passes 4"
"""Options of a warm-up for easy tasks: a model that learns more of them solves such tasks, and nothing is left."""


def warmup_command(words: Sequence[str], *, until: float = 0.2, out: str = "") -> str:
    """Return the command that makes a starting model for what some words select, which leaves something to learn.

    Args:
        words: A recipe or a run file, and options.
        until: The share of right answers at which it ends.
        out: The model's folder; '' for the one that the command chooses, `models/RECIPE`.
    """
    return shlex.join(["agentrig", "warmup", *words, "--until", f"{until:g}", *(["--out", out] if out else [])])


def script_of(directory: Path) -> str:
    """Return the command that resumes the run of a script, '' for another run.

    Only the process of the script has the run's agent, tasks, adapter and algorithm.
    """
    resumes: Any = RESUME
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        resumes = json.loads(read_text(directory / "manifest.json")).get("resumes", RESUME)
    return "" if resumes == RESUME else resume_command(str(resumes), directory)


@attrs.frozen(kw_only=True)
class Plan:
    """A complete, checked configuration of a run.

    Attributes:
        recipe: The recipe's name or the run file's stem.
        components: Kind to the selected component. Hardware `auto` is resolved on first access, here or in
            `configs`, so that commands that need no hardware run without any.
        configs: Kind to that component's config object. Server `auto` is resolved as hardware `auto` is.
        runners: The config object of the kind `runners`; a command may have changed it.
        reasons: Kind to why `auto` chose this component, for those that it chose and gives a reason for.
        observers: The observers that `[observer]` and `[trackers]` name, each with its config object, in that order.
        second_rewards: The rewards that `run.second_reward` names, each with its config object, in that order.
        gateway: Section `[gateway]`.
        prompts: The agent's prompts in force, name to template: its own, with those of `[prompts]` in their place.
        resumes: The command that resumes the run, with `{run}` for its directory.
        typed: The words and options of a command that select this configuration, without its model.
    """

    recipe: str
    run: RunSettings
    runners: RunnerSettings
    components: Mapping[str, Component]
    configs: Mapping[str, Any]
    registry: Registry
    reasons: Mapping[str, str] = attrs.field(factory=dict)
    observers: observing.Observers = ()
    second_rewards: Sequence[tuple[Component, Any]] = ()
    gateway: GatewaySettings = GatewaySettings()
    prompts: Mapping[str, str] = attrs.field(factory=dict)
    resumes: str = RESUME
    typed: Sequence[str] = ()

    @property
    def uses_gateway(self) -> bool:
        """Whether agents call the model through the gateway."""
        if self.gateway.use == "auto":
            return bool(self.gateway.models) or getattr(self.components["agent"].spec, "calls", "tap") == "gateway"
        return self.gateway.use == "on"

    @property
    def sees_gold(self) -> bool:
        """Whether the agent gets whole rows, with their gold columns."""
        spec: Any = self.components["agent"].spec
        return bool(spec.whole_rows)

    @property
    def whose_tasks(self) -> str:
        """The task set, for messages about its rows."""
        return f"task set {self.components['tasks'].spec.name}"

    def build(self, kind: str) -> Any:
        """Build the selected component of a kind; its heavy imports happen here.

        Raises:
            agentrig.errors.PluginError: Its `build` failed; the message names the plugin's file and line.
        """
        if kind == "reward":
            return composing.build(self.components["reward"], self.config("reward"), self.registry)[0]
        return built(self.components[kind], self.config(kind))

    def config(self, kind: str) -> Any:
        """Return the config object of the selected component of a kind."""
        return self.runners if kind == "runners" else self.configs[kind]

    def start_observers(self) -> None:
        """Build the observers that the plan names, and let its registry notify them.

        Raises:
            agentrig.errors.PluginError: One cannot be built, or used; the message names the plugin's file and line.
        """
        for name, observer in observing.build_observers(self.observers).items():
            self.registry.add_observer(observer, name)

    def tasks(self) -> Tasks:
        """Build the task set, and check its `splits` and `roles`.

        Raises:
            PluginError: `splits` or `roles` is missing or wrong.
            ConfigError: Its rows may have gold columns, and the agent does not ask for whole rows.
        """
        from agentrig.plugins.loading import told_if_slow
        from agentrig.processes.put_back import left_alone, torch_put_back

        who = self.whose_tasks
        with (
            told_if_slow(f"making the {who}", after_s=TASKS_SLOW_S),
            left_alone(f"the {who}", TASKS_CURE),
            torch_put_back(f"the {who}"),
        ):
            tasks: Tasks = self.build("tasks")
        if getattr(tasks, "whole_rows", False) and not self.sees_gold:
            raise ConfigError(
                f"{who} does not say which columns are gold, so it hands out whole rows only, and the agent "
                f"{self.components['agent'].spec.name} does not ask for them.\n"
                "  Hide the gold: lightning.tasks(..., gold=[COLUMN, ...]); gold=[] if no column is gold. If the agent "
                "computes its own reward: whole_rows=True in lightning.agent, or in its AgentSpec"
            )
        check_set(tasks, who)
        return tasks

    def gold_warnings(self) -> list[str]:
        """Return the warning about an agent that gets whole rows."""
        if not self.sees_gold:
            return []
        return [
            f"this agent sees its gold: {self.components['agent'].spec.name} gets whole rows (whole_rows), to compute "
            "its own reward. Its figures count only if it does not answer with what it must not know"
        ]

    def demonstrator(self, tasks: Sequence[Task] = (), *, gold: str = "") -> tuple[Demonstrate, str]:
        """Return who says what a right reply is, and its name.

        Args:
            gold: The key of `Task.private` to answer every call with, whatever these say.

        Raises:
            ConfigError: Nobody says it, and one of the tasks has no gold.
        """
        from agentrig.demonstrations import built, gold_of, gold_reply

        spec: Any = self.components["agent"].spec
        if not gold and spec.demonstrate is not None:
            return built(spec.name, spec.demonstrate, self.configs["agent"]), f"agent {spec.name}"
        if not gold and (own := getattr(self.tasks(), "demonstrate", None)) is not None:
            return own, self.whose_tasks
        for task in tasks:
            gold_of(task, gold)
        return gold_reply(gold), f"the tasks' {gold or 'gold'}"

    def use_hardware(self) -> Hardware:
        """Build the hardware, check that it works, and set its environment.

        Raises:
            ConfigError: The algorithm and the hardware do not support each other.
            HardwareError: It is not available, or broken; agentrig never falls back to other hardware.
        """
        from agentrig.hardware import select

        hardware: Hardware = self.build("hardware")
        spec: Any = self.components["algorithm"].spec
        if spec.hardware and hardware.name not in spec.hardware:
            raise ConfigError(f"algorithm {spec.name} runs on {', '.join(spec.hardware)}, not on {hardware.name}")
        if not hardware.carries(spec.name):
            recipes: list[Any] = [c.spec for c in self.registry.components("recipe")]
            able = [r.name for r in recipes if r.settings.get("algorithm", {}).get("use") in hardware.algorithms]
            raise ConfigError(
                f"hardware {hardware.name} carries {', '.join(hardware.algorithms)}, not {spec.name}\n"
                f"  recipes that run on it: {', '.join(able) or 'none installed'}"
            )
        select(hardware.name, [hardware])
        for name, value in hardware.environment().items():
            os.environ.setdefault(name, value)
        return hardware

    def check_server(self, hardware: Hardware) -> None:
        """Make sure that the plan's server can serve on this hardware; `--verbose` says which one `auto` chose.

        Raises:
            ConfigError: It can't.
        """
        component = self.components["server"]
        name = component.spec.name
        if "server" in self.reasons:
            why = self.reasons["server"]
            log.debug("the model's server is %s (%s); another one: --server NAME", name, why)
            return
        why = auto.refusal(component, hardware)
        if why:
            raise ConfigError(
                f"server {name} can't serve on {hardware.name}: {why}\n  Leave --server out, or name another"
            )

    def check_algorithm(self) -> None:
        """Make sure that what the algorithm starts from is there, before runners start.

        Raises:
            ConfigError: It is not.
        """
        ready = getattr(self.components["algorithm"].spec, "ready", None)
        try:
            if ready is not None:
                ready(self.configs["algorithm"])
        except ModelAbsent as error:
            if self.resumes == RESUME:  # the tasks of a script are its own
                error.args = (f"{error}\n  {self.warmup_command(error.folder)}",)
            raise

    def warmup_command(self, out: str = "") -> str:
        """Return the command that makes a starting model for this configuration, in a folder if it is given."""
        return warmup_command(self.typed, out="" if out == str(Path("models") / self.recipe) else out)

    def check_credit(self) -> None:
        """Make sure that the credit has a meaning with the algorithm's settings.

        Raises:
            ConfigError: It has none.
        """
        from agentrig.learners import LoopSettings

        credit: Any = self.components["credit"].spec
        algorithm: Any = self.components["algorithm"].spec
        config, own = self.configs["algorithm"], getattr(algorithm, "learning", None)
        if own is not None:
            learning = own(config)
        elif isinstance(config, LoopSettings):
            keys = "temperature", "top_p", "max_tokens", "max_staleness"
            learning = Learning(loss=getattr(config, "loss", ""), **{key: getattr(config, key) for key in keys})
        else:
            learning = Learning(own_loop=True)
        gate = refuses_gate if getattr(credit, "admit", None) is not None else None
        for refuses in (getattr(credit, "refuses", None), gate):
            if refuses is not None and (why := refuses(self.configs["credit"], learning)):
                raise ConfigError(f"[credit] {credit.name} with the algorithm {algorithm.name}: {why}")

    def make_server(self) -> MakeServer:
        """Return what starts the plan's server, for the algorithm that asks for it; its heavy imports happen here.

        An algorithm whose spec does not say that it asks gets the server that `auto` selects, with a warning.
        """
        component = self.components["server"]
        if component.spec.name != auto.OWN:
            made: MakeServer = self.build("server")
            return made
        found, why = auto.auto_server(self.registry, self.build("hardware"), {})
        log.warning(
            "algorithm %s asks for a model server; let its spec say so, AlgorithmSpec(server=True). It gets %s (%s)",
            *(self.components["algorithm"].spec.name, found.spec.name, why),
        )
        made = built(found, found.spec.config())
        return made

    def server_memory(self) -> ServerMemory | None:
        """Return what the settings of the plan's server say of its memory; None if it does not say."""
        say = getattr(self.components["server"].spec, "memory", None)
        found: ServerMemory | None = say(self.configs["server"]) if say else None
        return found

    def engine(
        self,
        *,
        scorer: Scorer,
        adapter: Adapter,
        algorithm: Algorithm | None = None,
        pool: RunnerPool | None = None,
        gateway: Gateway | None = None,
    ) -> tuple[RolloutEngine, Runtime]:
        """Return the rollout engine and its runtime.

        Args:
            algorithm: May bring its own pool (see `Algorithm`).
            pool: The pool from `runner_pool`; closed if the algorithm has its own.
            gateway: The run's gateway, from `make_gateway`; None for none.
        """
        from agentrig.runners.engine import RolloutEngine
        from agentrig.runners.runtime import Runtime

        own = self.own_pool(algorithm)
        if own is not None and pool is not None:
            pool.close()
        if own is not None or pool is None:
            pool = self.pool(own)
        runtime = Runtime(pool, gateway)
        engine = RolloutEngine(
            runtime,
            scorer=scorer,
            adapter=adapter,
            on_rollout=lambda rollout: self.registry.notify("on_rollout_end", rollout=rollout),
            whole_rows=self.sees_gold,
            prompts=self.prompts,
        )
        return engine, runtime

    def make_gateway(self) -> contextlib.AbstractContextManager[Gateway | None]:
        """Return the plan's gateway as a context manager, not started; one that gives None if agents need none."""
        from agentrig.gateway.process import Gateway

        return Gateway(self.gateway) if self.uses_gateway else contextlib.nullcontext()

    def own_pool(self, algorithm: Algorithm | None) -> MakePool | None:
        """Return what makes the pool of an algorithm that brings one (see `Algorithm`), or None.

        Raises:
            ConfigError: It brings one, its spec does not say so, and the run names other runners.
        """
        own: Any = getattr(algorithm, "pool", None)
        if own is None or not self.runners.n:
            return None
        spec, name = self.components["algorithm"].spec, self.components["runners"].spec.name
        if getattr(spec, "runners", False):
            return functools.partial(own, make=None if name == auto.OWN else self.build("runners"))
        if name != auto.PROCESSES:
            raise ConfigError(
                f'[runners] use = "{name}": algorithm {spec.name} brings its own runners, so these would not be used. '
                "Leave --runners out; an algorithm that can place them says so in its spec, AlgorithmSpec(runners=True)"
            )
        made: MakePool = own
        return made

    def pool(self, make: MakePool | None = None) -> RunnerPool:
        """Return the pool of the plan's runners, without starting any; `make` instead of what `[runners] use` names."""
        from agentrig.runners.processes import Pool

        spec: Any = self.components["agent"].spec
        if make is None:
            make = self.build("runners") if self.components["runners"].spec.name != auto.OWN else Pool
        pool: RunnerPool = make(
            self.agent_plan(),
            n=self.runners.n,
            threads=self.runners.threads,
            deadline_s=self.runners.deadline_s,
            retries=self.runners.retries,
            preload=spec.preload,
        )
        return pool

    @contextlib.contextmanager
    def runner_pool(self, *, trains: bool = False) -> Iterator[RunnerPool]:
        """Make the pool of runners, which the runtime starts; close it at the end.

        The agent is built in a runner and never in this process: its imports take seconds and hundreds of MB, it may
        start threads, and its side effects would reach the reward. What runners share is imported from here on, while
        the run goes on: they start beside the model's server. An algorithm with its own pool (Ray's actors) needs its
        cluster first; then one runner, a process of this machine, tests the build.

        Args:
            trains: Whether its algorithm will run, and may start runners of its own.

        Raises:
            AgentrigError: The agent cannot be built; the message names the plugin's file and line.
        """
        from agentrig.runners.processes import Pool

        late = trains and getattr(self.components["algorithm"].spec, "runners", False)
        pool = self.pool(Pool if late else None)
        try:
            if late and self.runners.n:  # with none, runners of other machines build it
                pool.build_first(FIRST_RUNNER_S)
            yield pool
        finally:
            pool.close()

    def scorer(self) -> Scorer:
        """Return a scorer for the plan's reward, built anew, with the plan's correctness rules."""
        component = self.components["reward"]
        return self._scorer(component, self.config("reward"), run_at=self.run.correct_at)

    def second_scorers(self) -> dict[str, Scorer]:
        """Return the scorers of the rewards that are only logged, by the names that the run has for them."""
        return {
            self.registry.reference(component): self._scorer(component, config)
            for component, config in self.second_rewards
        }

    def _scorer(self, component: Component, config: Any, *, run_at: float | None = None) -> Scorer:
        from agentrig.processes.put_back import left_alone
        from agentrig.runners.judging import CURE
        from agentrig.runners.reward_process import RewardPlan
        from agentrig.runners.scorer import Scorer

        name = self.registry.reference(component)
        with left_alone(f"the reward {name}, while it was built,", CURE, tell=log.warning):
            reward, sees_trace = composing.build(component, config, self.registry)
        plan = RewardPlan(
            name=name,
            config=attrs.asdict(config),
            files=tuple(self.run.plugins),
            block=tuple(self.run.block),
            budget_s=self.run.reward_budget_s,
        )
        return Scorer(
            reward,
            budget_s=self.run.reward_budget_s,
            correctness=Correctness(run_at=run_at, reward_at=getattr(component.spec, "correct_at", None)),
            sees_trace=sees_trace,
            plan=None if (component.distribution, component.spec.name) == JUDGES_NOTHING else plan,
        )

    def agent_plan(self) -> AgentPlan:
        """Return how runner processes build this plan's agent."""
        from agentrig.runners.jobs import AgentPlan

        spec: Any = self.components["agent"].spec
        return AgentPlan(
            name=self.registry.reference(self.components["agent"]),
            config=attrs.asdict(self.configs["agent"]),
            files=tuple(self.run.plugins),
            block=tuple(self.run.block),
            environment=(*spec.environment, *self.runners.environment),
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections and keys of a run file, with every default filled in."""
        sections: dict[str, dict[str, Any]] = {"run": attrs.asdict(self.run)}
        for kind in RUN_KINDS:
            use = self.registry.reference(self.components[kind])
            sections[kind] = {"use": use, **sources(attrs.asdict(self.config(kind)))}
        sections["gateway"] = attrs.asdict(self.gateway)
        if self.prompts:
            sections["prompts"] = dict(self.prompts)
        sections |= observing.written(self.observers, self.registry)
        named = {self.registry.reference(c): sources(attrs.asdict(config)) for c, config in self.second_rewards}
        if any(named.values()):
            sections[composing.SECOND] = {name: keys for name, keys in named.items() if keys}
        return sections


OWN_SECTIONS: Mapping[str, type] = {
    "run": RunSettings,
    "runners": RunnerSettings,
    "gateway": GatewaySettings,
}
"""The sections with keys of agentrig's own; `[runners]` also has those of the runners that it names."""


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections as TOML text; keys whose value is None are left out (TOML has no null)."""
    import tomlkit  # imported here because every command imports this module and few need tomlkit

    document = tomlkit.document()
    for name, keys in sections.items():
        document.add(name, _toml_value(keys))
    return tomlkit.dumps(document)


def _toml_value(value: Any) -> Any:
    if isinstance(value, str) and "\n" in value and "\r" not in value:  # a reader would drop the carriage returns
        from tomlkit import string

        return string(value, multiline=True)
    if isinstance(value, Mapping):
        return {k: _toml_value(v) for k, v in value.items() if v is not None}
    return [_toml_value(v) for v in value] if isinstance(value, list | tuple) else value


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a TOML run file: sections, and optionally `recipe = "name"` as its base.

    Raises:
        AgentrigError: No such file, no regular one, empty, not UTF-8, or not TOML; the message says where.
    """
    text = ""
    try:
        check_regular(path)
        text = utf8_text(path)
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no run file {path} (looked in {Path.cwd()}).{nearest_path(path)}\n"
            "  Give its path, or a recipe's name without .toml"
        ) from None
    except IsADirectoryError:
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is a folder; give a recipe's name or a run file") from None
        raise ConfigError(
            f"{path} is a run directory, not a run file. To continue it: agentrig train --resume {path}\n"
            f"  To measure or try its model: agentrig eval (or dev) RECIPE --checkpoint {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}{meant_in_file(text, error)}") from None
    except (ValueError, RecursionError) as error:  # valid TOML that Python does not read
        raise ConfigError(f"{path} {json_fault(error)}") from None
    files = data.get("run", {}).get("plugins", []) if isinstance(data.get("run"), dict) else []
    if isinstance(files, list) and files and all(isinstance(f, str) for f in files):
        data["run"]["plugins"] = [str((path.parent / f).resolve()) for f in files]
    return data


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split `section.key=value`; the value is read as TOML (`3e-4`, `true`, `[1, 2]`), else as text.

    A key with dots, `section.table.rest.of.it=value`, sets `rest.of.it` in the table of that name.

    Raises:
        ConfigError: The text does not have that form, or there is no such section.
    """
    left, equals, right = text.partition("=")
    section, dot, key = left.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f'"{text}" is not an override; write section.key=value, for example algorithm.lr=3e-4')
    check_section(section)
    try:
        read = tomllib.loads(f"x = {right}")
    except tomllib.TOMLDecodeError:
        read = {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{left.strip()} {json_fault(error)}") from None
    if right.strip() in ("None", "null"):
        raise ConfigError(
            f"{text}: {right.strip()} is no value. Write {left.strip()}= for an empty text, leave the key out for its "
            f"default, or quote the text: '{left.strip()}=\"{right.strip()}\"'"
        )
    value = read["x"] if len(read) == 1 else right  # more than one key: multi-line text that looks like TOML
    table, nested, inner = key.partition(".")
    return (section, table, {inner: value}) if nested else (section, key, value)


def resolve(
    source: str | None = None,
    *,
    overrides: Sequence[str] = (),
    uses: Mapping[str, str | None] | None = None,
    observers: Sequence[str] = (),
    trackers: Sequence[str] = (),
    files: Sequence[str] = (),
    prompts: Mapping[str, Any] | None = None,
    strict_plugins: bool = False,
) -> Plan:
    """Merge a recipe or run file and the command-line options into a checked plan.

    Args:
        source: A recipe's name or a run file's path (`.toml`); None for the recipe `mini`.
        overrides: `section.key=value`, applied last.
        uses: Kind to component name, as in `--reward NAME`. If you choose another component than the
            recipe, the recipe's keys of that section hold as far as both have them from one settings class; a
            credit's never.
        observers: Observers to use, in addition to those of the recipe or run file.
        trackers: Trackers to use, in addition to those of the recipe or run file.
        files: Plugin files, in addition to those of the run file.
        prompts: Prompts in the place of those of the run file.
        strict_plugins: Raise for the first plugin that fails to load.

    Raises:
        ConfigError, LookupFailed, PluginError: The message names the key, the plugin and the nearest valid name.
    """
    from agentrig.plugins.loading import each_once, load

    # Read: the run file, the overrides, the plugins.
    name = source or "mini"
    base, own = _read_source(name)
    if name.endswith(".toml") and not (base or own or overrides or any((uses or {}).values())):
        raise ConfigError(f'{name} is empty: it needs a first line such as recipe = "mini", or sections')
    parsed = [parse_override(o) for o in overrides]
    # `use` first: a new component drops keys that only the old one has, and a new algorithm those of server and credit.
    parsed.sort(key=lambda override: (override[1] != "use", override[0] != "algorithm"))
    wanted = {**own.get("run", {}), **{key: value for section, key, value in parsed if section == "run"}}
    needed = each_once([*_strings(wanted, "plugins"), *files])  # a run's config.toml names its plugin files
    try:
        registry = load(block=_strings(wanted, "block"), files=needed, strict=strict_plugins)
    except PluginError as error:
        directory = Path(name).parent
        if name.endswith(".toml") and not all(Path(file).is_file() for file in needed) and script_of(directory):
            raise ConfigError(
                f"{name} is of the run of a script: only the script has its agent and its tasks. To measure or to try "
                f"the model, export it (agentrig export {directory} my-model) and give it to the script"
            ) from error
        raise
    known = {name for plugin in registry.plugins for name in (plugin.name, plugin.distribution)}
    for blocked in set(_strings(wanted, "block")) - known:
        log.warning(
            "[run] block: there is no plugin or distribution called %s.%s", blocked, nearest(blocked, known - {"file"})
        )

    # Merge: each source over the one before.
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    recipe = registry.find("recipe", base) if base else None
    of_recipe = selecting.own_first(recipe, registry) if recipe else {}
    layers = [
        *([(f"recipe {recipe.spec.name} ({recipe.source})", of_recipe)] if recipe else []),
        (name, own),
        *(("", {kind: {"use": uses[kind]}}) for kind in RUN_KINDS if uses and uses.get(kind) is not None),
        ("", {"prompts": prompts or {}}),
        *(("", {section: {key: value}}) for section, key, value in parsed),
    ]
    with _file_named(layers):
        for _, settings in layers:
            selecting.merge(merged, settings, registry)
    overridden = any((section, key) == ("run", "plugins") for section, key, _ in parsed)
    if files or overridden:  # absolute, so that a resumed run finds them from any folder
        together = each_once([*_strings(merged["run"], "plugins"), *files])
        merged["run"]["plugins"] = [str(Path(file).expanduser().resolve()) for file in together]
    for section, names in ((observing.SECTION, observers), (observing.TRACKERS, trackers)):
        if names:
            merged[section]["use"] = list(dict.fromkeys([*observing.used(merged[section], section), *names]))

    # Select: a component of each kind, and its config object. `auto` waits until it is asked for.
    elsewhere = functools.partial(selecting.elsewhere, merged=merged, registry=registry, own=OWN_SECTIONS)
    with _file_named(layers):
        of_run: Any = {"owner": "a run", "elsewhere": elsewhere}
        run = structure(RunSettings, merged["run"], section="run", shown="run", **of_run)
        gateway = structure(GatewaySettings, merged["gateway"], section="gateway", shown="gateway", **of_run)
        second = composing.second_rewards(run.second_reward, merged[composing.SECOND], registry, elsewhere)
        components, configs, reasons = selecting.select_all(merged, registry, elsewhere)
    selecting.tell_dropped([(base, of_recipe), (name, own)], merged["credit"], components["credit"], registry)
    composing.parts_of(components["reward"], configs["reward"], registry)

    # Check what only makes sense together.
    agent: Any = components["agent"].spec
    _check_gateway(gateway, agent)
    return Plan(
        recipe=_recipe_name(name),
        run=run,
        runners=configs["runners"],
        components=components,
        configs=configs,
        registry=registry,
        reasons=reasons,
        observers=tuple(
            found for s in observing.SECTIONS for found in observing.selected(merged[s], registry, elsewhere, s)
        ),
        second_rewards=second,
        gateway=gateway,
        prompts=checked(merged["prompts"], agent.declared(configs["agent"]), agent=agent.name),
        typed=_typed(name, overrides, uses or {}, files),
    )


def _typed(source: str, overrides: Sequence[str], uses: Mapping[str, str | None], files: Sequence[str]) -> list[str]:
    """Return the words and options that select a configuration again, but for its model and what only looks on."""
    words = [source, *(word for word in overrides if not word.startswith("algorithm.model="))]
    given = [*uses.items(), *(("plugin", file) for file in files)]
    return [*words, *(part for option, value in given if value is not None for part in (f"--{option}", value))]


@contextlib.contextmanager
def _file_named(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[None]:
    """Put the place of a wrong key before the error about it: the last of the layers that has the key ('': no file)."""
    try:
        yield
    except AgentrigError as error:
        section, key = error.key
        place = next((p for p, has in reversed(layers) if section in has and (not key or key in has[section])), "")
        if place:
            error.args = (f"{place}: {error}",)
        raise


def _is_file(source: str) -> bool:
    return source.endswith(".toml") or "/" in source


def _recipe_name(source: str) -> str:
    """Return a recipe's name, a run file's stem, or the recipe of the run that a `config.toml` is of."""
    path = Path(source)
    if path.name == "config.toml":
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(read_text(path.with_name("manifest.json")))["recipe"])
    return plain_name(path.stem if _is_file(source) else source)


def _read_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe that a run begins with, '' for none, and the sections of its run file."""
    if name.endswith(".py"):
        from agentrig.plugins.loading import load

        own: dict[str, str] = {}
        with contextlib.suppress(PluginError):
            file = load(files=[name]).plugins[-1]  # installed ones come first
            own = {c.kind: c.spec.name for c in file.components}
        words = [own.get("recipe", "mini"), "--plugin", name]
        words += [] if "recipe" in own else ["--agent", own.get("agent", "NAME")]
        raise ConfigError(
            f"{name} is Python and no run file; in its place, name a recipe, and give the file as a plugin:\n"
            f"  {shlex.join(words)}"
        )
    if not _is_file(name):
        return name, {}
    own = read_run_file(Path(name))
    base = own.pop("recipe", "")
    if not isinstance(base, str):
        raise ConfigError(f'recipe = {base!r:.80} must be text: write recipe = "mini"')
    for section in own:
        if not isinstance(own[section], dict) and (places := [] if section in SECTIONS else keys_called(section)):
            raise ConfigError(
                f'"{section}" stands above all sections: write it in the section of its key, {" or ".join(places)}'
            )
        with _file_named([(name, own)]):
            check_section(section)
        if not isinstance(own[section], dict):
            raise ConfigError(f'"{section}" must be a section: write [{section}] and its keys below it')
    return base, own


def _check_gateway(gateway: GatewaySettings, agent: Any) -> None:
    """Raise if the gateway is off, and something needs it."""
    if gateway.use == "off" and gateway.models:
        raise ConfigError('[gateway] use = "off", but [gateway.models] names models that only the gateway can reach')
    if gateway.use == "off" and getattr(agent, "calls", "tap") == "gateway":
        raise ConfigError(
            f'[gateway] use = "off", but the calls of agent {agent.name} leave the runner\'s process: without the '
            'gateway nobody records them. Leave it out: "auto" starts the gateway'
        )


def keys_called(name: str, *, begun: bool = False) -> list[str]:
    """Return the keys with this name, `section.key`, of a run's own sections and of every installed component.

    If the name is only `begun`, they are those of the shortest name that begins with it.
    """
    from agentrig.plugins.loading import load

    registry = load()
    classes = [*OWN_SECTIONS.items()]
    classes += [(kind, c.spec.config) for kind in RUN_KINDS for c in registry.components(kind)]
    keys = [(section, key) for section, config in classes for key in attrs.fields_dict(config)]
    if begun:
        name = min((key for _, key in keys if key.startswith(name)), key=len, default=name)
    return list(dict.fromkeys(f"{section}.{key}" for section, key in keys if key == name))


def _strings(keys: Mapping[str, Any], key: str) -> list[str]:
    value = keys.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"[run] {key} = {value!r} must be a list of strings{meant(value, list[str], f'run.{key}')}")
    return value
