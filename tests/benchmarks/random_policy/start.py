"""Makes a model of random weights with a tokenizer of its own, learned from the texts that it will read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 192, "vocabulary": 1024},
    "33m": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1792, "vocabulary": 8192},
    # SmolLM-135M's.
    "135m": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "intermediate": 1536, "vocabulary": 49_152},
    # Qwen2.5-0.5B's.
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864, "vocabulary": 151_936},
    # Qwen2.5-1.5B's.
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151_936},
}
"""Architectures by name."""


def make(directory: Path, *, family: str, shape: str, context: int, texts: Iterable[str], seed: int = 0) -> int:
    """Write a Hugging Face directory.

    Args:
        directory: To write.
        family: `llama` or `qwen2`.
        shape: One of `SHAPES`.
        context: Tokens of prompt and reply together.
        texts: What the tokenizer is learned from.
        seed: Of the weights.

    Returns:
        The number of parameters.
    """
    import torch
    from agentrig_grpo import checkpoint
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = SHAPES[shape]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(texts, min(sizes["vocabulary"], 8192)),
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = CONFIG_MAPPING[family](
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["intermediate"],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    checkpoint.save(model, tokenizer, directory)
    return sum(p.numel() for p in model.parameters())


def _tokenizer(texts: Iterable[str], size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def weights_differ(one: Path, other: Path) -> int:
    """Return how many tensors of two model directories differ."""
    from safetensors import safe_open

    with (
        safe_open(one / "model.safetensors", "pt") as a,
        safe_open(other / "model.safetensors", "pt") as b,
    ):
        if set(a.keys()) != set(b.keys()):
            raise SystemExit(f"{one} and {other} hold tensors of other names")
        return sum(not bool((a.get_tensor(name) == b.get_tensor(name)).all()) for name in a.keys())  # noqa: SIM118


def parameters_of(directory: Path) -> dict[str, object]:
    """Return a model directory's configuration."""
    return json.loads((directory / "config.json").read_text("utf-8"))
