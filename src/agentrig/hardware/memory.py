"""Device memory: an estimate of what training a model needs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

GB = 10**9


def in_words(size: float) -> str:
    """Return a size in bytes as GB or MB (10^9 and 10^6 bytes)."""
    return f"{size / GB:.1f} GB" if size >= GB / 2 else f"{size / 10**6:.1f} MB"


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer (Qwen2, Llama and similar).

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the gated feed-forward part.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        vocabulary: Rows of the embedding.
        tied: Whether the output layer is the embedding.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Read a Hugging Face `config.json`; None when it is not of this kind of model."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(config["intermediate_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def parameters(self) -> int:
        """Number of weights; biases and norms, under 0.1% of them, are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the key-value cache of so many tokens, two bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2 * tokens


@attrs.frozen(kw_only=True)
class Workload:
    """What an algorithm's settings need from one device; `AlgorithmSpec.workload(config)` returns it.

    Attributes:
        model: The model's name or path.
        micro_batch: Sequences in one forward and backward.
        context: Longest prompt and response together, in tokens.
        trained: Share of the weights that is trained: 1.0, or LoRA's about 0.01.
        weight_bytes: Bytes of a weight while it is trained: 4 for fp32 (verl keeps fp32 masters), 2 for bf16.
        state_bytes: Bytes of a trained weight's optimizer state: 8 for Adam in fp32.
        sequences: Sequences that are sampled at once, for the key-value cache.
        shards: Devices that share weights, gradients and optimizer (FSDP).
        nodes: Machines that the algorithm spreads over.
        minimum: Known minimum of the profile in bytes, independent of the estimate; 0 for none.
    """

    model: str
    micro_batch: int
    context: int
    trained: float = 1.0
    weight_bytes: int = 4
    state_bytes: int = 8
    sequences: int = 1
    shards: int = 1
    nodes: int = 1
    minimum: int = 0


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """Bytes on one device, by part. Update and sampling alternate, so the larger one counts."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    sampler_weights: int
    kv_cache: int

    @property
    def update(self) -> int:
        """What the update holds at its peak."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def sampling(self) -> int:
        """What sampling holds: a copy of the weights in two bytes each, and the cache."""
        return self.sampler_weights + self.kv_cache

    @property
    def peak(self) -> int:
        """The larger of the two, when every sequence has the maximum length."""
        return max(self.update, self.sampling)

    @property
    def floor(self) -> int:
        """The minimum for any batch size or length: the state of the update, or the sampler's weights."""
        return max(self.weights + self.gradients + self.optimizer, self.sampler_weights)

    def describe(self) -> str:
        """Return the parts as text."""
        return ", ".join(f"{name.replace('_', ' ')} {in_words(n)}" for name, n in attrs.asdict(self).items())


def estimate(shape: ModelShape, load: Workload) -> MemoryEstimate:
    """Estimate a device's memory for training with gradient checkpointing.

    Weights, gradients (as wide as the weights) and optimizer state are counted per weight. Activations
    are one residual stream per layer in two bytes (what checkpointing keeps), one layer's own
    intermediate values while it is recomputed, and the logits in fp32 with their gradient in two
    bytes, which for a vocabulary of 150,000 outweigh the rest. Fragmentation and the runtime's own
    memory (1 to 2 GB on CUDA) are not in it.
    """
    parameters = shape.parameters / load.shards
    tokens = load.micro_batch * load.context
    kept = shape.layers * tokens * shape.hidden * 2
    recomputed = tokens * (8 * shape.hidden + 3 * shape.intermediate) * 2
    logits = tokens * shape.vocabulary * (4 + 2)
    return MemoryEstimate(
        weights=int(parameters * load.weight_bytes),
        gradients=int(parameters * load.trained * load.weight_bytes),
        optimizer=int(parameters * load.trained * load.state_bytes),
        activations=kept + recomputed + logits,
        sampler_weights=int(shape.parameters * 2),
        kv_cache=shape.kv_bytes(load.sequences * load.context),
    )


KNOWN: Mapping[str, ModelShape] = {
    "qwen/qwen2.5-coder-0.5b-instruct": ModelShape(
        layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64, vocabulary=151936, tied=True
    ),
    "qwen/qwen2.5-coder-1.5b-instruct": ModelShape(
        layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocabulary=151936, tied=True
    ),
    "qwen/qwen2.5-coder-3b-instruct": ModelShape(
        layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, head_dim=128, vocabulary=151936, tied=True
    ),
    "meta-llama/llama-3.2-1b-instruct": ModelShape(
        layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocabulary=128256, tied=True
    ),
    "meta-llama/llama-3.2-3b-instruct": ModelShape(
        layers=28, hidden=3072, intermediate=8192, heads=24, kv_heads=8, head_dim=128, vocabulary=128256, tied=True
    ),
}
"""Shapes of the reference profiles' models by lower-case name, from their published `config.json`, so
that the doctor can judge a recipe before the model is downloaded."""
