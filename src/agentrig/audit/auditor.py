"""The auditor: each link of a recorded step, in the order of the data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit import distribution as sampled
from agentrig.audit import scores, tasks, text, update
from agentrig.audit.model import Unknown, Weights, random_state_kept
from agentrig.audit.record import Record, Sources
from agentrig.audit.sketch import Sketch
from agentrig.audit.verdicts import LINKS, Verdict, fault, ok, unseen

if TYPE_CHECKING:
    import torch

LARGEST = 1 << 28
"""Parameters of the largest model that is computed with again: twice in up to 64 bits, with gradients and moments, it
takes some 40 bytes a parameter in host memory."""


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
        found: list[Verdict] = []
        with random_state_kept():
            for verdict in self._links(record, step, sketch):
                found.append(verdict)
        faults = {verdict.link for verdict in found if verdict.result == "fault"}
        kept = [v for v in found if v.result == "fault" or v.link not in faults]
        return sorted(kept, key=lambda verdict: LINKS.index(verdict.link))

    def _links(self, record: Record, step: int, sketch: Sketch | None) -> Iterator[Verdict]:
        yield from tasks.tasks(record, step, self._sources)
        yield from tasks.held_out(record, step, self._sources)
        yield from scores.score(record, step, self._sources)
        yield from scores.advantages(record, step)
        yield _delivery(record, step)
        if record.model is None:
            for link in ("text", "distribution", "gradient", "weights"):
                yield unseen(link, f"the starting model {record.settings.get('model')!r} is not on this machine")
            return
        tokenizer, ends = text.load_tokenizer(record.model)
        config = json.loads((record.model / "config.json").read_text("utf-8"))
        context = min(filter(None, (record.settings.get("max_length"), config.get("max_position_embeddings"))), default=0)
        yield from text.text(record, step, tokenizer, ends, context)
        try:
            yield from self._distribution(record, step)
        except Unknown as error:
            yield unseen("distribution", f"{error} is no tensor of the plain model")
        if sketch is None or not record.knows_update:
            why = "the learner left no sketch of this step" if record.knows_update else "its formulas are not known here"
            yield unseen("gradient", why)
            yield unseen("weights", why)
            return
        made = int(sum(record.lines[s]["algorithm"].get("updates", 0) for s in record.lines if s < step))
        yield from update.weights(record, step, sketch, Sketch.read(self._path, step - 1), made=made)
        try:
            yield from self._gradient(record, step, sketch, made)
        except Unknown as error:
            yield unseen("gradient", f"{error} is no tensor of the plain model")

    def _weights(self, record: Record, version: int) -> Weights | None:
        """Return the weights of a version: kept from an audited step, of a checkpoint, or the starting model."""
        assert record.model is not None
        settings = record.settings
        scaling = settings.get("lora_alpha", 1) / max(settings.get("lora_rank", 0), 1)
        if version in self._kept:
            return Weights(directory=record.model, trained=self._kept[version], scaling=scaling)
        checkpoint = record.checkpoint(version)
        state = checkpoint / "trainer" / "learner.pt" if checkpoint else None
        if state is not None and state.is_file():
            import torch

            trained = torch.load(state, weights_only=True, map_location="cpu")["trained"]
            return Weights(directory=record.model, trained=trained, scaling=scaling)
        if checkpoint is not None:
            return Weights(directory=checkpoint, trained={})
        return Weights(directory=record.model, trained={}) if version == 0 else None

    def _distribution(self, record: Record, step: int) -> Iterator[Verdict]:
        import torch

        behind = int(record.lines[step].get("max_staleness") or 0)
        version = step - 1 - behind
        weights = self._weights(record, version)
        if weights is None:
            yield unseen("distribution", f"the weights of version {version} were not kept")
            return
        if _size(weights.directory) > LARGEST:
            yield unseen("distribution", "the model is too large to be computed with again")
            return
        half = record.dtype(step) == "bfloat16"
        exact = weights.load(torch.float32 if half else torch.float64, rounded=torch.bfloat16 if half else None)
        rough = weights.load(torch.bfloat16 if half else torch.float32)
        yield from sampled.distribution(record, step, exact, rough, version, self._evidence)

    def _gradient(self, record: Record, step: int, sketch: Sketch, made: int) -> Iterator[Verdict]:
        import torch

        if not sketch.updates:
            yield ok("gradient", "the step made no update")
            return
        weights, settings = self._weights(record, step - 1), record.settings
        names = set(sketch.updates[0]["tensors"])
        if weights is not None and not weights.trained and not settings["lora_rank"]:
            weights = attrs.evolve(weights, trained=_own(weights, names))
        if weights is None or set(weights.trained) != names:
            yield unseen("gradient", f"the weights before step {step} were not kept")
            return
        if _size(weights.directory) > LARGEST:
            yield unseen("gradient", "the model is too large to be computed with again")
            return
        half, adapters = record.dtype(step) == "bfloat16", bool(settings["lora_rank"])
        assert record.model is not None
        first = Weights(directory=record.model, trained={})
        more, fewer = (torch.float32, torch.bfloat16) if half and not adapters else (torch.float64, torch.float32)
        rounded = torch.bfloat16 if half and not adapters else None
        kl = bool(settings["kl_loss_coef"])
        exact = update.Repeat(weights, first.load(more, rounded=rounded) if kl else None, more, rounded)
        rough = update.Repeat(weights, first.load(fewer) if kl else None, fewer, cast=half and adapters)
        moments = self._moments(record, step, made)
        if moments is not None:
            exact.moments, rough.moments = dict(moments), dict(moments)
        yield from update.gradient(record, step, sketch, exact, rough, made=made, moments=moments is not None)

    def _moments(self, record: Record, step: int, made: int) -> Mapping[str, Any] | None:
        """Return AdamW's moments before a step; None where they are not known."""
        if not made:
            return {}
        checkpoint = record.checkpoint(step - 1)
        file = checkpoint / "trainer" / "learner.pt" if checkpoint else None
        if file is None or not file.is_file() or record.settings["optimizer"] != "adamw":
            return None
        import torch

        kept = torch.load(file, weights_only=True, map_location="cpu")
        states = kept["optimizer"]["state"]
        return {name: (states[i]["exp_avg"], states[i]["exp_avg_sq"]) for i, name in enumerate(kept["trained"]) if i in states}


def _delivery(record: Record, step: int) -> Verdict:
    """Report the proof of delivery, which the run itself makes after each transfer (docs/proofs.md)."""
    told = record.lines.get(step, {}).get("delivery") or {}
    if not told.get("proofs"):
        return unseen("delivery", "the run made no proof of delivery in this step")
    if told.get("arrived") != told["proofs"]:
        detail = f"weights arrived {told.get('arrived')} of {told['proofs']} times"
        return fault("delivery", detail, causes="the transfer to the server, or a server with other weights")
    bound = told.get("bound") or 0.0
    ratio = told.get("difference", 0.0) / bound if bound else 0.0
    return ok("delivery", f"version {told.get('version')}, {told.get('tensors')} tensors equal bit for bit", ratio=ratio)


def _size(directory: Path) -> int:
    """Return about how many parameters a model has, from the size of its files."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    width = 2 if "16" in str(config.get("dtype") or config.get("torch_dtype")) else 4
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) // width


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
        return {verdict.link for verdict in self.verdicts if verdict.result != "not looked at"}

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return attrs.asdict(self)

    def words(self, run: Path) -> str:
        """Return the message of the faults: link, what was found, what may cause it, and the command that repeats it."""
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
