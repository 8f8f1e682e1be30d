"""The setup that a run and an evaluation share: hardware, runners, engine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs

from agentrig.adapters import Adapter
from agentrig.algorithms import Algorithm
from agentrig.correctness import Correctness
from agentrig.errors import ConfigError
from agentrig.gateway.process import Gateway
from agentrig.hardware import Hardware, select
from agentrig.learners import LoopSettings
from agentrig.plan import Plan
from agentrig.plugins import composing
from agentrig.plugins.auto import OWN, PROCESSES, auto_server, refusal
from agentrig.plugins.building import built
from agentrig.plugins.registry import Component
from agentrig.pools import MakePool, RunnerPool
from agentrig.processes.replaced import left_alone
from agentrig.refusals import Learning, refuses_gate
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.processes import Pool
from agentrig.runners.runtime import Runtime
from agentrig.runners.scorer import REWARD_CURE, RewardPlan, Scorer
from agentrig.servers import MakeServer, ServerMemory

log = logging.getLogger(__name__)

FIRST_RUNNER_S = 5.0
"""Seconds that a run with runners of the algorithm's own waits for the test of a build; a slower one goes on."""


class Setup:
    """What a run and an evaluation are made of, built from their plan.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def hardware(self) -> Hardware:
        """Build the hardware, check that it works, and set its environment.

        Raises:
            ConfigError: The algorithm and the hardware do not support each other.
            HardwareError: It is not available, or broken; agentrig never falls back to other hardware.
        """
        hardware: Hardware = self.plan.build("hardware")
        spec: Any = self.plan.components["algorithm"].spec
        if spec.hardware and hardware.name not in spec.hardware:
            raise ConfigError(f"algorithm {spec.name} runs on {', '.join(spec.hardware)}, not on {hardware.name}")
        if not hardware.carries(spec.name):
            recipes: list[Any] = [c.spec for c in self.plan.registry.components("recipe")]
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
        component = self.plan.components["server"]
        name = component.spec.name
        if "server" in self.plan.reasons:
            why = self.plan.reasons["server"]
            log.debug("the model's server is %s (%s); another one: --server NAME", name, why)
            return
        why = refusal(component, hardware)
        if why:
            raise ConfigError(
                f"server {name} can't serve on {hardware.name}: {why}\n  Leave --server out, or name another"
            )

    def check_algorithm(self) -> None:
        """Make sure that what the algorithm starts from is there, before runners start.

        Raises:
            ConfigError: It is not.
        """
        ready = getattr(self.plan.components["algorithm"].spec, "ready", None)
        if ready is not None:
            ready(self.plan.configs["algorithm"])

    def check_credit(self) -> None:
        """Make sure that the credit has a meaning with the algorithm's settings.

        Raises:
            ConfigError: It has none.
        """
        credit: Any = self.plan.components["credit"].spec
        algorithm: Any = self.plan.components["algorithm"].spec
        config, own = self.plan.configs["algorithm"], getattr(algorithm, "learning", None)
        if own is not None:
            learning = own(config)
        elif isinstance(config, LoopSettings):
            keys = "temperature", "top_p", "max_tokens", "max_staleness"
            learning = Learning(loss=getattr(config, "loss", ""), **{key: getattr(config, key) for key in keys})
        else:
            learning = Learning(own_loop=True)
        gate = refuses_gate if getattr(credit, "admit", None) is not None else None
        for refuses in (getattr(credit, "refuses", None), gate):
            if refuses is not None and (why := refuses(self.plan.configs["credit"], learning)):
                raise ConfigError(f"[credit] {credit.name} with the algorithm {algorithm.name}: {why}")

    def server(self) -> MakeServer:
        """Return what starts the plan's server, for the algorithm that asks for it; its heavy imports happen here.

        An algorithm whose spec does not say that it asks gets the server that `auto` selects, with a warning.
        """
        component = self.plan.components["server"]
        if component.spec.name != OWN:
            made: MakeServer = self.plan.build("server")
            return made
        found, why = auto_server(self.plan.registry, self.plan.build("hardware"), {})
        log.warning(
            "algorithm %s asks for a model server; let its spec say so, AlgorithmSpec(server=True). It gets %s (%s)",
            *(self.plan.components["algorithm"].spec.name, found.spec.name, why),
        )
        made = built(found, found.spec.config())
        return made

    def server_memory(self) -> ServerMemory | None:
        """Return what the settings of the plan's server say of its memory; None if it does not say."""
        say = getattr(self.plan.components["server"].spec, "memory", None)
        found: ServerMemory | None = say(self.plan.configs["server"]) if say else None
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
            scorer: The reward.
            adapter: Converts traces to triplets.
            algorithm: May bring its own pool (see `Algorithm`).
            pool: The pool from `runners`; closed if the algorithm has its own.
            gateway: The run's gateway, from `gateway`; None for none.
        """
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
            on_rollout=lambda rollout: self.plan.registry.notify("on_rollout_end", rollout=rollout),
            whole_rows=self.plan.sees_gold,
            prompts=self.plan.prompts,
        )
        return engine, runtime

    def gateway(self) -> AbstractContextManager[Gateway | None]:
        """Return the plan's gateway as a context manager, not started; one that gives None if agents need none."""
        return Gateway(self.plan.gateway) if self.plan.uses_gateway else nullcontext()

    def own_pool(self, algorithm: Algorithm | None) -> MakePool | None:
        """Return what makes the pool of an algorithm that brings one (see `Algorithm`), or None.

        Raises:
            ConfigError: It brings one, its spec does not say so, and the run names other runners.
        """
        own: Any = getattr(algorithm, "pool", None)
        if own is None or not self.plan.runners.n:
            return None
        spec, name = self.plan.components["algorithm"].spec, self.plan.components["runners"].spec.name
        if getattr(spec, "runners", False):
            return functools.partial(own, make=None if name == OWN else self.plan.build("runners"))
        if name != PROCESSES:
            raise ConfigError(
                f'[runners] use = "{name}": algorithm {spec.name} brings its own runners, so these would not be used. '
                "Leave --runners out; an algorithm that can place them says so in its spec, AlgorithmSpec(runners=True)"
            )
        made: MakePool = own
        return made

    def pool(self, make: MakePool | None = None) -> RunnerPool:
        """Return the pool of a plan's runners, without starting any; `make` instead of what `[runners] use` names."""
        spec: Any = self.plan.components["agent"].spec
        if make is None:
            make = self.plan.build("runners") if self.plan.components["runners"].spec.name != OWN else Pool
        pool: RunnerPool = make(
            self.agent_plan(),
            n=self.plan.runners.n,
            threads=self.plan.runners.threads,
            deadline_s=self.plan.runners.deadline_s,
            retries=self.plan.runners.retries,
            preload=spec.preload,
        )
        return pool

    @contextmanager
    def runners(self, *, trains: bool = False) -> Iterator[RunnerPool]:
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
        late = trains and getattr(self.plan.components["algorithm"].spec, "runners", False)
        pool = self.pool(Pool if late else None)
        try:
            if late and self.plan.runners.n:  # with none, runners of other machines build it
                pool.build_first(FIRST_RUNNER_S)
            yield pool
        finally:
            pool.close()

    def scorer(self) -> Scorer:
        """Return a scorer for the plan's reward, built anew, with the plan's correctness rules."""
        component = self.plan.components["reward"]
        return self._scorer(component, self.plan.config("reward"), run_at=self.plan.run.correct_at)

    def second_scorers(self) -> dict[str, Scorer]:
        """Return the scorers of the rewards that are only logged, by the names that the run has for them."""
        return {
            self.plan.registry.reference(component): self._scorer(component, config)
            for component, config in self.plan.second_rewards
        }

    def _scorer(self, component: Component, config: Any, *, run_at: float | None = None) -> Scorer:
        who = f"the reward {self.plan.registry.reference(component)}, while it was built,"
        with left_alone(who, REWARD_CURE, tell=log.warning if self.plan.run.reward_process else None):
            reward, sees_trace = composing.build(component, config, self.plan.registry)
        like = self.agent_plan()
        return Scorer(
            reward,
            budget_s=self.plan.run.reward_budget_s,
            correctness=Correctness(run_at=run_at, reward_at=getattr(component.spec, "correct_at", None)),
            sees_trace=sees_trace,
            plan=RewardPlan(
                name=self.plan.registry.reference(component),
                config=attrs.asdict(config),
                files=like.files,
                block=like.block,
                budget_s=self.plan.run.reward_budget_s,
            ),
            process=self.plan.run.reward_process,
        )

    def agent_plan(self) -> AgentPlan:
        """Return how runner processes build this plan's agent."""
        spec: Any = self.plan.components["agent"].spec
        return AgentPlan(
            name=self.plan.registry.reference(self.plan.components["agent"]),
            config=attrs.asdict(self.plan.configs["agent"]),
            files=tuple(self.plan.run.plugins),
            block=tuple(self.plan.run.block),
            environment=(*spec.environment, *self.plan.runners.environment),
        )
