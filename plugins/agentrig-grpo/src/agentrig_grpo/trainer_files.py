"""What a checkpoint holds besides the model: the learner's state and the best weights so far."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the algorithm only)

from agentrig.errors import AgentrigError, CheckpointDamaged

FORMAT = 1
"""Written to `trainer/state.json`; a checkpoint without it is from before formats existed, and is still read."""
NEWER = (
    "a newer version wrote the checkpoint. Resume with that version, or update this one: pip install -U agentrig-grpo"
)
LEARNER = frozenset({"trained", "optimizer", "updates"})

MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "state1", "state2"})
"""Names of an optimizer's moments: AdamW's, and those of AdamW in 8 bits."""


@attrs.define
class Best:
    """The weights that did best in validation so far: by accuracy, among equals by mean reward."""

    accuracy: float = -1.0
    reward: float = -math.inf
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
        CheckpointDamaged: A file is missing, damaged or cut off, or holds NaN.
        AgentrigError: A newer version wrote it.
    """
    trainer = directory / "trainer"
    _check_format(directory)
    learner = _load(directory, "learner.pt", LEARNER)
    missing = LEARNER - learner.keys()
    if missing:
        raise CheckpointDamaged(directory, f"{trainer / 'learner.pt'} lacks {', '.join(sorted(missing))}")
    found = _load(directory, "best.pt", {field.name for field in attrs.fields(Best)})
    best = Best(**found)
    numbers = isinstance(best.accuracy, int | float) and math.isfinite(best.accuracy) and isinstance(best.step, int)
    if not numbers or not isinstance(best.trained, dict):
        raise CheckpointDamaged(directory, f"{trainer / 'best.pt'} holds {best!r}, which are no best weights")
    for name, what in (("learner.pt", learner), ("best.pt", best.trained)):
        wrong = _wrong(what)
        if wrong:
            raise CheckpointDamaged(directory, f"{trainer / name} holds {wrong}")
    states = learner["optimizer"].get("state", {}) if isinstance(learner["optimizer"], dict) else {}
    for i, (name, tensor) in enumerate(learner["trained"].items()):
        for key in MOMENTS & states.get(i, {}).keys():
            if states[i][key].shape != tensor.shape:
                shapes = f"{list(states[i][key].shape)}, and the tensor {list(tensor.shape)}"
                raise CheckpointDamaged(
                    directory,
                    f"{trainer / 'learner.pt'} does not fit: the moment {key} of {name} has the shape {shapes}",
                )
    return learner, best


def _wrong(value: Any, name: str = "") -> str:
    """Say which tensor, at any depth, has numbers that are not finite; '' if none has."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"NaN or infinite numbers in {name}: the training had diverged, or the file was changed"
        return ""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next((wrong for key, each in inside if (wrong := _wrong(each, f"{name}.{key}".strip(".")))), "")


def _check_format(directory: Path) -> None:
    file = directory / "trainer" / "state.json"
    try:
        state = json.loads(file.read_text("utf-8"))
        number = state.get("format", 0)
        if not isinstance(number, int):
            raise ValueError(f"format is {number!r}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(directory, f"{file} cannot be read ({type(error).__name__}: {error})") from None
    if number > FORMAT:
        raise AgentrigError(f"{file} has format {number}, and this agentrig-grpo knows up to {FORMAT}: {NEWER}")


def _load(directory: Path, name: str, known: Collection[str]) -> dict[str, Any]:
    file = directory / "trainer" / name
    if not file.is_file():
        raise CheckpointDamaged(directory, f"{file} is missing")
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointDamaged(directory, f"{file} is cut off or not a torch file ({reason})") from None
    unknown = sorted(str(key) for key in found if key not in known)
    if unknown:
        raise AgentrigError(f"{file} holds {', '.join(unknown)}, unknown to this agentrig-grpo: {NEWER}")
    return found
