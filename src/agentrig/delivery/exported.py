"""The check at export: transformers loads the exported model, which must score the probe as the learner did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrig.delivery.record import signature
from agentrig.delivery.verdict import difference
from agentrig.errors import AgentrigError


def check_export(directory: Path, checkpoint: Path) -> str:
    """Compare an exported model with the learner that its checkpoint was saved from.

    Args:
        directory: The exported Hugging Face directory.
        checkpoint: The checkpoint that was exported.

    Returns:
        A sentence with the result, or why nothing could be compared.

    Raises:
        AgentrigError: The exported model is not the one that was trained.
        agentrig.errors.CheckpointDamaged: The learner's log-probabilities in the checkpoint cannot be read.
    """
    signed = signature(checkpoint)
    if signed is None:
        return "not checked: its learner's log-probabilities are not in the checkpoint (run.delivery off, or it is old)"
    ids, expected = signed
    try:
        found = _logprobs(directory, ids)
    except ImportError as error:
        return f"not checked: {error.name} is not installed here"
    gap = difference(expected.logprobs, found)
    figures = f"largest difference of {len(found)} log-probabilities {gap:.2g}, bound {expected.bound:.1g}"
    if gap > expected.bound:
        raise AgentrigError(
            f"{directory} is not the model that was trained: loaded by transformers, it gives the run's probe other "
            f"log-probabilities than the learner gave after step {expected.version} ({figures}).\n  Export again; if "
            f"it stays so, {checkpoint} is damaged: resume from an earlier checkpoint (agentrig train --resume RUN "
            "--from-step N)"
        )
    return f"it answers as the learner did after step {expected.version}: {figures}"


def _logprobs(directory: Path, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token except the first, computed in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, local_files_only=True)
    model.eval()
    given = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=given, use_cache=False).logits[0, :-1].float()
    found: list[float] = (-torch.nn.functional.cross_entropy(logits, given[0, 1:], reduction="none")).tolist()
    return found
