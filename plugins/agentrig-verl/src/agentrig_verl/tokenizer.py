"""Warns when verl and vLLM will not use a model's own tokenizer."""

from __future__ import annotations

import logging

from agentrig.tokenizers import disagreement

log = logging.getLogger(__name__)


def warn(model: str, *, trust_remote_code: bool = False) -> None:
    """Log a warning when verl and vLLM will not use the model's own tokenizer."""
    found = disagreement(model, trust_remote_code=trust_remote_code)
    if found is not None:
        log.warning(
            "verl and vLLM tokenize text differently from %s/tokenizer.json (%s): a model that was trained with that "
            "file gives worse answers here. Train it with its model family's pre-tokenizer.",
            model,
            found,
        )
