"""The auditor: each link of a recorded step, in the order of the data."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit import distribution as sampled
from agentrig.audit import scores, tasks, text, update
from agentrig.audit.model import Precision, Weights, place, random_state_kept, size
from agentrig.audit.record import Record, Sources, read_lines, readable
from agentrig.audit.sketch import Sketch
from agentrig.audit.verdicts import UNSEEN, CannotLook, Verdict, fault, ok
from agentrig.errors import RunFileError, exhausted

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Auditor:
    """Reads a run's record, step by step; it keeps what the next step's audit needs.

    Args:
        path: The run directory.
        sources: Task set and reward, built afresh.
    """

    def __init__(self, path: Path, sources: Sources) -> None:
        self._path, self._sources = path, sources
        self._evidence = sampled.Evidence()
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}  # trained tensors by version
        self._lines = read_lines(path)

    def audit(
        self, step: int, sketch: Sketch | None = None, line: Mapping[str, Any] | None = None, budget_s: float = math.inf
    ) -> Audited:
        """Look at each link of a step.

        Args:
            step: The step.
            sketch: What the learner left of it, with the weights before; None for what is in the run directory.
            line: The step's line of metrics, if it is not in the file yet.
            budget_s: What the gradient may take; log-probabilities take a quarter of it.
        """
        start, record = time.perf_counter(), self._record(line)
        sketch = sketch or Sketch.read(self._path, step)
        if sketch is not None and sketch.before:
            self._kept = {v: kept for v, kept in self._kept.items() if v >= step - 2} | {step - 1: sketch.before}
        looks: dict[str, Callable[[], Iterator[Verdict]]] = {
            "tasks": lambda: tasks.tasks(record, step, self._sources),
            "text": lambda: text.text(record, step),
            "distribution": lambda: self._distribution(record, step, budget_s / 4),
            "score": lambda: scores.score(record, step, self._sources),
            "advantages": lambda: scores.advantages(record, step),
            "gradient": lambda: self._gradient(record, step, sketch, budget_s),
            "weights": lambda: self._update(record, step, sketch),
            "delivery": lambda: _delivery(record, step),
            "held-out": lambda: tasks.held_out(record, step, self._sources),
        }
        with random_state_kept():
            found = [verdict for link, look in looks.items() for verdict in _tried(link, look)]
        faults = {verdict.link for verdict in found if verdict.result == "fault"}
        kept = [v for v in found if v.result == "fault" or v.link not in faults]
        return Audited(step=step, verdicts=kept, seconds=time.perf_counter() - start)

    def quick(self, step: int, line: Mapping[str, Any]) -> Audited:
        """Look at what costs next to nothing, in a step that is not audited: advantages and learning rate."""
        record = self._record(line)
        found = [
            *_tried("advantages", lambda: scores.advantages(record, step)),
            *_tried("weights", lambda: update.schedule(record, step, made=record.made(step))),
        ]
        return Audited(step=step, verdicts=[v for v in found if v.result == "fault"], seconds=0.0)

    def last(self, step: int, stated: Mapping[str, Any]) -> Audited:
        """Look at the accuracies that a run states at its end.

        Args:
            step: Its last step.
            stated: The entry `accuracy` of its summary.
        """
        found = _tried("held-out", lambda: tasks.held_out(self._record(), step, self._sources, stated))
        return Audited(step=step, verdicts=[v for v in found if v.result == "fault"], seconds=0.0)

    def _record(self, line: Mapping[str, Any] | None = None) -> Record:
        """Return the run's record; `line` is a step's line of metrics that its file may not have yet."""
        if line is not None:
            self._lines[line["step"]] = line
        return Record(self._path, self._lines)

    def _weights(self, record: Record, version: int) -> Weights | None:
        """Return the weights of a version: kept from an audited step, of a checkpoint, or the starting model."""
        settings, start = record.settings, record.model
        scaling = settings.get("lora_alpha", 1) / max(settings.get("lora_rank", 0), 1)
        if version in self._kept:
            return Weights(directory=start, trained=self._kept[version], scaling=scaling)
        checkpoint = record.checkpoint(version)
        state = checkpoint / "trainer" / "learner.pt" if checkpoint else None
        if state is not None and state.is_file():
            import torch

            with readable(state):
                trained = torch.load(state, weights_only=True, map_location="cpu")["trained"]
            return Weights(directory=start, trained=trained, scaling=scaling)
        if checkpoint is not None:
            return Weights(directory=checkpoint, trained={})
        return Weights(directory=start, trained={}) if version == 0 else None

    def _distribution(self, record: Record, step: int, budget_s: float) -> Iterator[Verdict]:
        version = step - 1 - int(record.lines[step].get("max_staleness") or 0)
        weights = self._weights(record, version)
        if weights is None:
            raise CannotLook(f"the weights of version {version} were not kept")
        device = place(size(weights.directory), 8)
        model, other = (weights.load(precision) for precision in _precisions(record, step, device, merged=True))
        yield from sampled.distribution(record, step, model, other, version, self._evidence, budget_s=budget_s)

    def _gradient(self, record: Record, step: int, sketch: Sketch | None, budget_s: float) -> Iterator[Verdict]:
        import torch

        sketch = _left(record, step, sketch)
        if not sketch.updates:
            yield ok("gradient", "the step made no update")
            return
        weights, kl = self._weights(record, step - 1), record.settings["kl_loss_coef"]
        names = set(sketch.updates[0]["tensors"])
        if weights is not None and not weights.trained and not record.settings["lora_rank"]:
            own = weights.load(Precision(torch.float32)).named_parameters()
            weights = attrs.evolve(weights, trained={name: p.detach() for name, p in own if name in names})
        if weights is None or set(weights.trained) != names:
            raise CannotLook(f"the weights before step {step} were not kept")
        precisions = _precisions(record, step, place(size(weights.directory), 48 if kl else 36))
        reference = Weights(directory=record.model, trained={}) if kl else None
        advantages = scores.expected(record, step)
        yield from update.gradient(record, step, sketch, weights, reference, precisions, advantages, budget_s=budget_s)

    def _update(self, record: Record, step: int, sketch: Sketch | None) -> Iterator[Verdict]:
        sketch, before = _left(record, step, sketch), Sketch.read(self._path, step - 1)
        yield from update.weights(record, step, sketch, before, made=record.made(step))


def _left(record: Record, step: int, sketch: Sketch | None) -> Sketch:
    """Return a step's sketch, if the formulas of its update are known."""
    record.made(step)
    if sketch is None:
        raise CannotLook("the learner left no sketch of this step")
    return sketch


def _tried(link: str, look: Callable[[], Iterator[Verdict]]) -> Iterator[Verdict]:
    """Yield the verdicts on a link. An error here is a fault of the auditor: the link is named, and the run goes on."""
    try:
        yield from look()
    except RunFileError as damaged:
        yield fault(link, str(damaged), causes="a file of the run that was cut short or changed since")
    except CannotLook as why:
        yield Verdict(link=link, result=UNSEEN, detail=str(why))
    except Exception as error:
        lacks = exhausted(error)
        log.warning("the auditor can't look at the link %s: %s", link, lacks or error, exc_info=not lacks)
        yield Verdict(link=link, result=UNSEEN, detail=lacks or f"{type(error).__name__}: {error}")


def _precisions(record: Record, step: int, device: str, *, merged: bool = False) -> tuple[Precision, Precision]:
    """Return how a step is computed with, and how a part of it is once more, to measure what rounding does.

    Learner and server compute in fp32, in bf16 (weights rounded to it), or, a learner of adapters that are not merged
    into the model, in fp32 under bf16 autocast. The first is fp32 in any case, the second is fp64, or what they do.
    """
    import torch

    first = Precision(torch.float32, device=device)
    if record.dtype(step) != "bfloat16":
        return first, attrs.evolve(first, dtype=torch.float64)
    if record.settings.get("lora_rank") and not merged:
        return first, attrs.evolve(first, cast=True)
    return attrs.evolve(first, rounded=torch.bfloat16), attrs.evolve(first, dtype=torch.bfloat16)


def _delivery(record: Record, step: int) -> Iterator[Verdict]:
    """Count the proof of delivery, which the run makes after each transfer and stops at (docs/proofs.md)."""
    told = record.lines.get(step, {}).get("delivery") or {}
    if not told.get("arrived"):
        raise CannotLook("no proof of delivery was made in this step")
    bound, tensors = told.get("bound") or 0.0, told.get("tensors") or 0
    gap = told.get("difference") or 0.0
    if not gap <= bound < math.inf:
        detail = f"the server's answer differs from the learner's by {gap}, and the bound is {bound}"
        yield fault("delivery", detail, causes="weights with NaN or infinity, a line of metrics.jsonl that was changed")
    ratio = gap / bound if bound else 0.0
    yield ok("delivery", f"version {told.get('version')}, {tensors} tensors equal bit for bit", ratio=ratio)


@attrs.frozen(kw_only=True)
class Audited:
    """An audited step.

    Attributes:
        step: The step.
        verdicts: Of each link.
        seconds: How long it took.
    """

    step: int
    verdicts: Sequence[Verdict]
    seconds: float

    @property
    def faults(self) -> list[Verdict]:
        """The links that do not hold."""
        return [verdict for verdict in self.verdicts if verdict.result == "fault"]

    @property
    def looked(self) -> set[str]:
        """The links that could be looked at."""
        return {verdict.link for verdict in self.verdicts if verdict.result != UNSEEN}

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return attrs.asdict(self)

    def words(self, again: str) -> str:
        """Return the message of the faults: link, what was found, what may cause it, and the command `again`."""
        parts = [f"  {v.link}: {v.detail}.\n    Likely causes: {v.causes}" for v in self.faults]
        return "\n".join(
            [
                f"step {self.step}: the audit found what is not as the settings and the papers say:",
                *parts,
                *([f"  See it again: {again}"] if again else []),
            ]
        )
