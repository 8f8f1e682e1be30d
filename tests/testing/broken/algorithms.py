"""Algorithms with one fault each: the one called X is caught by the check `algorithm.X` and by no other.

The policy is a table of eight answers. REINFORCE trains it, and a server in a thread answers with it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from agentrig import AlgorithmSpec, Endpoint, hookimpl, setting
from agentrig.errors import ConfigError
from agentrig.testing.scripted import ScriptedServer, serving

ARMS = ["a", "1", "2", "3", "4", "5", "6", "7"]
FAULTS = (
    *("keys-declared", "runs", "figures", "checkpoints", "moves", "moves-stated", "stops", "resumes", "keys-read"),
    *("names-no-model", "serves", "solves"),
)


@attrs.frozen(kw_only=True)
class Config:
    steps: int = setting(3, help="training steps", ge=1)
    tasks: int = setting(4, help="tasks of one step", ge=1)
    group: int = setting(4, help="rollouts of each task", ge=2)
    lr: float = setting(1.0, help="learning rate", gt=0)
    model: str = setting("", help="a folder that has to be there")


@attrs.frozen(kw_only=True)
class BareConfig(Config):
    """A key without help."""

    momentum: float = 0.0


@attrs.frozen(kw_only=True)
class IdleConfig(Config):
    """A key that nothing reads."""

    momentum: float = setting(0.0, help="nothing reads it")


class Table(ScriptedServer):
    """The policy, as a server: a token is an arm, and an answer is one token."""

    def __init__(self, weights: Any, stream: str) -> None:
        super().__init__(self.answer, model="table", key="k")
        self.weights, self.stream, self.lock = weights, random.Random(stream), threading.Lock()

    def logp(self, temperature: float) -> Any:
        scaled = self.weights / (temperature or 1.0)
        return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()

    def answer(self, body: Mapping[str, Any]) -> str:
        """Sample an arm, or take the likeliest at temperature 0."""
        logp = self.logp(body["temperature"])
        if body["temperature"] == 0:
            return ARMS[int(logp.argmax())]
        with self.lock:
            return self.stream.choices(ARMS, weights=np.exp(logp).tolist())[0]

    def logprob(self, token: int, position: int) -> float:
        """Return the log-probability of an arm at temperature 1, at which a run samples."""
        return float(self.logp(1.0)[ARMS.index(chr(token))])


class Broken:
    """REINFORCE with one fault."""

    def __init__(self, config: Any, fault: str) -> None:
        self.config, self.fault = config, fault
        self.seen = config.momentum if fault == "keys-declared" else None

    def run(self, session: Any) -> None:
        config, fault = self.config, self.fault
        if config.model and not Path(config.model).is_dir():
            if fault == "names-no-model":
                raise FileNotFoundError("config.json")
            raise ConfigError(f"model = {config.model}: there is no such directory")
        weights = np.zeros(len(ARMS))
        if session.checkpoint is not None:
            weights = read(session.checkpoint) + (1e-9 if fault == "resumes" else 0.0)
        table = Table(weights, "")
        with serving(table):
            endpoint = table.endpoint(temperature=1.0)
            session.plan_steps(config.steps)
            for step in range(session.first_step, config.steps + 1):
                if session.stopping and fault != "stops":
                    return
                if session.solved:
                    return
                if fault == "runs" and step == 2:
                    raise RuntimeError("the learner has no second batch")
                table.stream = random.Random(f"{session.seed}-{step}")
                rollouts = session.rollouts(
                    session.train_tasks[: config.tasks], n=config.group, endpoint=endpoint, step=step
                )
                change = self.update(table, rollouts, step)
                metrics = {"weight_change": change, "entropy": float("nan") if fault == "figures" else 1.0}
                session.end_step(step, metrics=metrics, time_s={"update": 0.001})
                session.save_checkpoint(step, lambda folder: self.write(table, folder))

    def update(self, table: Table, rollouts: Any, step: int) -> float:
        """Move the table along the gradient; return the change that is reported."""
        answers = [(t.response_ids[0], r.value) for r in rollouts if r.value is not None for t in r.triplets]
        scored = [(ARMS.index(chr(token)), value) for token, value in answers]
        mean = sum(value for _, value in scored) / len(scored)
        gradient = np.zeros(len(ARMS))
        for arm, value in scored:
            gradient += (value - mean) * (np.eye(len(ARMS))[arm] - np.exp(table.logp(1.0)))
        moved = self.config.lr * gradient + 1e-6 * np.eye(len(ARMS))[step % len(ARMS)]
        if self.fault == "moves":
            return 1.0
        table.weights = table.weights - moved if self.fault == "solves" else table.weights + moved
        change = float(np.sqrt((moved**2).sum()))
        return 10 * change if self.fault == "moves-stated" else change

    def write(self, table: Table, folder: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"arms": table.weights}, str(folder / "model.safetensors"))
        (folder / "config.json").write_text('{"arms": 8' if self.fault == "checkpoints" else '{"arms": 8}')

    @contextmanager
    def serve(self, *, hardware: Any, checkpoint: Path | None) -> Iterator[Endpoint]:
        weights = read(checkpoint) if checkpoint else np.zeros(len(ARMS))
        with serving(Table(weights, "serve")) as table:
            endpoint = table.endpoint(temperature=1.0)
            yield attrs.evolve(endpoint, base_url="http://127.0.0.1:9/v1") if self.fault == "serves" else endpoint


def read(checkpoint: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(str(checkpoint / "model.safetensors"))["arms"]


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    special = {"keys-declared": BareConfig, "keys-read": IdleConfig}
    for fault in ("", *FAULTS):
        yield AlgorithmSpec(
            name=fault or "fine",
            summary="Broken." if fault else "REINFORCE on a table.",
            config=special.get(fault, Config),
            build=lambda config, fault=fault: Broken(config, fault),
        )
