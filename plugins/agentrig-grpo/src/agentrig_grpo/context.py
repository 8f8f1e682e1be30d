"""How many tokens a model takes: its own limit, and what a run's settings ask for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrig.errors import ConfigError
from agentrig_grpo.model_files import loading

log = logging.getLogger(__name__)

PLAIN = ("llama", "qwen2", "qwen3", "mistral")
"""Model types whose `config.json` names its context as `transformers` does: it need not be imported to know it."""

UNKNOWN = 4096
"""The context of a model whose configuration names none, in tokens."""


LONGER = "take a model with a longer context (agentrig warmup makes one with --context {})"


def context_of(config: Any, max_length: int) -> int:
    """Return the context that a model is served with, in tokens.

    Args:
        config: Its `transformers` configuration.
        max_length: What the run asks for; 0 for the model's own.

    Raises:
        ConfigError: The run asks for more than the model was made for.
    """
    own = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if own and rope.get("rope_type") == "yarn":
        own = max(own, int(rope["factor"] * (rope.get("original_max_position_embeddings") or 0)))
    if own and max_length > own:
        raise ConfigError(
            f"[algorithm] max_length = {max_length}: this model's context is {own} tokens "
            "(max_position_embeddings in its config.json). algorithm.max_length=0 takes the model's own, if prompts "
            f"and replies fit in it; or {LONGER.format(max_length)}"
        )
    return max_length or own or UNKNOWN


def configuration(directory: Path) -> Any:
    """Return the `transformers` configuration of a local model; transformers is imported here."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    with loading(directory, "configuration"):
        kind = json.loads((directory / "config.json").read_text("utf-8")).get("model_type")
        if kind not in CONFIG_MAPPING:
            raise ConfigError(
                f"{directory}/config.json has the model_type {kind}, which transformers {transformers.__version__} "
                "does not know. Update it (pip install -U transformers), or use another model"
            )
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)


def check_context(directory: Path, *, max_length: int, max_tokens: int) -> int:
    """Return the context of a local model, in tokens, where a run's settings go with it.

    Args:
        max_length: See `context_of`.
        max_tokens: Most tokens of one reply.

    Raises:
        ConfigError: The run asks for more than the model has, a reply leaves no room for a prompt, or the type of the
            model is unknown.
    """
    with loading(directory, "configuration"):
        written = json.loads((directory / "config.json").read_text("utf-8"))
        plain = written.get("model_type") in PLAIN and isinstance(written.get("max_position_embeddings"), int)
        config = SimpleNamespace(**written) if plain and not written.get("rope_scaling") else None
    config = config or configuration(directory)
    context = context_of(config, max_length)
    if not max_length and not getattr(config, "max_position_embeddings", None):
        log.warning("%s names no context: %d tokens are assumed; algorithm.max_length sets it", directory, context)
    if max_tokens >= context:
        fewer = max(1, context // 4)
        raise ConfigError(
            f"[algorithm] max_tokens = {max_tokens} leaves no room for a prompt in a context of {context} tokens. "
            f"algorithm.max_tokens={fewer} leaves prompts {context - fewer}; for longer ones, "
            f"{'raise algorithm.max_length' if max_length else LONGER.format('TOKENS')}"
        )
    if max_tokens > context // 2:
        log.warning(
            "algorithm.max_tokens = %d leaves prompts %d of the context's %d tokens; longer ones are refused",
            *(max_tokens, context - max_tokens, context),
        )
    return context
