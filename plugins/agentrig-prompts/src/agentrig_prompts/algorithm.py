"""GEPA: prompts evolve by reflection on rollouts, along the Pareto front of validation tasks (arXiv 2507.19457).

    the agent's prompts on validation → [a candidate of the front → minibatch → reflection → its child on that minibatch
    → if it is better: on validation] … → the best on validation, measured once on held-out tasks

The search is that of the package `gepa`; rollouts, budget and record are the run's. An iteration is a step of the run.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.endpoints import without_proxy
from agentrig.errors import ConfigError, RunStopped
from agentrig.hardware import Hardware
from agentrig.prompting import PROMPTS_FILE
from agentrig.servers import MakeServer, ServerPlan
from agentrig_prompts.asking import Asking, Example, Stopping
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record

log = logging.getLogger(__name__)

EXCLUDED = float("-inf")
"""The score, inside gepa, of a task that is left out; what compares candidates skips it."""


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
            ConfigError: The agent has no prompts, or the budget can find nothing.
            RunStopped: A model can't be reached, or too many rollouts failed.
        """
        search = Search(session, self.config)
        plan = self._plan(session.hardware, seed=session.seed, log=session.directory / "server.log")
        with session.server(plan) as server:
            endpoints = self._sampled(server.endpoints)
            session.report(endpoints, when="before", step=0)
            best = search.run(endpoints)
            server.check()
            session.prompts = best
            if not session.stopping:
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
            raise ConfigError(f"{checkpoint} has prompts, and no model: give the run with --prompts")
        with server(self._plan(hardware)) as started:
            yield self._sampled(started.endpoints)

    def _plan(self, hardware: Hardware, **more: Any) -> ServerPlan:
        model = Path(self.config.model)
        return ServerPlan(model=model, name="policy", hardware=hardware, dtype=self.config.dtype, **more)

    def _sampled(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        for endpoint in endpoints:
            without_proxy(endpoint.base_url)
        fields = {"temperature": self.config.temperature, "max_tokens": self.config.reply_tokens}
        return [endpoint.with_sampling(**fields) for endpoint in endpoints]


class Search:
    """One search: what gepa calls as its adapter, stopper, criterion of acceptance and logger.

    Args:
        session: The run's.
        config: The settings.

    Attributes:
        ended: The last step that has ended.

    Raises:
        ConfigError: The agent has no prompts, or the budget can find nothing.
    """

    def __init__(self, session: Session, config: GepaConfig) -> None:
        self._session, self._config, self._record = session, config, Record(session.directory)
        self._train: list[Example] = [("train", task) for task in session.train_tasks]
        self._validation = [("validation", task) for task in session.validation_tasks] or self._train
        validation, each = len(self._validation), config.minibatch
        self._iteration = validation + 2 * each + 1  # the most calls of one
        self._least = validation + 3 * (each + validation)
        self._best: tuple[Mapping[str, str], float] = (dict(session.prompts), 0.0)
        self._paid, self._idle, self.ended = 0, 0, 0
        if not session.prompts:
            how = 'AgentSpec(prompts={"system": "…"}), or [prompts] for a program or a service (docs/algorithms.md)'
            raise ConfigError(f"[algorithm] gepa improves an agent's prompts, and this agent declares none: {how}")
        if each > len(self._train):
            raise ConfigError(f"[algorithm] minibatch = {each}: there are {len(self._train)} training tasks")
        if config.max_calls < self._least:
            need = (
                f"three candidates on {validation} validation tasks (run.validation_tasks) need at least {self._least}"
            )
            raise ConfigError(f"[algorithm] max_calls = {config.max_calls} can find nothing: {need}")

    def run(self, endpoints: Sequence[Endpoint]) -> dict[str, str]:
        """Return the best prompts.

        Raises:
            RunStopped: A model can't be reached, too many rollouts failed, or `max_tokens` can find nothing.
        """
        self._asking = Asking(self._session, endpoints, self._config, self._record)
        self._asking.spare = self._config.max_calls - len(self._validation) - self._iteration
        adapter: Any = self
        try:
            optimize(
                seed_candidate=dict(self._best[0]),
                trainset=self._train,
                valset=self._validation,
                adapter=adapter,
                reflection_minibatch_size=self._config.minibatch,
                perfect_score=self._config.perfect,
                acceptance_criterion=adapter,
                stop_callbacks=adapter.stop,
                logger=adapter,
                seed=self._session.seed,
                track_best_outputs=False,
            )
        except Stopping as stopping:
            if stopping.__cause__ is not None:
                raise stopping.__cause__ from None
        return dict(self._best[0])

    def log(self, message: str) -> None:
        """Implement gepa's logger."""
        log.debug("%s", message)

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Implement `GEPAAdapter.evaluate`."""
        lines = self._asking.rollouts(batch, candidate)
        scores = [EXCLUDED if line["value"] is None else float(line["value"]) for line in lines]
        return EvaluationBatch(outputs=lines, scores=scores, trajectories=lines)

    def make_reflective_dataset(self, candidate: Any, eval_batch: Any, components_to_update: Any) -> dict[str, Any]:
        """Implement `GEPAAdapter.make_reflective_dataset`: inputs, outputs and feedback of what has not failed."""
        shown = ("Inputs", "Generated Outputs", "Feedback")
        examples = [{key: line[key] for key in shown} for line in eval_batch.outputs if line["value"] is not None]
        return {name: examples for name in components_to_update if examples}

    def propose_new_texts(self, candidate: Any, reflective_dataset: Any, components_to_update: Any) -> dict[str, str]:
        """Implement `GEPAAdapter.propose_new_texts`; without a usable text there is no new candidate."""
        texts = {name: self._asking.better(candidate[name], name, seen) for name, seen in reflective_dataset.items()}
        return {name: text for name, text in texts.items() if text is not None}

    def should_accept(self, proposal: Any, state: Any) -> bool:
        """Implement gepa's criterion: a higher sum over the tasks that neither candidate has left out."""
        pairs = zip(proposal.subsample_scores_before, proposal.subsample_scores_after, strict=True)
        both = [(before, after) for before, after in pairs if EXCLUDED not in (before, after)]
        return math.fsum(after for _, after in both) > math.fsum(before for before, _ in both)

    def stop(self, state: Any) -> bool:
        """Implement gepa's stopper, called before each iteration: end the step before, and say whether to end."""
        session, config, record = self._session, self._config, self._record
        self._best, self.ended = _best(state), state.i + 1
        self._idle, self._paid = 0 if record.calls > self._paid else self._idle + 1, record.calls
        if self.ended >= session.first_step:
            self._end_step(len(state.program_candidates))
        elif not self.ended:
            least = math.ceil(record.tokens / max(1, record.calls) * self._least)
            if 0 < config.max_tokens < least:
                need = f"by the first {record.calls} rollouts, three candidates need at least {least}"
                raise RunStopped(f"[algorithm] max_tokens = {config.max_tokens} can find nothing: {need}")
        self._asking.step = self.ended + 1
        self._asking.spare = config.max_calls - record.calls - self._iteration
        return (
            session.stopping
            or (session.solved and self.ended >= session.first_step - 1)
            or self._idle > len(self._train) // config.minibatch  # all training tasks again, and nothing new
            or self._asking.spare < 0
            or 0 < config.max_tokens < record.tokens + self._iteration * record.largest
        )

    def _end_step(self, candidates: int) -> None:
        """Close the step, and save the best prompts so far."""
        session, record, (prompts, reward) = self._session, self._record, self._best
        metrics = {
            "candidates": candidates,
            "best_validation_reward": reward,
            "calls_used": record.calls,
            "tokens_used": record.tokens,
            "excluded_rollouts": record.excluded,
            "refused_prompts": self._asking.refused,
        }
        session.end_step(self.ended, metrics=metrics, time_s={"update": self._asking.reflection_s})
        self._asking.reflection_s = 0.0
        text = json.dumps({"prompts": dict(prompts), "validation_reward": reward}, indent=1, ensure_ascii=False)
        session.save_checkpoint(self.ended, lambda folder: _write(folder, text))
        _write(session.directory, text)


def _write(folder: Path, text: str) -> None:
    (folder / PROMPTS_FILE).write_text(f"{text}\n", "utf-8")


def _best(state: Any) -> tuple[Mapping[str, str], float]:
    """Return the candidate with the highest reward on validation, compared on tasks that neither has left out."""
    scores: Sequence[Mapping[int, float]] = state.prog_candidate_val_subscores
    best = 0
    for i in range(1, len(scores)):
        both = [task for task in scores[i] if EXCLUDED not in (scores[i][task], scores[best][task])]
        if math.fsum(scores[i][task] for task in both) > math.fsum(scores[best][task] for task in both):
            best = i
    kept = [value for value in scores[best].values() if value != EXCLUDED]
    return state.program_candidates[best], statistics.fmean(kept) if kept else 0.0
