"""What a search for prompts does beside searching: the model's server, the budget, the steps, the best prompts."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.errors import ConfigError, RunStopped
from agentrig.hardware import Hardware
from agentrig.prompting import PROMPTS_FILE
from agentrig.servers import MakeServer, ServerPlan
from agentrig_prompts.asking import Asking, Example, Stopping
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record

EXCLUDED = float("-inf")
"""The score of a task that is left out; what compares candidates skips it."""

Prompts = Mapping[str, str]
Scores = Mapping[int, float]
"""A candidate's reward on each task, by the task's place."""


class Search(ABC):
    """Implements `agentrig.algorithms.Algorithm`: one search.

    Attributes:
        making: Fewest and most calls that make a candidate, before it is run on the validation tasks.
        ended: The last step that has ended.
    """

    def __init__(self, config: GepaConfig) -> None:
        self._config, self.making = config, (config.minibatch, 2 * config.minibatch + 1)

    def begin(self, session: Session) -> None:
        """Check a run's prompts, tasks and budget, and read what was paid before."""
        self._session, self._record, config = session, Record(session.directory), self._config
        self._train: list[Example] = [("train", task) for task in session.train_tasks]
        self._validation = [("validation", task) for task in session.validation_tasks] or self._train
        validation = len(self._validation)
        self._least, self._each = validation + 3 * (self.making[0] + validation), self.making[1] + validation
        self._best: tuple[Prompts, float] = (dict(session.prompts), 0.0)
        self._paid, self._idle, self.ended = 0, 0, 0
        if not session.prompts:
            how = 'AgentSpec(prompts={"system": "…"}), or [prompts] for a program or a service (docs/algorithms.md)'
            raise ConfigError(f"[algorithm] it improves an agent's prompts, and this agent declares none: {how}")
        if (tasks := len(self._train)) < config.minibatch:
            raise ConfigError(f"[algorithm] minibatch = {config.minibatch}: there are {tasks} training tasks")
        if config.max_calls < (least := self._least):
            need = f"three candidates on {validation} validation tasks (run.validation_tasks) need at least {least}"
            raise ConfigError(f"[algorithm] max_calls = {config.max_calls} can find nothing: {need}")

    @abstractmethod
    def search(self) -> None:
        """Improve the prompts; call `goes_on` before each step, and end when it returns False."""

    def run(self, session: Session) -> None:
        """Improve the prompts until the budget is used, nothing is left to improve, or the user asked to end."""
        self.begin(session)
        plan = self._plan(session.hardware, seed=session.seed, log=session.directory / "server.log")
        with session.server(plan) as server:
            endpoints = self._sampled(server.endpoints)
            self._asking = Asking(session, endpoints, self._config, self._record)
            session.report(endpoints, when="before", step=0)
            try:
                self.search()
            except Stopping as stopping:
                if stopping.__cause__ is not None:
                    raise stopping.__cause__ from None
            server.check()
            session.prompts = dict(self._best[0])
            if not session.stopping:
                session.report(endpoints, when="after", step=self.ended)

    @contextmanager
    def serve(self, *, hardware: Hardware, checkpoint: Path | None, server: MakeServer) -> Iterator[list[Endpoint]]:
        """Serve the model; refuse a checkpoint, which has prompts and no model."""
        if checkpoint is not None:
            raise ConfigError(f"{checkpoint} has prompts, and no model: give the run with --prompts")
        with server(self._plan(hardware)) as started:
            yield self._sampled(started.endpoints)

    def _plan(self, hardware: Hardware, **more: Any) -> ServerPlan:
        config = self._config
        return ServerPlan(model=Path(config.model), name="policy", hardware=hardware, dtype=config.dtype, **more)

    def _sampled(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        fields = {"temperature": self._config.temperature, "max_tokens": self._config.reply_tokens}
        return [endpoint.with_sampling(**fields) for endpoint in endpoints]

    def affords(self, calls: int) -> bool:
        """Return whether the budget has so many more calls; what is beyond them may go into failed rollouts."""
        config, record = self._config, self._record
        self._asking.spare = config.max_calls - record.calls - calls
        return self._asking.spare >= 0 and not 0 < config.max_tokens < record.tokens + calls * record.largest

    def goes_on(self, ended: int, best: tuple[Prompts, float], **metrics: float) -> bool:
        """End a step (0: before the first), and return whether the next one may begin.

        `best` has the best prompts so far, and their mean reward on the validation tasks.
        """
        session, config, record, asking = self._session, self._config, self._record, self._asking
        self._best, self.ended, tried = best, ended, asking.refused + asking.usable
        session.record("reflections", {"n": tried, "refused": asking.refused, "example": asking.example})
        self._idle, self._paid = 0 if record.calls > self._paid else self._idle + 1, record.calls
        if ended >= session.first_step:
            metrics |= {"best_validation_reward": best[1], "calls_used": record.calls, "tokens_used": record.tokens}
            metrics |= {"excluded_rollouts": record.excluded, "refused_prompts": asking.refused}
            session.end_step(ended, metrics=metrics, time_s={"update": asking.reflection_s})
            asking.reflection_s = 0.0
            found = {"prompts": dict(best[0]), "validation_reward": best[1]}
            session.save_checkpoint(ended, lambda folder: _write(folder, found))
            _write(session.directory, found)
        elif not ended:
            least = math.ceil(record.tokens / max(1, record.calls) * self._least)
            if 0 < config.max_tokens < least:
                need = f"by the first {record.calls} rollouts, three candidates need at least {least}"
                raise RunStopped(f"[algorithm] max_tokens = {config.max_tokens} can find nothing: {need}")
        asking.step, why = ended + 1, ""
        if session.solved and ended >= session.first_step - 1:
            why = "every rollout is correct"
        elif self._idle > len(self._train) // config.minibatch:
            why = "all training tasks again gave nothing new"
        elif not self.affords(self._each):
            why = f"another step may need {self._each} calls, and the budget has less"
        if why and not session.stopping:
            refused = f"{asking.refused} of {tried} attempts at a new prompt gave no usable text"
            session.note(f"the search for prompts ended after {record.calls} calls: {why}; {refused}")
        return not (why or session.stopping)


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    (folder / PROMPTS_FILE).write_text(f"{json.dumps(found, indent=1, ensure_ascii=False)}\n", "utf-8")


def scores_of(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the reward of each rollout, `EXCLUDED` for a task that is left out."""
    return [EXCLUDED if line["value"] is None else float(line["value"]) for line in lines]


def margin(scores: Scores, others: Scores) -> float:
    """Return by how much the rewards are higher than another candidate's, in sum over tasks that neither left out."""
    both = [task for task in scores if EXCLUDED not in (scores[task], others[task])]
    return math.fsum(scores[task] for task in both) - math.fsum(others[task] for task in both)


def best_of(candidates: Sequence[Scores]) -> int:
    """Return the place of the best candidate; of equal ones the first."""
    best = 0
    for place, scores in enumerate(candidates):
        if margin(scores, candidates[best]) > 0:
            best = place
    return best


def mean(scores: Scores) -> float:
    """Return the mean reward over tasks that are not left out; 0.0 without any."""
    kept = [value for value in scores.values() if value != EXCLUDED]
    return math.fsum(kept) / len(kept) if kept else 0.0
