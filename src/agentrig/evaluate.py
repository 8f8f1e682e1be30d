"""Measuring without learning: `agentrig eval` and `agentrig dev`."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from agentrig.agents import Endpoint, without_proxy
from agentrig.algorithms import Algorithm, Mode, Rollout
from agentrig.checks import count_failures, warn_of_sampling
from agentrig.config import Plan
from agentrig.ends import Interrupted, handling, name_of
from agentrig.errors import AgentrigError, ConfigError, nearest
from agentrig.report.figures import wilson
from agentrig.run import first_runner, make_engine, make_scorer, ready_hardware
from agentrig.scratch import temporary_files
from agentrig.splits import load_split, split_of, task_set
from agentrig.tasks import Task

CHUNK = 256
"""Rollouts that are under way at once; bounds memory, not speed."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        accuracy: Share of the judged rollouts that are correct (docs/rewards.md); None when none could be judged.
        ci95: Its Wilson interval.
        reward: Mean reward of the judged rollouts; None when none could be judged.
        n: Judged rollouts; failures are not among them.
        failures: Kind to count.
        wall_s: Seconds from the first rollout to the last.
        rollouts_per_s: All rollouts over `wall_s`.
        databases: Per database (or other `db_id` of the input): right and judged.
        rollouts: All of them, when asked for.
    """

    accuracy: float | None
    ci95: tuple[float, float] | None
    reward: float | None
    n: int
    failures: Mapping[str, int]
    wall_s: float
    rollouts_per_s: float
    databases: Mapping[str, tuple[int, int]]
    rollouts: Sequence[Rollout] = attrs.field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return what `agentrig eval --json` prints."""
        return {
            "accuracy": self.accuracy,
            "ci95": list(self.ci95) if self.ci95 else None,
            "reward": self.reward,
            "n": self.n,
            "failures": dict(self.failures),
            "wall_s": self.wall_s,
            "rollouts_per_s": self.rollouts_per_s,
        }


def environment_endpoint(
    url: str | None = None, *, model: str | None = None, api_key: str | None = None
) -> Endpoint | None:
    """Return the endpoint that was given, or that the environment names, or None.

    Reads `OPENAI_BASE_URL` (or `OPENAI_API_BASE`) and `OPENAI_API_KEY`. The model is the server's first when
    none is given.

    Raises:
        AgentrigError: The server does not answer, or does not know the model.
    """
    url = url or os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    if not url:
        return None
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    url = url.rstrip("/")
    models = _models(url, key)
    if model is None:
        if not models:
            raise AgentrigError(f"{url} lists no models; name one by --model")
        model = models[0]
    elif models and model not in models:
        hint = nearest(model, models)
        raise AgentrigError(f'{url} has no model "{model}".{hint} It lists: {", ".join(models[:20])}')
    return Endpoint(base_url=url, model=model, api_key=key, sampling={"temperature": 0.0})


def _models(url: str, key: str) -> list[str]:
    without_proxy(url)
    try:
        request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=15) as reply:
            data = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []  # not every server lists its models
        raise AgentrigError(
            f"{url}/models answers {error.code} {error.reason}: check the address and the key"
        ) from None
    except (OSError, ValueError) as error:
        raise AgentrigError(
            f"{url} does not answer: {error}. Is the server up, and does its address end in /v1?"
        ) from None
    return [str(m["id"]) for m in data.get("data", [])]


def evaluate(
    plan: Plan,
    *,
    tasks: Sequence[Task],
    endpoint: Endpoint | None = None,
    checkpoint: Path | None = None,
    mode: Mode = "report",
    temperature: float | None = None,
    keep: bool = False,
    each: Callable[[Rollout], None] = lambda rollout: None,
) -> Evaluation:
    """Run the agent once on each task and score it; nothing is learned.

    Args:
        tasks: What to run.
        endpoint: A model server; None for the plan's algorithm, serving `checkpoint`.
        checkpoint: A Hugging Face directory; None for the algorithm's starting model.
        temperature: Sampling temperature; 0 is greedy, None the endpoint's own.
        keep: Keep the rollouts in the result.
        each: Called with every rollout as it ends.
    """
    hardware = None if endpoint is not None else ready_hardware(plan)
    scorer = make_scorer(plan)
    adapter = plan.build("adapter")
    figures = _Figures()
    with temporary_files(), first_runner(plan) as pool:  # before the model's server starts
        engine, runtime = make_engine(plan, scorer=scorer, adapter=adapter, pool=pool)
        serving: AbstractContextManager[Endpoint]
        if endpoint is not None:
            serving = nullcontext(endpoint)
        else:
            algorithm: Algorithm = plan.build("algorithm")
            assert hardware is not None
            serving = algorithm.serve(hardware=hardware, checkpoint=checkpoint)

        def body() -> None:
            with serving as served:
                sampled = served if temperature is None else served.with_sampling(temperature=temperature)
                figures.start = time.perf_counter()
                for i in range(0, len(tasks), CHUNK):
                    rollouts = engine.run(tasks[i : i + CHUNK], n=1, endpoint=sampled, step=0, mode=mode)
                    if i == 0:
                        warn_of_sampling(rollouts, sampled.sampling, mode=mode)
                    for rollout in rollouts:
                        each(rollout)
                        figures.add(rollout, keep=keep)
                figures.end = time.perf_counter()

        def end(number: int, frame: Any) -> None:
            runtime.abort(Interrupted(number, f"interrupted by {name_of(number)}"))

        with handling(end):
            runtime.run(body)
    return figures.result()


class _Figures:
    """Adds rollouts up."""

    def __init__(self) -> None:
        self.start = self.end = 0.0
        self.total = 0
        self.failures: dict[str, int] = defaultdict(int)
        self.databases: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.rewards: list[float] = []
        self.kept: list[Rollout] = []

    def add(self, rollout: Rollout, *, keep: bool) -> None:
        self.total += 1
        if keep:
            self.kept.append(rollout)
        for kind, count in count_failures([rollout]).items():
            self.failures[kind] += count
        if rollout.value is not None:
            row = self.databases[str(rollout.task.input.get("db_id", ""))]
            row[0] += bool(rollout.correct)
            row[1] += 1
            self.rewards.append(rollout.value)

    def result(self) -> Evaluation:
        right = sum(r for r, _ in self.databases.values())
        n = sum(n for _, n in self.databases.values())
        wall = self.end - self.start
        return Evaluation(
            accuracy=right / n if n else None,
            ci95=wilson(right, n) if n else None,
            reward=math.fsum(self.rewards) / n if n else None,
            n=n,
            failures=dict(self.failures),
            wall_s=wall,
            rollouts_per_s=self.total / wall if wall else 0.0,
            databases={name: (r, n) for name, (r, n) in sorted(self.databases.items())},
            rollouts=tuple(self.kept),
        )


def eval_tasks(plan: Plan, split: str | None, limit: int = 0, *, role: str = "report") -> tuple[str, Sequence[Task]]:
    """Return a split's name and tasks; of the role's split by default.

    Raises:
        ConfigError: There is no such split, or it has no tasks.
        PluginError: A row is no sound `Task`.
    """
    tasks = task_set(plan)
    name = split or split_of(plan, tasks, role)
    if not name:
        raise ConfigError(f"no split serves {role}; name one: --split NAME, one of {', '.join(tasks.splits)}")
    rows = load_split(plan, tasks, name)
    if not rows:
        raise ConfigError(f'split "{name}" has no tasks; name another: --split NAME, one of {", ".join(tasks.splits)}')
    return name, rows[:limit] if limit else rows


def prediction(rollout: Rollout) -> dict[str, Any]:
    """Return the line of `--save`: what was answered and how it was judged."""
    return {
        "task_id": rollout.task.id,
        "db_id": rollout.task.input.get("db_id"),
        "question": rollout.task.input.get("question"),
        "answer": rollout.outcome.answer,
        "value": rollout.value,
        "correct": rollout.correct,
        "failure": rollout.failure,
        "message": rollout.outcome.message or None,
        "details": dict(rollout.score.details) if rollout.score else {},
    }
