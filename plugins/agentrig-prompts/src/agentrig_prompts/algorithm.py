"""GEPA: prompts evolve by reflection on rollouts, along the Pareto front of validation tasks (arXiv 2507.19457).

    seed on validation → [a candidate of the front → minibatch → reflection → its child on the same minibatch
                          → if better: on validation] → … → the best of validation, measured once on held-out tasks

The search is that of the package `gepa`. Rollouts, budget and record are the run's. An iteration is a step of the run.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.endpoints import without_proxy
from agentrig.errors import ConfigError, RunStopped
from agentrig.hardware import Hardware
from agentrig.prompting import PROMPTS_FILE
from agentrig.servers import MakeServer, ServerPlan
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record
from agentrig_prompts.reflection import TRIES, Reflection
from agentrig_prompts.rollouts import EXCLUDED, Example, Rollouts, Stopping

log = logging.getLogger(__name__)


class Gepa:
    """Implements `agentrig.algorithms.Algorithm`.

    Args:
        config: The settings.
    """

    def __init__(self, config: GepaConfig) -> None:
        self.config = config

    def run(self, session: Session) -> None:
        """Improve the prompts until the budget is used, nothing is left to improve, or the user asked to end.

        Raises:
            ConfigError: The agent has no prompts, or the budget is too small to find anything.
        """
        validation = [("validation", task) for task in session.validation_tasks]
        train: list[Example] = [("train", task) for task in session.train_tasks]
        self._check(session, len(train), len(validation or train))
        plan = self._plan(session.hardware, log_file=session.directory / "server.log", seed=session.seed)
        with session.server(plan) as server:
            endpoints = self._sampled(server.endpoints)
            seed = dict(session.prompts)
            session.report(endpoints, when="before", step=0)
            search = Search(session, endpoints, self.config, train, validation or train)
            best = search.run(seed)
            server.check()
            if session.stopping:
                return
            session.prompts = best
            session.report(endpoints, when="after", step=search.ended)

    @contextmanager
    def serve(
        self, *, hardware: Hardware, checkpoint: Path | None, server: MakeServer
    ) -> Iterator[Endpoint | Sequence[Endpoint]]:
        """Serve the model.

        Raises:
            ConfigError: A checkpoint is named: it has prompts, and no model.
        """
        if checkpoint is not None:
            raise ConfigError(f"{checkpoint} is of a run that found prompts, and no model: give the run with --prompts")
        with server(self._plan(hardware)) as started:
            yield self._sampled(started.endpoints)

    def _plan(self, hardware: Hardware, *, log_file: Path | None = None, seed: int = 0) -> ServerPlan:
        return ServerPlan(
            model=Path(self.config.model or "."),
            name="policy",
            hardware=hardware,
            dtype=self.config.dtype,
            seed=seed,
            log=log_file,
        )

    def _sampled(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        for endpoint in endpoints:
            without_proxy(endpoint.base_url)
        fields = {"temperature": self.config.temperature, "max_tokens": self.config.reply_tokens}
        return [endpoint.with_sampling(**fields) for endpoint in endpoints]

    def _check(self, session: Session, train: int, validation: int) -> None:
        if not session.prompts:
            raise ConfigError(
                "[algorithm] gepa improves the prompts of an agent, and this agent declares none: "
                'AgentSpec(prompts={"system": "…"}), or [prompts] for a program or a service (docs/algorithms.md)'
            )
        if self.config.minibatch > train:
            raise ConfigError(f"[algorithm] minibatch = {self.config.minibatch}, and there are {train} training tasks")
        least = validation + 3 * (self.config.minibatch + validation)
        if self.config.max_calls < least:
            raise ConfigError(
                f"[algorithm] max_calls = {self.config.max_calls} can find nothing: three candidates on {validation} "
                f"validation tasks need at least {least}. Raise it, or measure on fewer tasks (run.validation_tasks)"
            )


class Search:
    """One search of gepa, as its adapter, its stopper and its criterion of acceptance; and the run's steps.

    Args:
        session: The run's.
        endpoints: The model's server.
        config: The settings.
        train: The tasks of minibatches.
        validation: The tasks that candidates are compared on.

    Attributes:
        ended: The last step that has ended.
    """

    def __init__(
        self,
        session: Session,
        endpoints: Sequence[Endpoint],
        config: GepaConfig,
        train: Sequence[Example],
        validation: Sequence[Example],
    ) -> None:
        self._session, self._config, self._train, self._validation = session, config, train, validation
        self._record = Record(session.directory)
        self._rollouts = Rollouts(session, endpoints, config, self._record)
        self._reflection = Reflection(session, endpoints[0], config, self._record)
        self._iteration = len(validation) + 2 * config.minibatch + TRIES  # the most calls of one
        self._rollouts.spare = config.max_calls - len(validation) - self._iteration
        self._best: tuple[Mapping[str, str], float] = ({}, 0.0)
        self._reflection_s, self._calls_before, self._idle, self.ended = 0.0, 0, 0, 0

    def run(self, seed: Mapping[str, str]) -> dict[str, str]:
        """Return the best prompts.

        Raises:
            RunStopped: A model can't be reached, too many rollouts failed, or `max_tokens` is too small.
        """
        import gepa

        self._best = (seed, 0.0)
        try:
            gepa.optimize(
                seed_candidate=dict(seed),
                trainset=list(self._train),
                valset=list(self._validation),
                adapter=self,
                reflection_minibatch_size=self._config.minibatch,
                perfect_score=self._config.perfect,
                acceptance_criterion=self,
                stop_callbacks=self.stop,
                logger=self,
                seed=self._session.seed,
                track_best_outputs=False,
            )
        except Stopping as stopping:
            if stopping.__cause__ is not None:
                raise stopping.__cause__ from None
        return dict(self._best[0])

    # --- what gepa calls --------------------------------------------------------------------------

    def log(self, message: str) -> None:
        """Implement gepa's logger."""
        log.debug("%s", message)

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Implement `GEPAAdapter.evaluate`."""
        from gepa import EvaluationBatch

        lines = self._rollouts.settled(batch, candidate)
        scores = [EXCLUDED if line["value"] is None else float(line["value"]) for line in lines]
        return EvaluationBatch(outputs=[line.get("answer") for line in lines], scores=scores, trajectories=lines)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Implement `GEPAAdapter.make_reflective_dataset`: inputs, answers and feedback, without failures."""
        examples = [
            {
                "Inputs": line["inputs"],
                "Generated Outputs": {"answer": line["answer"], "replies": "\n---\n".join(line["replies"])},
                "Feedback": f"{line['feedback']}\nreward {line['value']:g}".strip(),
            }
            for line in eval_batch.trajectories
            if line["value"] is not None
        ]
        return {name: examples for name in components_to_update} if examples else {}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Implement `GEPAAdapter.propose_new_texts`: without a usable text there is no new candidate."""
        start = time.perf_counter()
        found = {
            name: self._reflection.better(candidate[name], name, reflective_dataset[name])
            for name in components_to_update
            if name in reflective_dataset
        }
        self._reflection_s += time.perf_counter() - start
        return {name: text for name, text in found.items() if text is not None}

    def should_accept(self, proposal: Any, state: Any) -> bool:
        """Implement gepa's criterion: a higher sum over the tasks that neither candidate has left out."""
        pairs = zip(proposal.subsample_scores_before, proposal.subsample_scores_after, strict=True)
        both = [(before, after) for before, after in pairs if EXCLUDED not in (before, after)]
        return math.fsum(after for _, after in both) > math.fsum(before for before, _ in both)

    def stop(self, state: Any) -> bool:
        """Implement gepa's stopper, called before each iteration: end the step before, and say whether to end."""
        session, config, record = self._session, self._config, self._record
        self._best = _best(state)
        self.ended = state.i + 1
        if self.ended:
            self._idle = 0 if record.calls > self._calls_before else self._idle + 1
            self._calls_before = record.calls
            if self.ended >= session.first_step:
                self._end_step(state)
        elif config.max_tokens and config.max_tokens < (least := self._least_tokens()):
            raise RunStopped(
                f"[algorithm] max_tokens = {config.max_tokens} can find nothing: by the tokens of the first validation, "
                f"three candidates need at least {least}",
                cause="budget",
            )
        self._rollouts.step = self.ended + 1
        self._rollouts.spare = config.max_calls - record.calls - self._iteration
        replayed = self.ended >= session.first_step - 1
        return (
            session.stopping
            or (session.solved and replayed)
            or self._idle > len(self._train) // config.minibatch  # a whole epoch without anything new
            or self._rollouts.spare < 0
            or bool(config.max_tokens and record.tokens + self._iteration * record.largest > config.max_tokens)
        )

    # ----------------------------------------------------------------------------------------------

    def _least_tokens(self) -> int:
        each = self._record.tokens / max(1, self._record.calls)
        return math.ceil(each * (len(self._validation) + 3 * (self._config.minibatch + len(self._validation))))

    def _end_step(self, state: Any) -> None:
        prompts, score = self._best
        found = {"prompts": dict(prompts), "validation_reward": score}
        metrics = {
            "validation_reward_best": score,
            "candidates": len(state.program_candidates),
            "calls_used": self._record.calls,
            "tokens_used": self._record.tokens,
            "refused_prompts": self._reflection.refused,
            "excluded_rollouts": self._record.excluded,
        }
        seconds, self._reflection_s = self._reflection_s, 0.0
        self._session.end_step(self.ended, metrics=metrics, time_s={"update": seconds})

        def write(directory: Path) -> None:
            (directory / PROMPTS_FILE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")

        self._session.save_checkpoint(self.ended, write)
        write(self._session.directory)


def _best(state: Any) -> tuple[Mapping[str, str], float]:
    """Return the candidate with the best mean over validation tasks, compared where neither has left any out."""
    scores = state.prog_candidate_val_subscores
    best = 0
    for i in range(1, len(scores)):
        both = [id for id, value in scores[i].items() if EXCLUDED not in (value, scores[best].get(id, EXCLUDED))]
        if math.fsum(scores[i][id] for id in both) > math.fsum(scores[best][id] for id in both):
            best = i
    kept = [value for value in scores[best].values() if value != EXCLUDED]
    return state.program_candidates[best], statistics.fmean(kept) if kept else 0.0
