"""What the checks of an algorithm share: real runs of the kit's bandit with a tiny model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import AgentrigError
from agentrig.plan import Plan, resolve
from agentrig.run.checkpoints import Checkpoints
from agentrig.run.loop import looped
from agentrig.testing import bandit
from agentrig.testing.checks import CheckSkipped
from agentrig.testing.table import Bench, Table
from agentrig.testing.tiny_model import make_tiny_model
from agentrig.testing.watching import WatchedAlgorithm, watched


@attrs.frozen(kw_only=True)
class Run:
    """A run that has ended.

    Attributes:
        path: Its directory.
        error: What ended it; None if nothing did.
    """

    path: Path
    error: Exception | None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of its metrics."""
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary; empty if it has none."""
        file = self.path / "summary.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def checkpoint(self, step: int = 0) -> Path | None:
        """Return the checkpoint of a step, or the latest one."""
        checkpoints = Checkpoints(self.path / "checkpoints")
        if not step:
            return checkpoints.latest()[0]
        return checkpoints.path(step) if step in checkpoints.steps() else None


@attrs.define(kw_only=True, eq=False, slots=False)
class AlgorithmBench(Bench):
    """What the checks of an algorithm share.

    Attributes:
        steps: Training steps of a run, at least 2; set by the key `steps` if the algorithm has one.
        learns: Steps in which it should solve the bandit; 0 leaves that check out.
        model: A directory for the key `model`; None for a tiny random one.
        variants: More settings, one short run each: keys that matter only together with others are read there.
        source: A recipe or run file that the algorithm can train; the kit's bandit if it is empty.
        overrides: `section.key=value`, for each run.
    """

    steps: int = 3
    learns: int = 0
    model: Path | None = None
    variants: Sequence[Mapping[str, Any]] = ()
    source: str = bandit.NAME
    overrides: Sequence[str] = ()
    read: set[str] = attrs.field(factory=set, init=False)

    @cached_property
    def folder(self) -> Path:
        """A folder of this bench, which goes with it."""
        folder = Path(tempfile.mkdtemp(prefix="agentrig-kit-"))
        self._open.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @property
    def keys(self) -> list[str]:
        """The algorithm's keys."""
        return [f.name for f in attrs.fields(self.subject.spec.config)] if self.subject.spec else []

    @cached_property
    def start(self) -> Path | None:
        """The model that training starts from; None if the algorithm has no key `model`."""
        if "model" not in self.keys:
            return None
        return self.model or make_tiny_model(self.folder / "model")

    def plan(self, name: str, **more: Any) -> Plan:
        """Return the plan of a run.

        Args:
            name: Of its directory.
            more: Keys of the algorithm.

        Raises:
            CheckSkipped: The subject is no registered component.
        """
        component = self.subject.component
        if component is None or component.plugin == "given":
            raise CheckSkipped("give its name or FILE.py:NAME: a run finds its algorithm by its name")
        keys: dict[str, Any] = {"steps": self.steps} if "steps" in self.keys else {}
        keys |= {"model": str(self.start)} if self.start is not None else {}
        keys |= {**(self.subject.settings or {}), **more}
        files = [*([str(self.subject.file)] if self.subject.file else []), str(Path(bandit.__file__))]
        return resolve(
            self.source,
            uses={"algorithm": component.spec.name},
            overrides=[
                *(f"algorithm.{key}={json.dumps(value)}" for key, value in keys.items()),
                *(f"run.directory={json.dumps(str(self.folder / 'runs'))}", f"run.name={name}"),
                *self.overrides,
            ],
            files=files,
        )

    def run(self, plan: Plan, *, stop_after: int = 0, resume: Path | None = None) -> Run:
        """Train by a plan; an error is kept, not raised."""
        from agentrig.run.training import train

        component = plan.components["algorithm"]
        spec: Any = component.spec

        def build(config: Any) -> WatchedAlgorithm:
            return WatchedAlgorithm(looped(spec.build(watched(config, self.read))), stop_after)

        mine = attrs.evolve(component, spec=attrs.evolve(spec, build=build))
        components = {kind: mine if kind == "algorithm" else plan.components[kind] for kind in plan.components}
        error = None
        try:
            train(attrs.evolve(plan, components=components), resume=resume)
        except (Exception, SystemExit) as raised:
            error = raised if isinstance(raised, Exception) else AgentrigError(f"it calls sys.exit({raised.code!r})")
        return Run(path=resume or Path(plan.run.directory) / plan.run.name, error=error)

    @cached_property
    def whole(self) -> Run:
        """A run from start to end."""
        return self.run(self.plan("whole"))

    @cached_property
    def stopped(self) -> Run:
        """The same run, stopped by the user before its last step."""
        return self.run(self.plan("stopped"), stop_after=self.steps - 1)

    @cached_property
    def resumed(self) -> Run:
        """The stopped run, resumed to its end."""
        path = self.folder / "runs" / "resumed"
        shutil.copytree(self.stopped.path, path, symlinks=True)
        return self.run(resolve(str(path / "config.toml")), resume=path)


TABLE = Table("algorithm", AlgorithmBench)
