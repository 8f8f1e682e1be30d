"""The checks of an observer: it gets the events of a whole run, and of one that fails, and holds nothing up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from agentrig.errors import place_of
from agentrig.frozen import frozen
from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
from agentrig.plugins.building import hooks_of
from agentrig.plugins.observing import watchers
from agentrig.testing.kit import CheckFailed, CheckSkipped, needs
from agentrig.testing.run_directory import rollout_of
from agentrig.testing.subject import Subject

STEPS, ROLLOUTS = 2, 8
"""Of the run whose events it gets."""

FILES = ("config.toml", "manifest.json", "metrics.jsonl", "progress.json")
"""Files of a run directory that are the run's own."""

LINE: Mapping[str, Any] = {
    **{"time": 1_700_000_000.0, "reward": 0.5, "reward_std": 0.5, "accuracy": 0.5, "rollouts": ROLLOUTS},
    **{"failures": {"deadline": 1}, "zero_variance_groups": 0.25, "step_s": 2.0, "rollouts_per_s": 4.0},
    **{"time_s": {"rollout": 1.0, "reward": 0.1, "update": 0.5}, "tokens_per_s": 100.0, "transitions_per_rollout": 1.0},
    **{"prompt_tokens": 60.0, "response_tokens": 20.0, "nodes": {"write_query": 8}},
    **{
        "algorithm": {"weight_change": 0.1, "loss": 0.2, "grad_norm": 0.3},
        "calls": {},
        "call_tokens": {},
        "digests": {},
    },
}
"""A line of metrics as a run writes it."""

EMPTY: Mapping[str, Any] = {
    **{"reward": None, "reward_std": None, "accuracy": None, "zero_variance_groups": None},
    **{"prompt_tokens": None, "response_tokens": None, "nodes": {}, "algorithm": {}},
}
"""What differs in the line of a step in which every rollout failed, by an algorithm that reports no figures."""


@attrs.define(kw_only=True, eq=False, slots=False)
class ObserverSubject(Subject):
    """An observer, and the events that it gets.

    Attributes:
        rollout_s: Longest time that it may take for a rollout, on average, seconds.
        other_s: Longest time for any other event.
    """

    rollout_s: float = 0.05
    other_s: float = 5.0

    def play(self, events: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, list[float]]:
        """Notify a new observer of events; return the seconds of each call by hook.

        Raises:
            CheckFailed: It raised.
        """
        observer = self.build()
        seconds: dict[str, list[float]] = {}
        hooks = hooks_of(observer)
        for hook, arguments in events:
            if hook not in hooks:
                continue
            start = time.perf_counter()
            try:
                getattr(observer, hook)(*(frozen(value) for value in arguments.values()))
            except (Exception, SystemExit) as error:
                raise CheckFailed(f"{hook} raised {type(error).__name__}: {error}{place_of(error)}") from error
            seconds.setdefault(hook, []).append(time.perf_counter() - start)
        return seconds

    def start(self, first: int = 1) -> tuple[str, dict[str, Any]]:
        """Return the first event of a run."""
        config = {"run": {"name": "kit"}, "algorithm": {"use": "grpo", "steps": STEPS}}
        event = RunStart(directory=self.folder, config=config, steps=STEPS if first == 1 else None, first_step=first)
        return "on_run_start", {"event": event}

    def whole(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a run that ends well."""
        yield self.start()
        for step in range(1, STEPS + 1):
            for i in range(ROLLOUTS):
                rollout = rollout_of(i, right=i % 2 == 0, mode="train", step=step)
                yield "on_rollout_end", {"rollout": rollout}
            yield "on_step_end", {"event": StepEnd(step=step, metrics={**LINE, "step": step})}
        summary = {"accuracy": {"before": 0.25, "after": 0.5, "n": 8}, "steps": STEPS, "wall_s": 4.0, "rollouts": 16}
        yield "on_run_end", {"event": RunEnd(directory=self.folder, summary={**summary, "failures": {}})}

    def failing(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a resumed run whose rollouts all fail, and that ends by an error."""
        yield self.start(first=3)
        for i in range(2):
            yield "on_rollout_end", {"rollout": rollout_of(i, right=False, mode="train", step=3, failure="deadline")}
        yield "on_step_end", {"event": StepEnd(step=3, metrics={**LINE, **EMPTY, "step": 3})}
        yield "on_run_error", {"event": RunError(directory=self.folder, error=KeyboardInterrupt("ended early"))}


def check_hooks(subject: ObserverSubject) -> None:
    """Its methods are hooks that a run can call.

    Why: A misspelled hook is never called, and nobody notices.
    Cure: Name the methods as the hooks of agentrig.plugins.hookspecs: one argument each, and not async.
    """
    component = subject.component
    if component is None:
        raise CheckSkipped("it was given already built; a run takes observers from their spec")
    watchers([(component, subject.config)])


@needs(check_hooks)
def check_whole_run(subject: ObserverSubject) -> None:
    """It gets the events of a run that ends well, and raises nothing.

    Why: What raises is logged and counted in the report, and its figures are missing.
    Cure: Read fields with `.get`, and catch what your tracker or file raises.
    """
    subject.play(subject.whole())


@needs(check_whole_run)
def check_failing_run(subject: ObserverSubject) -> None:
    """It gets the events of a resumed run in which everything fails, and raises nothing.

    Why: The runs that fail are those that somebody will look at.
    Cure: Expect None where a step has no figure, failures without a score, a resumed run, and a run that ends early.
    """
    subject.play(subject.failing())


@needs(check_whole_run)
def check_fast(subject: ObserverSubject) -> None:
    """It does not hold a run up.

    Why: A run waits for its observers: a second for each rollout doubles the time of a step.
    Cure: Collect in on_rollout_end, and write or send in on_step_end, or in a thread of your own.
    """
    for hook, seconds in subject.play(subject.whole()).items():
        took, most = sum(seconds) / len(seconds), subject.rollout_s if hook == "on_rollout_end" else subject.other_s
        if took > most:
            raise CheckFailed(f"{hook} takes {took:.2f} s on average; {most:g} s are allowed")


@needs(check_whole_run)
def check_leaves_the_run(subject: ObserverSubject) -> None:
    """It does not change the run's own files.

    Why: A resume, the report and `agentrig audit` read these files.
    Cure: Write files of your own beside them; never change those of the run.
    """
    files = {subject.folder / name: f"{name} of the run\n" for name in FILES}
    for file, text in files.items():
        file.write_text(text)
    subject.play(subject.whole())
    changed = [file.name for file, text in files.items() if not file.is_file() or file.read_text() != text]
    if changed:
        raise CheckFailed(f"it changes {', '.join(changed)} of the run directory")
