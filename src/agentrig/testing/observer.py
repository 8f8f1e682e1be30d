"""The checks of an observer: it gets the events of a whole run, and of one that fails, and holds nothing up."""

from __future__ import annotations

import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import place_of
from agentrig.frozen import frozen
from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
from agentrig.plugins.building import hooks_of
from agentrig.plugins.observing import build_observers
from agentrig.run.directory import RunDirectory
from agentrig.testing.kit import basic
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject

STEPS = 2
"""Of the run whose events it gets."""

FILES = ("config.toml", "manifest.json", "metrics.jsonl", "progress.json")
"""Files of a run directory that are the run's own."""

EMPTY = (
    *("reward", "reward_std", "zero_variance_groups", "prompt_tokens", "response_tokens"),
    *("rollouts_per_s", "tokens_per_s"),
)
"""Figures that a step has not, if every rollout of it failed, or if its rollouts are demonstrations."""

Event = tuple[str, Any]
"""A hook's name, and what it gets."""


@attrs.define(kw_only=True, eq=False, slots=False)
class ObserverSubject(Subject):
    """An observer, and the events that it gets.

    Attributes:
        rollout_s: Longest time that it may take for a rollout, on average, seconds.
        other_s: Longest time for any other event.
    """

    rollout_s: float = 0.05
    other_s: float = 5.0

    def play(self, events: Iterator[Event]) -> dict[str, list[float]]:
        """Notify a new observer of events; return the seconds of each call by hook.

        Raises:
            CheckFailed: It raised.
        """
        observer = self.build()
        hooks, seconds = hooks_of(observer), defaultdict[str, list[float]](list)
        for hook, event in events:
            if hook not in hooks:
                continue
            start = time.perf_counter()
            try:
                getattr(observer, hook)(frozen(event))
            except (Exception, SystemExit) as error:
                raise CheckFailed(f"{hook} raised {type(error).__name__}: {error}{place_of(error)}") from error
            seconds[hook].append(time.perf_counter() - start)
        return seconds

    def run(self) -> RunDirectory:
        """Return a new directory of a finished run, whose events it gets."""
        return RunDirectory(write_run(Path(tempfile.mkdtemp(dir=self.folder)) / "run", steps=STEPS, held_out=2))


def whole(run: RunDirectory) -> Iterator[Event]:
    """Yield the events of a run that ends well."""
    config = tomllib.loads((run.path / "config.toml").read_text("utf-8"))
    lines, summary = run.metrics(), run.read_json("summary.json")
    yield "on_run_start", RunStart(directory=run.path, config=config, steps=STEPS, first_step=1)
    for line in lines:
        for i in range(8):
            yield "on_rollout_end", rollout_of(i, right=i % 2 == 0, mode="train", step=line["step"])
        yield "on_step_end", StepEnd(step=line["step"], metrics=line)
    yield "on_run_end", RunEnd(directory=run.path, summary=summary)


def failing(run: RunDirectory) -> Iterator[Event]:
    """Yield the events of a resumed run whose rollouts all fail, and that ends by an error."""
    step, line = STEPS + 1, {**run.metrics()[-1], **dict.fromkeys(EMPTY), "nodes": {}, "algorithm": {}}
    _, start = next(whole(run))
    yield "on_run_start", attrs.evolve(start, steps=None, first_step=step)
    for i in range(2):
        yield "on_rollout_end", rollout_of(i, right=False, mode="train", step=step, failure="deadline")
    yield "on_step_end", StepEnd(step=step, metrics={**line, "step": step})
    yield "on_run_error", RunError(directory=run.path, error=KeyboardInterrupt("ended early"))


@basic
def check_hooks(subject: ObserverSubject) -> None:
    """Its methods are hooks that a run can call.

    Why: A misspelled hook is never called, and nobody notices.
    Cure: Name the methods as the hooks of agentrig.plugins.hookspecs: one argument each, and not async.
    """
    component = subject.component
    if component is None:
        raise CheckSkipped("it was given already built; a run takes observers from their spec")
    build_observers([(component, subject.config)])


@basic
def check_events(subject: ObserverSubject) -> None:
    """It gets the events of a run that ends well, and of a resumed one in which everything fails, and raises nothing.

    Why: What raises is logged and counted in the report, and its figures are missing; the runs that fail are those
        that somebody will look at.
    Cure: Read fields with `.get`, and catch what your tracker or file raises. Expect None where a step has no figure,
        failures without a score, a resumed run, and a run that ends early.
    """
    for events in (whole, failing):
        subject.play(events(subject.run()))


def check_fast(subject: ObserverSubject) -> None:
    """It does not hold a run up.

    Why: A run waits for its observers: a second for each rollout doubles the time of a step.
    Cure: Collect in on_rollout_end, and write or send in on_step_end, or in a thread of your own.
    """
    for hook, seconds in subject.play(whole(subject.run())).items():
        took, most = sum(seconds) / len(seconds), subject.rollout_s if hook == "on_rollout_end" else subject.other_s
        if took > most:
            raise CheckFailed(f"{hook} takes {took:.2f} s on average; {most:g} s are allowed")


def check_leaves_the_run(subject: ObserverSubject) -> None:
    """It does not change the run's own files.

    Why: A resume, the report and `agentrig audit` read these files.
    Cure: Write files of your own beside them; never change those of the run.
    """
    run = subject.run()
    before = {name: (run.path / name).read_bytes() for name in FILES}
    subject.play(whole(run))
    files = {name: run.path / name for name in FILES}
    changed = [name for name, file in files.items() if not file.is_file() or file.read_bytes() != before[name]]
    if changed:
        raise CheckFailed(f"it changes {', '.join(changed)} of the run directory")
