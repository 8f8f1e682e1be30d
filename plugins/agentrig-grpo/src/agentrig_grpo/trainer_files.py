"""What a checkpoint holds besides the model: the learner's state and the best weights so far."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the algorithm only)

from agentrig.errors import AgentrigError

FORMAT = 1
"""Written to `trainer/state.json`; a checkpoint without it was written before there were formats, and is read."""
LEARNER = frozenset({"trained", "optimizer", "updates"})


@attrs.define
class Best:
    """The weights that did best in validation so far."""

    accuracy: float = -1.0
    step: int = 0
    trained: dict[str, torch.Tensor] = attrs.field(factory=dict, repr=False)


def write(directory: Path, *, learner: Mapping[str, Any], best: Best, step: int, seed: int) -> None:
    """Write the folder `trainer` of a checkpoint."""
    trainer = directory / "trainer"
    trainer.mkdir()
    torch.save(dict(learner), trainer / "learner.pt")
    torch.save(attrs.asdict(best), trainer / "best.pt")
    state = {"format": FORMAT, "step": step, "seed": seed}
    (trainer / "state.json").write_text(json.dumps(state) + "\n", "utf-8")


def read(directory: Path) -> tuple[dict[str, Any], Best]:
    """Return what `write` wrote: the learner's state and the best weights.

    Raises:
        AgentrigError: A file is missing, damaged, or written by a version that this one does not know.
    """
    trainer = directory / "trainer"
    _check_format(trainer / "state.json")
    learner = _load(trainer / "learner.pt")
    missing, unknown = LEARNER - learner.keys(), learner.keys() - LEARNER
    if missing or unknown:
        raise AgentrigError(_unfit(trainer / "learner.pt", missing, unknown))
    found = _load(trainer / "best.pt")
    fields = {field.name for field in attrs.fields(Best)}
    if found.keys() - fields:
        raise AgentrigError(_unfit(trainer / "best.pt", set(), found.keys() - fields))
    best = Best(**found)
    numbers = isinstance(best.accuracy, int | float) and math.isfinite(best.accuracy) and isinstance(best.step, int)
    if not numbers or not isinstance(best.trained, dict):
        raise AgentrigError(f"{trainer / 'best.pt'} is damaged: {best!r} are no best weights.{_cure(directory)}")
    return learner, best


def damaged(directory: Path, error: Exception) -> AgentrigError:
    """Return the error of a learner's state that loads and does not fit."""
    file = directory / "trainer" / "learner.pt"
    return AgentrigError(f"{file} does not fit this run ({type(error).__name__}: {error}).{_cure(directory)}")


def _check_format(file: Path) -> None:
    try:
        state = json.loads(file.read_text("utf-8"))
        number = state.get("format", 0)
        if not isinstance(number, int):
            raise ValueError(f"format is {number!r}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise AgentrigError(f"{file} is missing or damaged ({error}).{_cure(file.parent.parent)}") from None
    if number > FORMAT:
        raise AgentrigError(
            f"{file} has format {number}, and this agentrig-grpo knows up to {FORMAT}: a newer version wrote the "
            "checkpoint. Resume with that version, or update this one: pip install -U agentrig-grpo"
        )


def _load(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise AgentrigError(f"{file} is missing, so this run cannot go on from there.{_cure(file.parent.parent)}")
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AgentrigError(f"{file} is damaged or cut off ({reason}).{_cure(file.parent.parent)}") from None
    return found


def _unfit(file: Path, missing: Collection[str], unknown: Collection[str]) -> str:
    if missing:
        return f"{file} lacks {', '.join(sorted(missing))}: it is damaged or too old.{_cure(file.parent.parent)}"
    names = ", ".join(sorted(map(str, unknown)))
    return (
        f"{file} holds {names}, unknown to this agentrig-grpo: a newer version wrote it. "
        "Resume with that version, or update this one: pip install -U agentrig-grpo"
    )


def _cure(checkpoint: Path) -> str:
    return (
        f" Put it back from a copy, or go on from the checkpoint before: move {checkpoint} out of its folder and "
        "resume again"
    )
