"""The learner's file of a checkpoint, `trainer/learner.pt`: trained weights, optimizer, the weights that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported with the algorithm only)

from agentrig.errors import AgentrigError, CheckpointDamaged
from agentrig_grpo.model_files import ModelError

FILE = Path("trainer") / "learner.pt"

KEYS = frozenset({"trained", "optimizer", "updates", "kept"})

MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "state1", "state2"})
"""Names of an optimizer's moments: AdamW's, and those of AdamW in 8 bits."""


def write(directory: Path, state: Mapping[str, Any]) -> None:
    """Write a learner's state.

    Raises:
        Exception: The disk is full, or a file cannot be written; the `OSError` that says so is its context.
    """
    (directory / FILE).parent.mkdir()
    with (directory / FILE).open("wb") as file:  # given a path, torch does not say why it could not write
        torch.save(dict(state), file)


def read(directory: Path) -> dict[str, Any]:
    """Return what `write` wrote.

    Raises:
        CheckpointDamaged: The file is missing, damaged or cut off, or holds NaN.
        AgentrigError: A newer version wrote it.
    """
    file = directory / FILE
    if not file.is_file():
        raise CheckpointDamaged(directory, f"{file} is missing")
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointDamaged(directory, f"{file} is cut off or not a torch file ({reason})") from None
    unknown, missing = sorted(map(str, state.keys() - KEYS)), sorted(KEYS - state.keys())
    if unknown:
        raise AgentrigError(
            f"{file} holds {', '.join(unknown)}, unknown to this agentrig-grpo: a newer version wrote the checkpoint. "
            "Resume with that version, or update this one: pip install -U agentrig-grpo"
        )
    if missing:
        raise CheckpointDamaged(directory, f"{file} lacks {', '.join(missing)}")
    if wrong := _not_finite(state):
        what = f"NaN or infinite numbers in {wrong}: the training had diverged, or the file was changed"
        raise CheckpointDamaged(directory, f"{file} holds {what}")
    moments = state["optimizer"].get("state", {}) if isinstance(state["optimizer"], dict) else {}
    for i, (name, tensor) in enumerate(state["trained"].items()):
        for key in MOMENTS & moments.get(i, {}).keys():
            if moments[i][key].shape != tensor.shape:
                shapes = f"{list(moments[i][key].shape)}, and the tensor {list(tensor.shape)}"
                what = f"{file} does not fit: the moment {key} of {name} has the shape {shapes}"
                raise CheckpointDamaged(directory, what)
    return state


@contextmanager
def fitting(directory: Path) -> Iterator[None]:
    """Raise `CheckpointDamaged` for what a learner or optimizer raises when a state does not fit it."""
    try:
        yield
    except ModelError as error:
        raise CheckpointDamaged(directory, str(error)) from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{FILE} does not fit ({type(error).__name__}: {error})"
        raise CheckpointDamaged(directory, reason) from error


def _not_finite(value: Any, name: str = "") -> str:
    """Return the name of a tensor, at any depth, whose numbers are not finite; '' if there is none."""
    if isinstance(value, torch.Tensor):
        return name if value.is_floating_point() and not bool(torch.isfinite(value).all()) else ""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next((wrong for key, each in inside if (wrong := _not_finite(each, f"{name}.{key}".strip(".")))), "")
