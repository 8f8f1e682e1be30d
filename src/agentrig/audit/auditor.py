"""The auditor: each link of a recorded step, in the order of the data."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit import draws, scores, tasks, update
from agentrig.audit.distribution import distribution
from agentrig.audit.record import Record, Sources
from agentrig.audit.sketch import Sketch
from agentrig.audit.step import Step
from agentrig.audit.text import text
from agentrig.audit.verdicts import NO_WEIGHTS, OF_WEIGHTS, UNSEEN, Audited, CannotLook, Verdict, fault, ok
from agentrig.device_memory import out_of_device_memory, shortage
from agentrig.errors import RunFileError, exhausted

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

WITHOUT = "The run goes on without it; run.audit=false leaves out all audits"
"""What is said where a link's model does not fit beside the run."""


class Auditor:
    """Reads a run's record, step by step; it keeps what the next step's audit needs.

    Args:
        sources: Task set and reward, built afresh.
    """

    def __init__(self, path: Path, sources: Sources) -> None:
        self.record, self._sources = Record(path), sources
        self._evidence: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}

    def audit(
        self,
        step: int,
        *,
        sketch: Sketch | None = None,
        line: Mapping[str, Any] | None = None,
        links: Mapping[str, Callable[[Step], Iterator[Verdict]]] | None = None,
        begun: Callable[[str], None] = lambda link: None,
        **more: Any,
    ) -> Audited:
        """Look at links of a step.

        Args:
            sketch: What the learner left of it, with the weights before; None for what is in the run directory.
            line: The step's line of metrics, if it is not in the file yet.
            links: Which links; None for all.
            begun: Called with each link before it is looked at.
            more: What it may take, and what the run states at its end: `budget_s`, `wall_s`, `stated` of `Step`.
        """
        start = time.perf_counter()
        if line is not None:
            self.record.lines[step] = line
        with contextlib.suppress(CannotLook):  # the links that need it say why
            sketch = sketch or Sketch.read(self.record.path, step)
        if sketch is not None and sketch.kept:
            self._kept = {v: kept for v, kept in self._kept.items() if v >= step - 2} | {step - 1: sketch.kept[0]}
        looked_at = Step(
            record=self.record,
            number=step,
            sources=self._sources,
            sketch=sketch,
            kept=self._kept,
            evidence=self._evidence,
            **more,
        ).under(self.record.at(step))
        found: list[Verdict] = []
        with contextlib.ExitStack() as stack:
            if self._sources.weights:
                import torch

                # the run goes on after an audit as it would have without
                stack.enter_context(torch.random.fork_rng(devices=()))
            for link, look in (LOOKS if links is None else links).items():
                if link in OF_WEIGHTS and not self._sources.weights:
                    found.append(Verdict(result=UNSEEN, detail=NO_WEIGHTS, link=link))
                    continue
                begun(link)
                verdicts = [attrs.evolve(verdict, link=link) for verdict in _tried(link, look(looked_at))]
                wrong = [each for each in verdicts if each.result == "fault"]
                if wrong and link in OF_WEIGHTS:
                    wrong = _of_changed_files(wrong, looked_at)
                if wrong and looked_at.sources is self._sources:  # the manifest has the data of these settings only
                    changed = tasks.changed_since(looked_at, tasks.OF_TASKS.get(link, ()))
                    wrong = [attrs.evolve(each, link=link) for each in changed] or wrong
                found += wrong or verdicts
        return Audited(step=step, verdicts=found, seconds=time.perf_counter() - start)


def _of_changed_files(wrong: list[Verdict], step: Step) -> list[Verdict]:
    """Return the faults, caused by the checkpoint's files that were changed since the run wrote them, if any were."""
    try:
        changed = step.changed
    except RunFileError as damaged:
        changed = [str(damaged)]
    if not changed:
        return wrong
    cause = f"{', '.join(changed)}: changed since the run wrote it. Restore it from a copy"
    return [attrs.evolve(each, causes=cause, damaged=True) for each in wrong]


def _tried(link: str, verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts on a link. An error here is a fault of the auditor: the link is named, and the run goes on."""
    try:
        yield from verdicts
    except RunFileError as damaged:
        yield fault(str(damaged), "a file of the run that was cut short or changed since", damaged=True)
    except CannotLook as why:
        yield Verdict(result=UNSEEN, detail=str(why))
    except Exception as error:
        if text := out_of_device_memory(error):
            lacks = f"the device ran out of memory: {shortage(text)}. {WITHOUT}"
        else:
            lacks = exhausted(error)
        log.warning("the auditor can't look at the link %s: %s", link, lacks or error, exc_info=not lacks)
        yield Verdict(result=UNSEEN, detail=lacks or f"{type(error).__name__}: {error}")


def delivery(step: Step) -> Iterator[Verdict]:
    """Count the proof of delivery, which the run makes after each transfer and stops at (docs/proofs.md)."""
    told = step.line.get("delivery") or {}
    if not told.get("arrived"):
        raise CannotLook("no proof of delivery was made in this step")
    bound, gap = told.get("bound") or 0.0, told.get("difference") or 0.0
    if not gap <= bound < math.inf:
        detail = f"the server's answer differs from the learner's by {gap}, and the bound is {bound}"
        yield fault(detail, "weights with NaN or infinity, a line of metrics.jsonl that was changed")
    detail = f"version {told.get('version')}, {told.get('tensors') or 0} tensors equal bit for bit"
    yield ok(detail, gap / bound if bound else 0.0)


LOOKS: Mapping[str, Callable[[Step], Iterator[Verdict]]] = {
    "tasks": tasks.tasks,
    "text": text,
    "distribution": distribution,
    "score": scores.score,
    "advantages": scores.advantages,
    "gradient": update.gradient,
    "weights": update.weights,
    "delivery": delivery,
    "held-out": tasks.held_out,
}
"""All links."""

QUICK = {"tasks": draws.drawn, "advantages": scores.advantages, "weights": update.weights}
"""What costs next to nothing, for steps that are not audited."""

LAST = {"held-out": tasks.held_out, "weights": update.saved}
"""What the end of a run adds."""

OWED = {"gradient": update.gradient}
"""What it adds if no step had the time for it."""
