"""A step that is audited: what each link reads."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit.model import Precision, Weights
from agentrig.audit.record import Call, Record, Row, Sources, readable
from agentrig.audit.sketch import Sketch
from agentrig.audit.verdicts import CannotLook
from agentrig.errors import RunFileError
from agentrig.text import read_text
from agentrig.traces import items, mapping

if TYPE_CHECKING:
    import torch


PIECE = 16 << 20
"""Bytes of a file that are digested at once, in the list of a checkpoint's files."""

OUTCOME = ("id", "task_id", "group", "value", "correct", "status", "answer", "details", "call_values")
"""The columns of a file of rollouts that are small."""

PLACED = ("rollout", "span", "node", "place", "reason", "advantage", "token_advantages", "teacher_logprobs")
"""The columns of a file of calls, without their tokens."""


def work_clock() -> Callable[[], float]:
    """Return a clock of the work of this thread, in seconds: on a busy machine no less is looked at than on a calm one.

    Beside a GPU it is the wall's: the thread may sleep while the GPU computes.
    """
    import torch

    return time.monotonic if torch.cuda.is_available() else time.thread_time


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """A step of a run, with what the audited steps before have left.

    Attributes:
        kept: Trained tensors that audited steps began with, by version.
        evidence: The logarithms of likelihood ratios over the audited steps, of each link by itself; is added to.
        stated: The entry `accuracy` of the run's summary; None before its end.
        budget_s: What the gradient may take, by `work_clock`; log-probabilities take half of it.
        wall_s: What the gradient may take by the clock on the wall, where other work keeps the machine busy.
        begun: When its audit began, by `time.monotonic`.
    """

    record: Record
    number: int
    sources: Sources
    sketch: Sketch | None = None
    kept: Mapping[int, Mapping[str, torch.Tensor]] = {}
    evidence: Mapping[str, MutableMapping[str, float]] = {}
    stated: Mapping[str, Any] | None = None
    budget_s: float = math.inf
    wall_s: float = math.inf
    begun: float = attrs.field(factory=time.monotonic)

    def under(self, record: Record) -> Step:
        """Return the step with the settings of a record (`Record.at`), and with the tasks and the reward of these."""
        under = self.sources.under
        return (
            self
            if record is self.record
            else attrs.evolve(self, record=record, sources=self.sources if under is None else under(record.config))
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """Section `[algorithm]` of the run."""
        return self.record.settings

    @property
    def line(self) -> Mapping[str, Any]:
        """The step's line of metrics."""
        return self.record.lines.get(self.number, {})

    @property
    def scaling(self) -> float:
        """What adapters are multiplied with: alpha over rank."""
        return float(self.settings.get("lora_alpha", 1) / max(self.settings.get("lora_rank", 0), 1))

    @property
    def figures(self) -> Mapping[str, Any]:
        """The algorithm's figures in that line."""
        return self.told("algorithm")

    def told(self, key: str) -> Mapping[str, Any]:
        """Return an object of that line; an empty one if it has none."""
        found = self.line.get(key, {})
        if not isinstance(found, dict):
            file = self.record.path / "metrics.jsonl"
            raise RunFileError(f"{file} is damaged: in the line of step {self.number}, {key} is {found!r:.80}")
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """The rollouts that the step trained on."""
        return self.record.rows("train", self.number)

    @cached_property
    def calls(self) -> dict[tuple[str, str], Call]:
        """Their calls, by rollout and span."""
        return {(call.rollout, call.span): call for row in self.rows for call in row.calls}

    @cached_property
    def outcomes(self) -> list[dict[str, Any]]:
        """The rollouts that the step trained on, by the columns `OUTCOME`."""
        return self.record.table("rollouts", "train", self.number, *OUTCOME)

    @cached_property
    def placed(self) -> list[dict[str, Any]]:
        """Where their calls went, by the columns `PLACED`.

        `worth` is the advantage of a call, or a list with that of each of its tokens; None if it has none.
        """
        rows = self.record.table("calls", "train", self.number, *PLACED)
        for row in rows:
            tokens = row["token_advantages"]
            row["worth"] = row["advantage"] if tokens is None else json.loads(tokens)
        return rows

    @cached_property
    def trained(self) -> dict[tuple[str, str], float | Sequence[float]]:
        """The advantage of each call that the algorithm took, or of each of its tokens, by rollout and span."""
        return {(row["rollout"], row["span"]): row["worth"] for row in self.placed if row["worth"] is not None}

    @cached_property
    def made(self) -> int:
        """How many updates the run had made before."""
        if not self.record.knows_update:
            raise CannotLook(f"the formulas of {self.settings['use']} are not known here")
        lines = self.record.lines
        if any(earlier not in lines for earlier in range(1, self.number)):
            raise CannotLook("the metrics of an earlier step are missing, so the number of updates is not known")
        made = 0
        for at in range(1, self.number):
            figures = lines[at].get("algorithm")
            updates = figures.get("updates", 0) if isinstance(figures, dict) else None
            if not isinstance(updates, int | float) or not math.isfinite(updates):
                raise CannotLook(
                    f"metrics.jsonl: the line of step {at} is damaged, so the number of updates is not known"
                )
            made += int(updates)
        return made

    @property
    def updates(self) -> Sketch:
        """The sketch, of an algorithm whose formulas are known (else, and without one, CannotLook is raised)."""
        sketch = self.sketch or Sketch.read(self.record.path, self.number)
        if self.made >= 0 and sketch is not None:
            return sketch
        raise CannotLook("the learner left no sketch of this step")

    def folder(self, at: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.record.path / "checkpoints" / f"step-{at:05d}"

    def weights_of(self, at: int) -> int | None:
        """Return the step that made the weights in a step's checkpoint; None if the loop saved none."""
        file = self.folder(at) / "trainer" / "state.json"
        if not file.is_file():
            return None
        with readable(file):
            return int(json.loads(file.read_text("utf-8"))["weights_of"])

    def learner(self, at: int) -> Mapping[str, torch.Tensor]:
        """Return the trained tensors in a step's checkpoint."""
        import torch

        name, checkpoint = "trainer/learner.pt", self.folder(at)
        file, listed = checkpoint / name, checkpoint / ".files.json"
        with readable(file):
            try:
                found: Mapping[str, torch.Tensor]
                found = torch.load(file, weights_only=True, map_location="cpu", mmap=True)["trained"]
            except OSError:
                raise
            except Exception:  # torch's words advise to load it without a check
                saved = items(mapping(json.loads(read_text(listed))).get(name)) if listed.is_file() else ()
                were = f"; {saved[0]} were saved" if saved else ""
                raise ValueError(f"it is not what the run saved ({file.stat().st_size} bytes{were})") from None
        return found

    @cached_property
    def changed(self) -> Sequence[str]:
        """The files of its checkpoint, and of the one before, whose digest is another than that which the run listed.

        They are read once a link does not hold.
        """
        found = []
        for at in (self.number, self.number - 1):
            listed = self.folder(at) / ".files.json"
            if not listed.is_file():
                continue
            with readable(listed):
                files = mapping(json.loads(read_text(listed)))
            for name, (_, digest) in files.items():
                if not (file := listed.parent / name).is_file() or _digest(file) != digest:
                    found.append(str(file))
        return found

    def weights(self, version: int) -> Weights:
        """Return the weights of a version: kept from an audited step, of a checkpoint, or the starting model."""
        start, checkpoint = self.record.model, self.folder(version)
        trained, state = self.kept.get(version), checkpoint / "trainer" / "learner.pt"
        if trained is None and state.is_file():
            trained = self.learner(version)
        if trained is not None:
            return Weights(directory=start, trained=trained, scaling=self.scaling)
        if (checkpoint / "config.json").is_file():
            return Weights(directory=checkpoint, trained={})
        if version != 0:
            raise CannotLook(f"the weights of version {version} were not kept")
        return Weights(directory=start, trained={})

    def precisions(self, device: str, *, merged: bool) -> tuple[Precision, Precision]:
        """Return how the step is computed with, and how a part of it is once more, to measure what rounding does.

        Learner and server compute in fp32, in bf16 (weights rounded to it), or, a learner of adapters that are not
        merged into the model, in fp32 under bf16 autocast. A server of adapters that are not merged rounds no sum of
        weights. The first is fp32 in any case, the second is fp64, or what they do: bf16, the coarser one, if the run
        does not say.
        """
        import torch

        first = Precision(torch.float32, device=device)
        if self.told("digests").get("dtype", "bfloat16") != "bfloat16":
            return first, attrs.evolve(first, dtype=torch.float64)
        if self.settings.get("lora_rank") and not merged:
            return first, attrs.evolve(first, cast=True)
        if not self.told("digests").get("merged", True):
            return first, attrs.evolve(first, dtype=torch.bfloat16)
        return attrs.evolve(first, rounded=torch.bfloat16), attrs.evolve(first, dtype=torch.bfloat16)


def _digest(file: Path) -> str:
    """Return a file's digest as lists of checkpoints have it: BLAKE2b of the digests of its pieces."""
    pieces = []
    with file.open("rb") as data:
        while piece := data.read(PIECE):
            pieces.append(hashlib.blake2b(piece, digest_size=16).digest())
    return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()
