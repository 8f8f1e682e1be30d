"""Rollouts under candidate prompts, as gepa asks for them: failures are sampled again or left out, never 0.0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout
from agentrig.tasks import Task
from agentrig.traces import mapping, reply_of
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record, digest_of

Example = tuple[str, Task]
"""A task, with its role: ids are unique within a split only."""

EXCLUDED = float("-inf")
"""The score, inside gepa, of a task that is left out; every comparison here skips it."""

SHOWN = 4000
"""Most characters of an answer, a reply or an input that the reflecting model sees."""


class Stopping(BaseException):
    """Ends gepa from within, which goes on after any `Exception`; its cause is what the run ends with, if anything."""


class Rollouts:
    """Runs the agent under candidate prompts, and keeps the results in the run's record.

    Args:
        session: The run's.
        endpoints: The model's server.
        config: The settings.
        record: What was paid before.

    Attributes:
        step: The step that is under way.
        spare: Calls that may go into further attempts at failed rollouts, so that the budget is kept.
    """

    def __init__(self, session: Session, endpoints: Sequence[Endpoint], config: GepaConfig, record: Record) -> None:
        self._session, self._endpoints, self._config, self._record = session, endpoints, config, record
        self.step, self.spare = 1, 0

    def settled(self, batch: Sequence[Example], candidate: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return a line of the record for each task: its value is None if it is left out.

        Raises:
            RunStopped: The model can't be reached, or too many rollouts have failed.
        """
        name, config = digest_of(candidate), self._config
        keys = [digest_of(name, role, task.id) for role, task in batch]
        tries, failed = 0, dict[str, Rollout]()
        while left := {key: task for key, (_, task) in zip(keys, batch, strict=True) if not self._record.last(key)}:
            if self._session.stopping:
                raise Stopping
            ended = self._sample(left, candidate)
            failed |= {key: rollout for key, rollout in ended.items() if rollout.failure is not None}
            again = [key for key in left if key in failed and not self._record.last(key)]
            if not again:
                break
            if len(again) == len(left) and not any(r.trace.llm_calls() for r in ended.values()) and self._waited():
                continue  # the model was away: this was no try
            tries += 1
            if tries <= config.retries and len(again) <= self.spare:
                self.spare -= len(again)
                continue
            ours = [failed.get(key) or ended[key] for key in left]
            self._session.check_failures([r for r in ours if r is not None], step=self.step)
            for key in again:
                self._record.add(key, calls=0, tokens=0, settled=True, value=None)
        found = [self._record.last(key) for key in keys]
        return [line for line in found if line is not None]

    def _sample(self, left: Mapping[str, Task], candidate: Mapping[str, str]) -> dict[str, Rollout]:
        """Run each task once, and note each rollout as soon as it has ended: a killed run does not pay it again."""
        keys, ended = list(left), dict[str, Rollout]()

        def note(groups: Mapping[int, Sequence[Rollout]]) -> None:
            for place, (rollout,) in groups.items():
                ended[keys[place]] = rollout
                self._record.add(keys[place], **_line(rollout))

        self._session.prompts = candidate
        self._session.rollouts(
            list(left.values()), n=1, endpoint=self._endpoints, step=self.step, mode="train", on_groups=note
        )
        return ended

    def _waited(self) -> bool:
        """Wait until the model's server answers; return whether it did not at first."""
        url = f"{self._endpoints[0].base_url}/models"
        key = {"Authorization": f"Bearer {self._endpoints[0].api_key}"}
        return waited(lambda: httpx.get(url, headers=key, timeout=10), url, self._session, self._config.patience_s)


def waited(ask: Callable[[], httpx.Response], what: str, session: Session, patience_s: float) -> bool:
    """Ask until there is an answer other than an error of the server; return whether the first was none.

    Raises:
        RunStopped: There is none within the time.
        Stopping: The user asked to end.
    """
    end, pause, tries = time.monotonic() + patience_s, 0.5, 0
    while True:
        try:
            reply = ask()
            if reply.status_code < 500 and reply.status_code != 429:
                return tries > 0
            why = f"it answers {reply.status_code}: {reply.text[:200]}"
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
        tries += 1
        if session.stopping:
            raise Stopping
        if time.monotonic() + pause > end:
            raise RunStopped(
                f"{what} can't be used: {why}. The run waited {patience_s:g} s (algorithm.patience_s). What was paid is "
                f"kept: once it answers, {session.resumes}",
                cause="model-down",
            )
        time.sleep(pause)
        pause = min(2 * pause, 30.0)


def _line(rollout: Rollout) -> dict[str, Any]:
    """Return what the record keeps of a rollout; one that failed settles nothing."""
    calls = rollout.trace.llm_calls()
    line: dict[str, Any] = {"rollout": rollout.id, "task": rollout.task.id, "calls": bool(calls) + 0}
    line["tokens"] = sum(_tokens(call.attributes) for call in calls)
    if rollout.value is None:
        return {**line, "settled": False, "failure": rollout.failure}
    details = dict(rollout.score.details) if rollout.score else {}
    said = (rollout.score.feedback if rollout.score else "") or details.get("reason") or details.get("wrong") or ""
    return {
        **line,
        "settled": True,
        "value": rollout.value,
        "correct": rollout.correct,
        "inputs": {key: _text(value) for key, value in rollout.task.input.items()},
        "answer": _text(rollout.outcome.answer),
        "replies": [_text(reply_of(call.attributes)) for call in calls],
        "feedback": _text(said),
    }


def _tokens(call: Mapping[str, Any]) -> int:
    usage = mapping(mapping(call.get("response")).get("usage"))
    stated = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    ids = [len(call.get(name) or ()) for name in ("prompt_token_ids", "response_token_ids")]
    return sum(n if isinstance(n, int) else counted for n, counted in zip(stated, ids, strict=True))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
