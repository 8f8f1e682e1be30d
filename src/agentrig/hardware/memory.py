"""Device memory: what training and serving a model needs, by arithmetic on sizes, before anything is loaded.

A memory plan is made of these parts: `DeviceMemory` is what a run may take, `ServerNeed` what its server takes of that,
and the constants what may be chosen. `agentrig_grpo.fitting` and `agentrig_verl.planning` make one each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from agentrig.device_memory import in_gib
from agentrig.errors import ConfigError

GB = 10**9
GIB = 1 << 30

MARGIN = 1.15
"""Factor over the estimate of an update's passes that must be free: for fragmentation and libraries' workspaces."""

ROUNDING = 1.06
"""Factor over weights, gradients and moments: torch held 5% more than its tensors, 1.5B, on one H100."""

PASSES = (49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024, 512, 256)
"""Tokens of a pass that may be chosen. More than the first make no update faster, on any device that was measured."""

CACHES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the key-value cache of all calls that may be chosen: with less, calls wait for each other."""

LENDING = 1 << 27
"""Bytes of the device that a server needs for the kernels and graphs of adapters."""

CONTEXT = 3 << 28
"""Bytes of the device that belong to this process, and to none of its tensors: a limit counts them too."""


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

    def adapters(self, rank: int) -> int:
        """Number of weights of adapters of all linear layers but the output layer."""
        inner = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * rank * (7 * self.hidden + inner + 3 * self.intermediate)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the key-value cache of so many tokens, two bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2 * tokens


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """A device's memory before the run starts anything on it, in bytes.

    Attributes:
        name: torch's name of it.
        total: All of it.
        others: What is taken already.
        reserved: What torch holds for this process.
        limit: What the run may take, `[hardware] memory_gib`; 0 for all that is free.
    """

    name: str
    total: int
    others: int = 0
    reserved: int = 0
    limit: int = 0

    def __attrs_post_init__(self) -> None:
        if self.limit > self.total:
            raise ConfigError(
                f"[hardware] memory_gib = {self.limit / GIB:g}: {self.name} has {in_gib(self.total)}. Set less, or 0 "
                "for the whole device"
            )

    @property
    def budget(self) -> int:
        """What server and learner may take together."""
        return max(0, min(self.total - self.others, self.limit - CONTEXT if self.limit else self.total))

    @property
    def accelerator(self) -> bool:
        """Whether it is no CPU."""
        return self.name.split(":")[0] != "cpu"


def or_more(device: DeviceMemory, fits: Callable[[DeviceMemory], bool]) -> str:
    """Return the least limit with which a run would fit, as the end of a sentence; '' without a limit, or such a one.

    Args:
        fits: Whether it would with a device.
    """
    whole = range(device.limit // GIB + 1, device.total // GIB + 1) if device.limit else ()
    found = bisect_left(whole, True, key=lambda gib: fits(attrs.evolve(device, limit=gib * GIB)))
    return f", or hardware.memory_gib = {whole[found]} or more" if found < len(whole) else ""


@attrs.frozen(kw_only=True)
class ServerNeed:
    """Bytes that a server needs on the learner's device.

    Attributes:
        weights: The weights in its dtype.
        beside: Libraries, graphs, activations of prompts, the sampler.
        cache: Keys and values of all calls that run at once.
        least: Keys and values of one sequence of the longest context: it starts with no less.
        calls: How many calls run at once.
        asleep: What it keeps while it sleeps.
        given: What its own settings give it; 0 if the plan chooses.
        transfer: What the learner's process keeps to hand weights over.
        of_torch: As much of that as torch holds.
        adapters: Bytes of the adapters in its dtype, if it can compute with them, and the learner with its weights; 0
            if it can't.
    """

    weights: int = 0
    beside: int = 0
    cache: int = 0
    least: int = 0
    calls: int = 0
    asleep: int = 0
    given: int = 0
    transfer: int = 0
    of_torch: int = 0
    adapters: int = 0

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        weights: int,
        element: int,
        calls: int,
        length: int,
        context: int,
        prefill: int,
        sequences: int,
        beside: int,
        cache: int = 0,
        **more: int,
    ) -> ServerNeed:
        """Return what a server of a model needs.

        Args:
            shape: The model's sizes.
            weights: Bytes of its weights.
            element: Bytes of one number.
            calls: How many calls run at once.
            length: Most tokens of a call, prompt and answer.
            context: Most tokens that it takes.
            prefill: Tokens of prompts that go through the model at once.
            sequences: Most requests that it samples at once.
            beside: Bytes of libraries and graphs, whatever the model is.
            cache: Bytes for keys and values that its settings give it; 0 for those of all calls.
            **more: `asleep`, `given`, `transfer`, `of_torch`, `adapters`.
        """

        def kept(tokens: int) -> int:
            return shape.kv_bytes(tokens + 32) * element // 2  # a cache is made of blocks

        activations = prefill * (8 * shape.hidden + 3 * shape.intermediate) * element
        sampler = 20 * sequences * shape.vocabulary  # logits in fp32, and what sorting them takes
        return cls(
            weights=weights,
            beside=beside + activations + sampler,
            cache=cache or calls * kept(length),
            least=cache or kept(context),
            calls=calls,
            **more,
        )

    @property
    def lent(self) -> ServerNeed:
        """What it needs where the learner computes with its weights, and hands adapters over alone.

        It computes with a copy of them, keeps another one, and has a third while new ones come. The learner rounds
        them, and copies that into the buffer from which they are read.
        """
        beside, transfer = self.beside + 3 * self.adapters + LENDING, 2 * self.adapters
        return attrs.evolve(self, beside=beside, transfer=transfer, of_torch=min(self.of_torch, transfer))

    def memory(self, share: float = 1.0) -> int:
        """Return all that it takes, with a share of the cache of all calls."""
        return self.given or self.weights + self.beside + max(int(self.cache * share), self.least)


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
        checkpoint: Bytes of a checkpoint; 0 if the algorithm does not say.
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
    checkpoint: int = 0


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
    "qwen/qwen2.5-coder-7b-instruct": ModelShape(
        layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocabulary=152064, tied=False
    ),
    "meta-llama/llama-3.2-1b-instruct": ModelShape(
        layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocabulary=128256, tied=True
    ),
    "meta-llama/llama-3.2-3b-instruct": ModelShape(
        layers=28, hidden=3072, intermediate=8192, heads=24, kv_heads=8, head_dim=128, vocabulary=128256, tied=True
    ),
}
"""Shapes of the reference profiles' models and of larger ones of their families, by lower-case name, from their
published `config.json`, so that the doctor can judge a recipe before the model is downloaded."""
