"""The auditor: each link of a recorded step, in the order of the data."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit import distribution as sampled
from agentrig.audit import scores, tasks, text, update
from agentrig.audit.model import Unknown, Weights, random_state_kept
from agentrig.audit.record import Record, Sources, readable
from agentrig.audit.sketch import LARGEST, Sketch
from agentrig.audit.verdicts import LINKS, UNSEEN, Verdict, fault, ok, unseen
from agentrig.errors import RunFileError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

WORK = 4e12
"""Floating-point operations of one link: about a minute on a few cores. A pass takes 2 a parameter and token, and with
gradients 6."""


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

    def audit(self, step: int, sketch: Sketch | None = None, line: Mapping[str, Any] | None = None) -> list[Verdict]:
        """Look at each link of a step.

        Args:
            step: The step.
            sketch: What the learner left of it, with the weights before; None for what is in the run directory.
            line: The step's line of metrics, if it is not in the file yet.

        Returns:
            The verdicts: one for each link that holds or can't be looked at, one or more for one that does not.
        """
        record = Record(self._path, [line] if line else [])
        sketch = sketch or Sketch.read(self._path, step)
        if sketch is not None and sketch.before:
            self._kept = {v: kept for v, kept in self._kept.items() if v >= step - 2} | {step - 1: sketch.before}
        with random_state_kept():
            found = list(self._links(record, step, sketch))
        faults = {verdict.link for verdict in found if verdict.result == "fault"}
        kept = [v for v in found if v.result == "fault" or v.link not in faults]
        return sorted(kept, key=lambda verdict: LINKS.index(verdict.link))

    def _links(self, record: Record, step: int, sketch: Sketch | None) -> Iterator[Verdict]:
        yield from _tried("tasks", lambda: tasks.tasks(record, step, self._sources))
        yield from _tried("text", lambda: self._text(record, step))
        yield from _tried("distribution", lambda: self._distribution(record, step))
        yield from _tried("score", lambda: scores.score(record, step, self._sources))
        yield from _tried("advantages", lambda: scores.advantages(record, step))
        yield from _tried("gradient", lambda: self._gradient(record, step, sketch))
        yield from _tried("weights", lambda: self._update(record, step, sketch))
        yield from _tried("delivery", lambda: _delivery(record, step))
        yield from _tried("held-out", lambda: tasks.held_out(record, step, self._sources))

    def _text(self, record: Record, step: int) -> Iterator[Verdict]:
        model = _start(record)
        tokenizer, ends = text.load_tokenizer(model)
        config = json.loads((model / "config.json").read_text("utf-8"))
        limits = record.settings.get("max_length"), config.get("max_position_embeddings")
        yield from text.text(record, step, tokenizer, ends, min(filter(None, limits), default=0))

    def _weights(self, record: Record, version: int) -> Weights | None:
        """Return the weights of a version: kept from an audited step, of a checkpoint, or the starting model."""
        settings, start = record.settings, _start(record)
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

    def _distribution(self, record: Record, step: int) -> Iterator[Verdict]:
        import torch

        version = step - 1 - int(record.lines[step].get("max_staleness") or 0)
        weights = self._weights(record, version)
        if weights is None:
            raise CannotLook(f"the weights of version {version} were not kept")
        room = int(WORK / (2 * 2 * _parameters(weights.directory)))
        half = record.dtype(step) == "bfloat16"
        exact = weights.load(torch.float32 if half else torch.float64, rounded=torch.bfloat16 if half else None)
        rough = weights.load(torch.bfloat16 if half else torch.float32)
        yield from sampled.distribution(record, step, exact, rough, version, self._evidence, room=room)

    def _gradient(self, record: Record, step: int, sketch: Sketch | None) -> Iterator[Verdict]:
        import torch

        sketch, made = _known(record, step, sketch)
        if not sketch.updates:
            yield ok("gradient", "the step made no update")
            return
        weights, settings = self._weights(record, step - 1), record.settings
        names = set(sketch.updates[0]["tensors"])
        if weights is not None and not weights.trained and not settings["lora_rank"]:
            weights = attrs.evolve(weights, trained=_own(weights, names))
        if weights is None or set(weights.trained) != names:
            raise CannotLook(f"the weights before step {step} were not kept")
        rows = {(call.rollout, call.span): call for row in record.rows("train", step) for call in row.calls}
        calls = [
            rows[tuple(key)]
            for made_of in sketch.updates[: update.LOOKED]
            for key in made_of["calls"]
            if tuple(key) in rows
        ]
        work = 2 * 6 * _parameters(weights.directory) * sum(len(call.prompt) + len(call.reply) for call in calls)
        if work > WORK:
            raise CannotLook(f"it would take {work:.1e} operations to compute this step again; the limit is {WORK:.0e}")
        half, adapters = record.dtype(step) == "bfloat16", bool(settings["lora_rank"])
        more, fewer = (torch.float32, torch.bfloat16) if half and not adapters else (torch.float64, torch.float32)
        rounded = torch.bfloat16 if half and not adapters else None
        first, kl = Weights(directory=_start(record), trained={}), bool(settings["kl_loss_coef"])
        exact = update.Repeat(weights, first.load(more, rounded=rounded) if kl else None, more, rounded)
        rough = update.Repeat(weights, first.load(fewer) if kl else None, fewer, cast=half and adapters)
        moments = self._moments(record, step, made)
        if moments is not None:
            exact.moments, rough.moments = dict(moments), dict(moments)
        yield from update.gradient(record, step, sketch, exact, rough, made=made, moments=moments is not None)

    def _update(self, record: Record, step: int, sketch: Sketch | None) -> Iterator[Verdict]:
        sketch, made = _known(record, step, sketch)
        yield from update.weights(record, step, sketch, Sketch.read(self._path, step - 1), made=made)

    def _moments(self, record: Record, step: int, made: int) -> Mapping[str, Any] | None:
        """Return AdamW's moments before a step; None where they are not known."""
        if not made:
            return {}
        checkpoint = record.checkpoint(step - 1)
        file = checkpoint / "trainer" / "learner.pt" if checkpoint else None
        if file is None or not file.is_file() or record.settings["optimizer"] != "adamw":
            return None
        import torch

        with readable(file):
            kept = torch.load(file, weights_only=True, map_location="cpu")
            states = kept["optimizer"]["state"]
        return {
            name: (states[i]["exp_avg"], states[i]["exp_avg_sq"])
            for i, name in enumerate(kept["trained"])
            if i in states
        }


class CannotLook(Exception):
    """A link can't be looked at; the text says why."""


def _tried(link: str, look: Callable[[], Iterator[Verdict]]) -> Iterator[Verdict]:
    """Yield the verdicts on a link. An error here is a fault of the auditor: the link is named, and the run goes on."""
    try:
        yield from look()
    except RunFileError as damaged:
        yield fault(link, str(damaged), causes="a file of the run that was cut short or changed since")
    except CannotLook as why:
        yield unseen(link, str(why))
    except Unknown as name:
        yield unseen(link, f"{name} is no tensor of the plain model")
    except Exception as error:
        log.warning("the auditor can't look at the link %s: %s", link, error, exc_info=True)
        yield unseen(link, f"{type(error).__name__}: {error}")


def _start(record: Record) -> Path:
    if record.model is None:
        raise CannotLook(f"the starting model {record.settings.get('model')!r} is not on this machine")
    return record.model


def _known(record: Record, step: int, sketch: Sketch | None) -> tuple[Sketch, int]:
    """Return a step's sketch, and how many updates the run had made before."""
    if not record.knows_update:
        raise CannotLook(f"the formulas of {record.settings['use']} are not known here")
    if sketch is None:
        raise CannotLook("the learner left no sketch of this step")
    if any(earlier not in record.lines for earlier in range(1, step)):
        raise CannotLook("the metrics of an earlier step are missing, so the number of updates is not known")
    return sketch, int(sum(line["algorithm"].get("updates", 0) for at, line in record.lines.items() if at < step))


def _delivery(record: Record, step: int) -> Iterator[Verdict]:
    """Count the proof of delivery, which the run makes after each transfer and stops at (docs/proofs.md)."""
    told = record.lines.get(step, {}).get("delivery") or {}
    if not told.get("arrived"):
        raise CannotLook("no proof of delivery was made in this step")
    bound, tensors = told.get("bound") or 0.0, told.get("tensors") or 0
    ratio = (told.get("difference") or 0.0) / bound if bound else 0.0
    yield ok("delivery", f"version {told.get('version')}, {tensors} tensors equal bit for bit", ratio=ratio)


def _parameters(directory: Path) -> int:
    """Return about how many parameters a model has, by the size of its files; too many can't be looked at."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    width = 2 if "16" in str(config.get("dtype") or config.get("torch_dtype")) else 4
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) // width
    if size > LARGEST:
        raise CannotLook(f"the model has {size:,} parameters, and at most {LARGEST:,} are computed with again")
    return max(size, 1)


def _own(weights: Weights, names: set[str]) -> dict[str, Any]:
    """Return the plain model's own parameters of some names, as its directory has them."""
    import torch

    model = weights.load(torch.float32)
    return {name: p.detach() for name, p in model.named_parameters() if name in names}


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

    def words(self, run: Path) -> str:
        """Return the message of the faults: link, what was found, what may cause it, the command that repeats it."""
        parts = [f"  {v.link}: {v.detail}.\n    Likely causes: {v.causes}" for v in self.faults]
        return "\n".join(
            [
                f"step {self.step}: the audit found what is not as the settings and the papers say:",
                *parts,
                f"  See it again: agentrig audit {run} --step {self.step}",
            ]
        )


def audit(auditor: Auditor, step: int, sketch: Sketch | None = None, line: Mapping[str, Any] | None = None) -> Audited:
    """Audit a step, and measure how long it takes."""
    start = time.perf_counter()
    verdicts = auditor.audit(step, sketch, line)
    return Audited(step=step, verdicts=verdicts, seconds=time.perf_counter() - start)
