"""The check at export: transformers loads the exported model, which must score the probe as the learner did."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrig.delivery.verdict import Expected, difference
from agentrig.errors import AgentrigError, CheckpointDamaged
from agentrig.hardware.cpu import choose_vector_kernels
from agentrig.text import read_text

SIGNATURE = Path("trainer") / "delivery.json"
"""The file of a checkpoint with the probe and the learner's log-probabilities of it."""


def sign(checkpoint: Path, expected: Expected) -> None:
    """Write the probe and its log-probabilities under the learner into a checkpoint."""
    content = {name: getattr(expected, name) for name in ("version", "ids", "logprobs", "bound")}
    file = checkpoint / SIGNATURE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content) + "\n", "utf-8")


def check_export(directory: Path, checkpoint: Path) -> str:
    """Compare an exported model with the learner that its checkpoint was saved from.

    Returns:
        A sentence with the result, or why nothing could be compared.

    Raises:
        AgentrigError: The exported model is not the one that was trained.
        CheckpointDamaged: The learner's log-probabilities in the checkpoint cannot be read.
    """
    try:
        signed = json.loads(read_text(checkpoint / SIGNATURE))
        ids, version, bound = [int(token) for token in signed["ids"]], int(signed["version"]), float(signed["bound"])
        ours = [float(value) for value in signed["logprobs"]]
    except FileNotFoundError:
        return "not checked: its learner's log-probabilities are not in the checkpoint (run.delivery was off)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(checkpoint, f"{SIGNATURE} cannot be read ({type(error).__name__}: {error})") from None
    try:
        theirs = _logprobs(directory, ids)
    except ImportError as error:
        return f"not checked: {error.name} is not installed here"
    gap = difference(ours, theirs)
    figures = f"largest difference of {len(theirs)} log-probabilities {gap:.2g}, bound {bound:.1g}"
    if not gap <= bound < math.inf:
        raise AgentrigError(
            f"{directory} is not the model that was trained: loaded by transformers, it gives the run's probe other "
            f"log-probabilities than the learner gave after step {version} ({figures}).\n  Export again; if it stays "
            f"so, {checkpoint} is damaged: resume from an earlier checkpoint (agentrig train --resume RUN "
            "--from-step N)"
        )
    return f"it answers as the learner did after step {version}: {figures}"


def _logprobs(directory: Path, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token except the first, computed in fp32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    choose_vector_kernels()
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, local_files_only=True)
    model.eval()
    given = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=given, use_cache=False).logits[0, :-1].float()
    found: list[float] = (-torch.nn.functional.cross_entropy(logits, given[0, 1:], reduction="none")).tolist()
    return found
