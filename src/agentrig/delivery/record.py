"""Figures of the proofs, for `metrics.jsonl` (a step) and `summary.json` (the run); a checkpoint's signature."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.delivery.verdict import Expected
from agentrig.errors import CheckpointDamaged

log = logging.getLogger(__name__)

SIGNATURE = Path("trainer") / "delivery.json"
"""The file of a checkpoint with the probe and the learner's log-probabilities of it."""


@attrs.define
class Figures:
    """Results of some proofs.

    Attributes:
        proofs: How many transfers were checked.
        arrived: After how many of them the server answered with the learner's weights.
        difference: Largest difference of a log-probability, in nats; None before the first.
        bound: The bound of that proof.
        tensors: How many tensors were compared bit for bit in the last proof; 0 if the server reports no digests.
        calls_difference: The largest mean difference of a recorded call, in nats; None before the first.
        calls_bound: The bound of that call.
    """

    proofs: int = 0
    arrived: int = 0
    difference: float | None = None
    bound: float = 0.0
    tensors: int = 0
    calls_difference: float | None = None
    calls_bound: float = 0.0

    def add(self, other: Figures) -> None:
        """Add the figures of other proofs."""
        self.proofs += other.proofs
        self.arrived += other.arrived
        if other.difference is not None and (self.difference is None or other.difference >= self.difference):
            self.difference, self.bound = other.difference, other.bound
        found = other.calls_difference
        if found is not None and (self.calls_difference is None or found >= self.calls_difference):
            self.calls_difference, self.calls_bound = found, other.calls_bound
        self.tensors = other.tensors or self.tensors


class Record:
    """The figures of a run.

    Args:
        on: Whether the run proves its transfers.

    Attributes:
        seconds: How long the run waited for proofs since the last `line`.
        background: Seconds that they took in the background.
        notes: What the report adds to the figures.
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self.seconds = self.background = 0.0
        self.notes: list[str] = []
        self._run, self._step = Figures(), Figures()
        self._version: int | None = None

    @classmethod
    def after(cls, lines: Sequence[Mapping[str, Any]], *, on: bool = True) -> Record:
        """Return the record of a run that is resumed, with the figures of its earlier steps."""
        found = cls(on=on)
        known = set(attrs.fields_dict(Figures))
        for line in lines:
            step = line.get("delivery") or {}
            found._run.add(Figures(**{name: value for name, value in step.items() if name in known}))
            found.notes += [note for note in step.get("notes", []) if note not in found.notes]
        return found

    def begin(self, version: int) -> None:
        """Count a transfer that is being proven."""
        self._version = version
        self._step.proofs += 1

    def compared(self, difference: float, tensors: int, expected: Expected) -> None:
        """Record a comparison."""
        self._step.add(Figures(difference=difference, bound=expected.bound, tensors=tensors))

    def calls(self, difference: float, bound: float) -> None:
        """Record a comparison of recorded calls."""
        self._step.add(Figures(calls_difference=difference, calls_bound=bound))

    def proven(self) -> None:
        """Count a transfer that has arrived."""
        self._step.arrived += 1

    def say(self, note: str) -> None:
        """Log a warning once, and keep it for the report."""
        if note not in self.notes:
            log.warning("%s", note)
            self.notes.append(note)

    def line(self) -> dict[str, Any]:
        """Return the entry of `metrics.jsonl` for the step that ends; empty if nothing was proven in it."""
        step, self._step = self._step, Figures()
        seconds, self.seconds = self.seconds, 0.0
        background, self.background = self.background, 0.0
        if not step.proofs:
            return {}
        self._run.add(step)
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"version": self._version, **attrs.asdict(step), "seconds": seconds, "background_s": background, **notes}

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`, with the results since the last line."""
        whole = Figures()
        whole.add(self._run)
        whole.add(self._step)
        return {"on": self._on, **attrs.asdict(whole), "notes": list(self.notes)}


def sign(checkpoint: Path, ids: Sequence[int], expected: Expected) -> None:
    """Write the probe and its log-probabilities under the learner into a checkpoint."""
    content = {
        "version": expected.version,
        "ids": list(ids),
        "logprobs": list(expected.logprobs),
        "bound": expected.bound,
        "dtype": expected.dtype,
    }
    file = checkpoint / SIGNATURE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content) + "\n", "utf-8")


def signature(checkpoint: Path) -> tuple[list[int], Expected] | None:
    """Return what `sign` wrote: the probe's tokens and the learner's log-probabilities; None without it.

    Raises:
        CheckpointDamaged: The file cannot be read.
    """
    file = checkpoint / SIGNATURE
    try:
        found = json.loads(file.read_text("utf-8"))
        expected = Expected(
            version=found["version"],
            logprobs=[float(value) for value in found["logprobs"]],
            digests={},
            dtype=found["dtype"],
            bound=float(found["bound"]),
        )
        return [int(token) for token in found["ids"]], expected
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(checkpoint, f"{SIGNATURE} cannot be read ({type(error).__name__}: {error})") from None
